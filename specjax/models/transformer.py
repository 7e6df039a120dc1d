"""One decoder-only transformer: token ids in, logits, hidden states and an updated KV cache out. `ModelConfig` says
what differs between model families; the parts are in `specjax.models.layers`.

Weights live in flax NNX modules; `Model` is the functional view that the engine uses: only the config is static, and
parameters are always a traced argument.

Dims: B rows, T tokens fed, S cache slots, V vocabulary, D hidden, R tokens of the block whose logits are asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from specjax import interfaces
from specjax.interfaces import NOTHING, Documents, Output, Params, Reads
from specjax.models import kernels
from specjax.models.attention.kv_source import KVSource, kv_sources
from specjax.models.attention.stored import OneOf
from specjax.models.cache import KVCache, Windows
from specjax.models.config import LayerKind, ModelConfig
from specjax.models.layers import MLP, Attention, ExpertMLP, InitKeys, Linear, make_norm
from specjax.models.products import rows_of, soft_capped
from specjax.models.rotary import Total, rotary_table
from specjax.models.sharding import ROWS, constrained
from specjax.models.vocabulary import DraftVocabulary


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, kind: LayerKind, *, rngs: nnx.Rngs, dtype: DTypeLike):
        norm = functools.partial(make_norm, config, config.hidden_size, dtype=dtype)
        placement, self.residual = config.norm.placement, config.residual
        self.residual_multiplier = config.residual_multiplier
        self.attention_norm = norm() if placement != "post" else None
        self.attention = Attention(config, kind, rngs=rngs, dtype=dtype)
        self.attention_post_norm = norm() if placement != "pre" else None
        self.mlp_norm = norm() if placement != "post" and self.residual != "parallel_one_norm" else None
        if config.experts is None or kind.dense:
            self.mlp = MLP(config, rngs=rngs, dtype=dtype)
        else:
            self.mlp, self.experts = None, ExpertMLP(config, rngs=rngs, dtype=dtype)
        self.mlp_post_norm = norm() if placement != "pre" else None

    @property
    def feed_forward(self) -> MLP | ExpertMLP:
        return self.experts if self.mlp is None else self.mlp

    def __call__(self, x, rotary, kv: KVSource):
        """Returns (x, the layer's keys and values including those of the tokens fed, those of the tokens fed alone)."""
        read = normed(self.attention_norm, x)
        attended, layer, fed = self.attention(read, rotary, kv)
        attended = normed(self.attention_post_norm, attended)
        if self.residual == "sequential":
            x = self.add(x, attended)
            return self.add(x, self.fed_forward(normed(self.mlp_norm, x))), layer, fed
        if self.residual == "parallel":
            read = normed(self.mlp_norm, x)
        return self.add(x, attended + self.fed_forward(read)), layer, fed

    def fed_forward(self, x):
        return normed(self.mlp_post_norm, self.feed_forward(x))

    def add(self, x, change):
        return x + (change if self.residual_multiplier == 1 else change * self.residual_multiplier)


def normed(norm, x):
    return x if norm is None else norm(x)


@functools.partial(jax.jit, static_argnums=0)
def _through(graph: Any, weights: Any, x, rotary, kv):
    """A block's output. As a function of its own it is traced and lowered once for all layers alike; the compiler puts
    it in line again."""
    return nnx.merge(graph, weights)(x, rotary, kv)


class Transformer(nnx.Module):
    """Modules that hold the weights. They compute in ``dtype`` and are initialised in it: at variance 1/fan_in,
    residual outputs scaled down by depth (GPT-2)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: str = "float32", looped: bool = False):
        self.config, self.dtype, self.looped = config, dtype, looped

        def embedding(count: int) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs.params(), (count, config.hidden_size), dtype) * 0.02)

        self.embedding = embedding(config.vocab_size)
        if config.learned_positions:
            self.position_embedding = embedding(config.max_positions)
        # In a loop, one block has the parameters of all layers side by side.
        count = 1 if looped else config.num_layers
        self.layers = nnx.List([Block(config, config.layer(i), rngs=rngs, dtype=dtype) for i in range(count)])
        self.norm = make_norm(config, config.hidden_size, dtype=dtype)
        if not config.tie_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, rngs=rngs, dtype=dtype)
        if config.narrow_head:
            self.narrow_head = Linear(config.hidden_size, config.narrow_head, rngs=rngs, dtype=dtype)
        depth_scale = (2 * config.num_layers) ** -0.5
        for block in self.layers:
            for linear in (block.attention.o_proj, block.feed_forward.down_proj):
                linear.kernel.set_value(linear.kernel.get_value() * depth_scale)

    def __call__(self, tokens, positions, slots, cache, mask, reads: Reads, mesh: Mesh | None = None):
        """Returns the fields hidden, cache, keys_values and final of `Output`."""
        config = self.config
        x, contexts = self.embed(tokens, positions, slots, cache, mask, mesh)
        if self.looped:
            return self._looped(x, contexts, cache, slots is not None and mask is not None, reads)
        x = constrained(x, mesh, ROWS, None, None)
        cached = None if cache is None else cache.fold().layers
        streams, fed, written = [x], [], []
        for index, block in enumerate(self.layers):
            rotary, kv = contexts[config.layer(index)]
            if cached is None:
                x, layer, of_block = block(x, rotary, kv)
            else:
                x, layer, of_block = _through(*nnx.split(block), x, rotary, kv.over(cached[index]))
            x = constrained(x, mesh, ROWS, None, None)
            streams.append(x)
            fed.append(of_block)
            written.append(layer)
        if cache is not None:
            cache = cache.written(written, None if slots is None or mask is None else fed)
        hidden, keys_values = tuple(streams[i] for i in reads.hidden_layers), tuple(fed[i] for i in reads.kv_layers)
        return hidden, cache, keys_values, self.norm(x)

    def _looped(self, x, contexts, cache: KVCache | None, is_tree: bool, reads: Reads):
        """The fields that `__call__` returns, by a loop over equal layers, which carries the caches of all of them."""
        rotary, kv = contexts[self.config.layer(0)]
        graph, state = nnx.split(self.layers[0])
        weights, keeps_block = nnx.to_pure_dict(state), is_tree and cache is not None

        def through(carry: Any, number: Int[Array, ""]) -> tuple[Any, Any]:
            x, cached = carry
            source = kv if cached is None else kv.over(OneOf(cached, number))
            own = nnx.State(kernels.layer_of(weights, number))
            x, layer, fed = _through(graph, own, x, rotary, source)
            left = (x if reads.hidden_layers else None, fed if reads.kv_layers or keeps_block else None)
            return (x, None if cached is None else layer.layers), left

        start: Any = x, None if cache is None else cache.fold().layers[0]
        found: Any = jax.lax.scan(through, start, jnp.arange(self.config.num_layers, dtype=jnp.int32))
        (final, cached), (streams, fed) = found
        if cache is not None:
            cache = cache.written((cached,), (fed,) if keeps_block else None)
        hidden = tuple(x if i == 0 else streams[i - 1] for i in reads.hidden_layers)
        keys_values = tuple((fed[0][i], fed[1][i]) for i in reads.kv_layers)
        return hidden, cache, keys_values, self.norm(final)

    def embed(self, tokens, positions, slots, cache, mask, mesh: Mesh | None = None):
        """Input of the first layer, and for each kind of layer (its rotary table, the keys and values that it attends
        to)."""
        tables = self.rotary(positions, tokens.shape[1] if cache is None else cache.total)
        attended = kv_sources(cache, positions, slots, mask, (kind.window for kind in self.config.layers), mesh)
        contexts = {kind: (table, attended[kind.window]) for kind, table in tables.items()}
        return self.embedded(tokens, positions), contexts

    def embedded(self, tokens, positions):
        """Input of the first layer."""
        config = self.config
        x = rows_of(self.embedding[...], tokens, self.dtype)
        if config.learned_positions:
            x = x + rows_of(self.position_embedding[...], positions, x.dtype)
        if config.embedding_multiplier != 1:
            x = x * jnp.asarray(config.embedding_multiplier, x.dtype)
        return x

    def rotary(self, positions, total: Total):
        """Rotary table of each kind of layer; None for a kind without one."""
        config = self.config
        tables = {rope: rotary_table(positions, rope, config.head_dim, self.dtype, total) for rope in config.ropes}
        return {kind: None if kind.rope is None else tables[kind.rope] for kind in config.layers}

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in float32, whatever the dtype of the weights: of all ids, or of those of a narrow head."""
        config = self.config
        if config.narrow_head:
            logits = self.narrow_head(x, wide=True)
        elif config.tie_embeddings:
            logits = kernels.multiply(x, kernels.Dense(self.embedding[...], by_row=True), wide=True)
        else:
            logits = self.head(x, wide=True)
        if config.logit_multiplier != 1:
            logits = logits * config.logit_multiplier
        return soft_capped(logits, config.logit_soft_cap)


@functools.lru_cache(maxsize=64)
def _graphdef(config: ModelConfig, dtype: str, looped: bool) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=InitKeys(0), dtype=dtype, looped=looped)))[0]


@dataclasses.dataclass(frozen=True)
class Model(interfaces.Model):
    """A `Transformer` as a pure function of its parameters; static and hashable.
    ``dtype``: the one it computes in, whatever the parameters are stored in. ``mesh``: the devices that its weights lie
    over for decoding. The heads of its cache are split as the weights' are, its rows over the other axes, and the
    outputs of a pass by rows alone."""

    takes_documents: ClassVar[bool] = True
    config: ModelConfig
    dtype: str = "float32"
    mesh: Mesh | None = dataclasses.field(default=None, kw_only=True)
    cache_dtype: str | None = dataclasses.field(default=None, kw_only=True)
    """Dtype of its KV cache; int8: with a scale for each vector; None: the dtype that it computes in."""
    vocabulary: DraftVocabulary | None = dataclasses.field(default=None, kw_only=True)
    """Ids that it proposes as a draft; only their logits are computed. None: all ids."""
    looped: bool = dataclasses.field(default=False, kw_only=True)
    """True if its layers, which are equal and without a window, run as a loop; their parameters are side by side in one
    array each, in place of those of layer 0."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self.config.windows

    @property
    def dynamic_limit(self) -> int | None:
        return self.config.dynamic_limit

    def widest(self) -> int:
        return self.config.widest()

    def init(self, key: Array, dtype: str | None = None) -> Params:
        """Fresh parameters, a nested dict of arrays; ``dtype`` None: the one it computes in."""
        _, state = nnx.split(Transformer(self.config, rngs=InitKeys(key), dtype=dtype or self.dtype))
        return nnx.to_pure_dict(state)

    def module(self, params: Params) -> Transformer:
        """The NNX module that holds ``params``."""
        return nnx.merge(_graphdef(self.config, self.dtype, self.looped), nnx.State(params))

    def layer(self, params: Params, number: int) -> Any:
        """Parameters of one of its layers."""
        return kernels.layer_of(params["layers"][0], number) if self.looped else params["layers"][number]

    def init_cache(
        self,
        batch: int,
        num_slots: int,
        dtype: DTypeLike | None = None,
        room: int | None = None,
        whole: Sequence[int] = (),
    ) -> KVCache:
        """Empty cache; ``dtype`` None: `cache_dtype`. If rows choose their rotary frequencies,
        `specjax.models.cache.with_total` tells the cache how long they will get; until then they count as short.

        ``room``: layers with a window, except the ``whole`` ones, hold no more than they see and ``room`` more tokens,
        which may be fed before the next `specjax.models.cache.slide`. None: all layers hold everything."""
        config, dtype = self.config, (self.cache_dtype or self.dtype) if dtype is None else dtype
        of_layers = tuple(None if i in whole else window for i, window in enumerate(config.windows))
        windows = None if room is None or not any(of_layers) else Windows(of_layers, room, num_slots)
        sizes = batch, num_slots, config.num_kv_heads, config.head_dim
        cache = KVCache.zeros(config.num_layers, *sizes, dtype, windows, self.looped)
        total = jnp.zeros((batch,), jnp.int32) if config.rows_choose_frequencies else None

        def placed(x: Array) -> Array:
            return constrained(x, self.mesh, *(ROWS, "tensor")[: x.ndim])

        layers = jax.tree.map(placed, cache.layers)
        return dataclasses.replace(cache, layers=layers, total=total, spread=self.mesh is not None)

    def head(self, params: Params, final: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of the ``final`` output of a forward pass."""
        if self.vocabulary is None:
            return self.module(params).logits(final)
        return self.vocabulary.over_all(self.logits_of_few(params, final))

    def logits_of_few(self, params: Params, final: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        """Logits of the ids of its ``vocabulary`` alone, ascending."""
        assert self.vocabulary is not None
        if self.config.narrow_head:
            return self.module(params).logits(final)
        narrowed = self.narrowed(params, self.vocabulary.ids)
        if narrowed is None:
            return self.module(params).logits(final)[..., self.vocabulary.ids]
        return self.module(narrowed).logits(final)

    def narrowed(self, params: Params, ids: Int[np.ndarray, " W"]) -> Params | None:
        name = "embedding" if self.config.tie_embeddings else "head"
        if any(isinstance(leaf, kernels.Kernel) for leaf in kernels.leaves_of(params[name])):
            return None
        if self.config.tie_embeddings:
            return {**params, name: params[name][ids]}
        return {**params, name: jax.tree.map(lambda x: x[..., ids], params[name])}

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        slots: Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
        mask: Bool[Array, "B T T"] | Documents | None = None,
        reads: Reads = NOTHING,
        rows: Int[Array, "B R"] | None = None,
    ) -> Output:
        """Feed T tokens a row. With a cache (folded or not), they are written to ``slots`` (contiguous in each row) and
        attend to every earlier slot. Returns logits of the tokens of the block that ``rows`` names (default: all T),
        the states that ``reads`` names, and the new cache."""
        module = self.module(params)
        hidden, cache, keys_values, final = module(tokens, positions, slots, cache, mask, reads, self.mesh)
        wanted = final if rows is None else jnp.take_along_axis(final, rows[..., None], axis=1)
        logits = module.logits(wanted) if self.vocabulary is None else self.head(params, wanted)
        logits = constrained(logits, self.mesh, ROWS, None, None)
        return Output(logits, hidden, cache, keys_values, final)


def param_shapes(spec: Any) -> Params:
    """Shapes and dtypes of the parameters that ``spec.init`` makes, without making an array: the key, too, is
    abstract."""
    return jax.tree.map(lambda shape: shape, _shapes_of(spec))  # a dict of the caller's own


@functools.lru_cache(maxsize=64)
def _shapes_of(spec: Any) -> Params:
    return jax.eval_shape(lambda: spec.init(jax.random.key(0)))
