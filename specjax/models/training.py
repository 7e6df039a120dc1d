"""Forward pass of a transformer for training: whole rows without a cache, the layers rematerialised (1604.06174) or
scanned. It computes what `specjax.models.transformer.Model` computes.

Dims: B rows, T tokens fed, D hidden.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from specjax.errors import ConfigError
from specjax.interfaces import NOTHING, Output, Params, Reads, TrainingForm
from specjax.models.config import LayerKind, ModelConfig
from specjax.models.layers import InitKeys
from specjax.models.transformer import Block, Model


@dataclasses.dataclass(frozen=True)
class TrainingModel(Model):
    """A `Model` in the form that training runs. ``remat``: the backward pass computes each layer's activations again.
    ``scan_layers``: the layers of a repeating pattern run as one compiled loop, over a stacked copy of their weights.
    ``sharding``: placement of [B, T, D] between layers, over a mesh; otherwise XLA may move activations where it should
    gather weights.

    Raises `ConfigError` if the layers to scan repeat no pattern.
    """

    remat: bool = False
    scan_layers: bool = False
    sharding: NamedSharding | None = None

    def __post_init__(self) -> None:
        layers = self.config.num_layers
        if self.scan_layers and self.period == layers > 1:
            raise ConfigError(f"scan_layers: the kinds of the {layers} layers repeat no pattern; set scan_layers=false")

    @property
    def period(self) -> int:
        """Number of layers after which their kinds repeat."""
        count = self.config.num_layers
        kinds = [self.config.layer(i) for i in range(count)]
        return next(p for p in range(1, count + 1) if count % p == 0 and kinds == kinds[:p] * (count // p))

    def __call__(
        self, params, tokens, positions, slots=None, cache=None, mask=None, reads=NOTHING, rows=None
    ) -> Output:
        if cache is not None or rows is not None:
            return super().__call__(params, tokens, positions, slots, cache, mask, reads, rows)
        params = gathered(params, self.sharding)
        module = self.module(params)
        mesh: Any = self.mesh if self.sharding is None else self.sharding.mesh
        x, contexts = module.embed(tokens, positions, slots, None, mask, mesh)
        x, streams, fed = self._through(params["layers"], placed(x, self.sharding), contexts, reads)
        final = module.norm(x)
        hidden = tuple(streams[i] for i in reads.hidden_layers)
        keys_values = tuple(fed[i] for i in reads.kv_layers)
        logits = module.logits(final) if self.vocabulary is None else self.head(params, final)
        return Output(logits, hidden, None, keys_values, final)

    def _through(self, layers: Params, x: Float[Array, "B T D"], contexts, reads: Reads) -> tuple[Array, dict, dict]:
        """Run all layers. Returns the output of the last layer, the streams that enter the layers (and leave the last
        one), and keys and values; of both at least those that ``reads`` names."""
        count, period = self.config.num_layers, range(self.period)

        def block(kind: LayerKind, wanted: bool, x, layer: Params):
            x, _, fed = block_of(self.config, kind, layer)(x, *contexts[kind])
            return placed(x, self.sharding), fed if wanted else ()

        if self.remat:
            # Inside a loop, XLA cannot merge the computation with its repetition, and need not be prevented.
            block = jax.checkpoint(block, static_argnums=(0, 1), prevent_cse=not self.scan_layers)
        streams, keys_values = {}, {}
        if not self.scan_layers:
            for i in range(count):
                streams[i] = x
                x, keys_values[i] = block(self.config.layer(i), i in reads.kv_layers, x, layers[i])
            return x, streams | {count: x}, keys_values
        # For each layer of the pattern, the loop returns all repetitions or none.
        read = [any(i % self.period == j for i in reads.hidden_layers if i < count) for j in period]
        read_keys = [any(i % self.period == j for i in reads.kv_layers) for j in period]
        stacked = tuple(
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layers[i] for i in range(j, len(layers), self.period)))
            for j in period
        )

        def repeat(x, one: tuple[Params, ...]):
            entering, fed = {}, {}
            for j in period:
                entering |= {j: x} if read[j] else {}
                x, of_block = block(self.config.layer(j), read_keys[j], x, one[j])
                fed |= {j: of_block} if read_keys[j] else {}
            return x, (entering, fed)

        x, found = jax.lax.scan(repeat, x, stacked)
        streams, keys_values = (
            {
                i * self.period + j: jax.tree.map(lambda leaf, i=i: leaf[i], of_place)
                for j, of_place in places.items()
                for i in range(count // self.period)
            }
            for places in found
        )
        return x, streams | {count: x}, keys_values


def placed(x: Float[Array, "B T D"], sharding: NamedSharding | None) -> Float[Array, "B T D"]:
    """``x`` placed as it should lie between layers; ``sharding`` None: unchanged."""
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def gathered(params: Params, sharding: NamedSharding | None) -> Params:
    """``params`` with whole rows of the embedding; otherwise the embedded tokens would be split as its columns are."""
    if sharding is None:
        return params
    wanted = NamedSharding(sharding.mesh, PartitionSpec(PartitionSpec.UNCONSTRAINED, None))
    return {**params, "embedding": jax.lax.with_sharding_constraint(params["embedding"], wanted)}


def training_model(model: Model, form: TrainingForm) -> Model:
    """``model`` as a stage runs it: a `TrainingModel`, or itself in another dtype if ``form`` asks for nothing else."""
    dtype = form.dtype or model.dtype
    if not (form.remat or form.scan_layers or form.sharding):
        return dataclasses.replace(model, dtype=dtype)
    return TrainingModel(model.config, dtype, form.remat, form.scan_layers, form.sharding)


def block_of(config: ModelConfig, kind: LayerKind, layer: Params) -> Block:
    """NNX module of one layer that holds the parameters ``layer``."""
    return nnx.merge(_block(config, kind), nnx.State(layer))


@functools.lru_cache(maxsize=64)
def _block(config: ModelConfig, kind: LayerKind) -> nnx.GraphDef:
    make = functools.partial(Block, config, kind, dtype=jnp.float32)
    return nnx.split(nnx.eval_shape(lambda: make(rngs=InitKeys(0))))[0]


def same_norm(full: ModelConfig) -> bool:
    """True if a model's final norm is RMSNorm without an offset, as Llama's is."""
    return full.norm.kind == "rms" and full.norm.offset == 0


def in_float32(params: Params) -> Params:
    """``params`` with their numbers in float32."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
