"""The forward pass of a transformer for training: whole rows without a cache, the layers rematerialised (1604.06174)
or scanned. What it computes is what `specjax.models.transformer.Model` computes.

Dims: B rows, T tokens fed, D hidden.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from specjax.errors import ConfigError
from specjax.models.config import LayerKind, ModelConfig
from specjax.models.transformer import Block, Model
from specjax.types import Output, Params


@dataclasses.dataclass(frozen=True)
class TrainingModel(Model):
    """``remat``: the backward pass computes each layer's activations again. ``scan_layers``: the layers of a repeating
    pattern run as one compiled loop, over a stacked copy of their weights. ``rows``: how [B, T, D] lies between layers,
    over a mesh; otherwise XLA may move activations where it should gather weights.

    Raises `ConfigError` if the layers to scan repeat no pattern.
    """

    remat: bool = False
    scan_layers: bool = False
    rows: NamedSharding | None = None

    def __post_init__(self) -> None:
        layers = self.config.num_layers
        if self.scan_layers and self.period == layers > 1:
            raise ConfigError(f"scan_layers: the kinds of the {layers} layers repeat no pattern; set scan_layers=false")

    @property
    def period(self) -> int:
        """Layers after which their kinds repeat."""
        count = self.config.num_layers
        kinds = [self.config.layer(i) for i in range(count)]
        return next(p for p in range(1, count + 1) if count % p == 0 and kinds == kinds[:p] * (count // p))

    def __call__(
        self, params, tokens, positions, slots=None, cache=None, mask=None, hidden_layers=(), rows=None
    ) -> Output:
        if cache is not None or hidden_layers or rows is not None:
            return super().__call__(params, tokens, positions, slots, cache, mask, hidden_layers, rows)
        if self.rows is not None:  # whole rows of it, or what is looked up would lie as its columns do
            wanted = NamedSharding(self.rows.mesh, PartitionSpec(PartitionSpec.UNCONSTRAINED, None))
            params = {**params, "embedding": jax.lax.with_sharding_constraint(params["embedding"], wanted)}
        module = self.module(params)
        x, contexts = module.embed(tokens, positions, slots, None, mask)
        x = module.norm(self._through(params["layers"], self._placed(x), contexts))
        return Output(module.logits(x), (x,), None)

    def _through(self, layers: Params, x: Float[Array, "B T D"], contexts) -> Float[Array, "B T D"]:
        def block(kind: LayerKind, x, layer: Params):
            rotary, visible = contexts[kind]
            x, _ = block_of(self.config, kind, layer)(x, rotary, None, None, visible)
            return self._placed(x)

        if self.remat:
            # Inside a loop, XLA does not find the same computation twice, and need not be kept from it.
            block = jax.checkpoint(block, static_argnums=0, prevent_cse=not self.scan_layers)
        if not self.scan_layers:
            for i in range(self.config.num_layers):
                x = block(self.config.layer(i), x, layers[i])
            return x
        period = range(self.period)
        stacked = tuple(
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layers[i] for i in range(j, len(layers), self.period)))
            for j in period
        )

        def repeat(x, one: tuple[Params, ...]):
            for j in period:
                x = block(self.config.layer(j), x, one[j])
            return x, None

        return jax.lax.scan(repeat, x, stacked)[0]

    def _placed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return x if self.rows is None else jax.lax.with_sharding_constraint(x, self.rows)


def block_of(config: ModelConfig, kind: LayerKind, layer: Params) -> Block:
    """The NNX module of one layer that holds its parameters ``layer``."""
    return nnx.merge(_block(config, kind), nnx.State(layer))


@functools.lru_cache(maxsize=64)
def _block(config: ModelConfig, kind: LayerKind) -> nnx.GraphDef:
    make = functools.partial(Block, config, kind, dtype=jnp.float32)
    return nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))[0]
