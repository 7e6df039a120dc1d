"""EAGLE-3 (2503.01840): a small transformer that reads what the target's layers made of the tokens before. Its row of
token t is (embedding of x_t, features of x_{t-1}), and predicts x_{t+1}: at the root the features of the token before
are known, those of the root are not. Behind the root, what its own last layer made of the token before stands in for
features (multi-step unroll in training, so that it learns to read its own).

In decoding, keys and values of a committed token's row are those of true features: after verification the rows of a
block are made again from what the target computed, and what was guessed is overwritten. The first token of a row has no
features before it, and no row. So row t lies in slot t - 1.

In training the same, with every position as a root: at depth d position t ends a block whose root is at t - d. It sees
the rows of true features up to the root's, t - d, and its own of depths 1 .. d behind it.

Dims: B rows, T positions, K tokens of a block, N rows written at a time, D depths, C captured streams, S features of
the target's, H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key
from pydantic import Field

from specjax.drafters.base import TrainedDrafter
from specjax.drafters.glide import Own, inside_document
from specjax.drafters.one_by_one import one_by_one
from specjax.errors import ConfigError, ModelError
from specjax.models import hf
from specjax.models.attention.blocks import attend, attend_to_both
from specjax.models.attention.memory import Attended, memories
from specjax.models.attention.sight import Sight
from specjax.models.attention.stored import Layer
from specjax.models.cache import KVCache
from specjax.models.config import LayerKind, ModelConfig
from specjax.models.families import Family, Settings, family_of
from specjax.models.families.base import Tensor, linear, norm
from specjax.models.files import read_json, verify_manifest, write_json
from specjax.models.layers import MLP, Attention, Linear, make_norm
from specjax.models.rotary import rotary_table
from specjax.models.sharding import sharding_of
from specjax.models.weights import narrowest, read_params, write_params
from specjax.types import (
    PLAIN,
    Batch,
    Bound,
    Context,
    Draft,
    Outcome,
    Output,
    Params,
    Prediction,
    Reads,
    TargetView,
    TrainingForm,
)

if TYPE_CHECKING:
    from specjax.config import RunConfig
    from specjax.data.rows import Rows as TextRows
    from specjax.distill.init import Initial


@dataclasses.dataclass(frozen=True)
class Options:
    """What differs between published drafts."""

    norm_before_residual: bool = True
    """The stream goes on with the normed features, not with the features."""
    norm_output: bool = False
    """What stands in for features is normed, as what the head reads is (EAGLE-3.1)."""
    norm_before_fc: bool = False
    """Captured layers are normed together before they are mixed."""
    fc_norm: bool = False
    """Captured layers are normed each by itself before they are mixed (EAGLE-3.1)."""


class FirstBlock(nnx.Module):
    """A layer whose attention reads token and features side by side."""

    def __init__(self, config: ModelConfig, kind: LayerKind, options: Options, *, rngs: nnx.Rngs, dtype: DTypeLike):
        norm = functools.partial(make_norm, config, config.hidden_size, dtype=dtype)
        self.token_norm, self.hidden_norm, self.mlp_norm = norm(), norm(), norm()
        self.attention = Attention(config, kind, rngs=rngs, dtype=dtype, inputs=2 * config.hidden_size)
        self.mlp = MLP(config, rngs=rngs, dtype=dtype)
        self.normed_residual = options.norm_before_residual

    def __call__(self, token, features, rotary, memory: Attended):
        """Returns (x, the layer's keys and values with those of the tokens fed)."""
        normed = self.hidden_norm(features)
        read = jnp.concatenate([self.token_norm(token), normed], axis=-1)
        attended, layer, _ = self.attention(read, rotary, memory)
        x = (normed if self.normed_residual else features) + attended
        return x + self.mlp(self.mlp_norm(x)), layer


class Net(nnx.Module):
    """The weights."""

    def __init__(self, spec: Eagle3Model, *, rngs: nnx.Rngs):
        config, dtype, options = spec.config, spec.dtype, spec.options
        captured = len(spec.reads)
        self.embedding = nnx.Param(
            jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), dtype) * 0.02
        )
        self.fc = Linear(captured * spec.feature_size, config.hidden_size, rngs=rngs, dtype=dtype)
        if options.norm_before_fc:
            self.input_norm = make_norm(config, captured * spec.feature_size, dtype=dtype)
        if options.fc_norm:
            self.fc_norms = nnx.List([make_norm(config, spec.feature_size, dtype=dtype) for _ in range(captured)])
        self.layer = FirstBlock(config, config.layer(0), options, rngs=rngs, dtype=dtype)
        self.norm = make_norm(config, config.hidden_size, dtype=dtype)
        self.head = Linear(config.hidden_size, config.vocab_size, rngs=rngs, dtype=dtype)


@functools.lru_cache(maxsize=64)
def _graphdef(spec: Eagle3Model) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: Net(spec, rngs=nnx.Rngs(0))))[0]


@dataclasses.dataclass(frozen=True)
class Eagle3Model:
    """A forward pass, a function of its parameters. ``config``: of one layer, with the target's vocabulary; ``reads``:
    the streams of the target that it captures (0: its embeddings, i: what leaves its layer i - 1), ``feature_size``
    numbers of each."""

    config: ModelConfig
    reads: tuple[int, ...]
    feature_size: int
    options: Options = Options()
    dtype: str = "float32"

    def init(self, key: Array) -> Params:
        """Fresh parameters, a nested dict of arrays."""
        return nnx.to_pure_dict(nnx.split(Net(self, rngs=nnx.Rngs(params=key)))[1])

    def module(self, params: Params) -> Net:
        """The NNX module that holds ``params``."""
        return nnx.merge(_graphdef(self), nnx.State(params))

    def features(self, params: Params, hidden: tuple[Float[Array, "B T S"], ...]) -> Float[Array, "B T H"]:
        """What the draft reads of the target's captured streams."""
        module, hidden = self.module(params), tuple(x.astype(self.dtype) for x in hidden)
        if self.options.fc_norm:
            hidden = tuple(norm(x) for norm, x in zip(module.fc_norms, hidden, strict=True))
        together = jnp.concatenate(hidden, axis=-1)
        return module.fc(module.input_norm(together) if self.options.norm_before_fc else together)

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        features: Float[Array, "B T H"],
        positions: Int[Array, "B T"],
        memory: Attended,
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"], Any]:
        """Rows of ``tokens``: (what the head reads, what stands in for features of these tokens, the layer's keys and
        values)."""
        module, config, kind = self.module(params), self.config, self.config.layer(0)
        embedded = module.embedding[...][tokens].astype(self.dtype)
        table = None if kind.rope is None else rotary_table(positions, kind.rope, config.head_dim, self.dtype, None)
        x, layer = module.layer(embedded, features.astype(self.dtype), table, memory)
        final = module.norm(x)
        return final, final if self.options.norm_output else x, layer

    def head(self, params: Params, final: Float[Array, "B T H"]) -> Float[Array, "B T V"]:
        """Logits, in float32."""
        return self.module(params).head(final, wide=True)


# --- decoding -------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """Keys and values of committed rows, and the features of the token before the root."""

    cache: KVCache
    features: Float[Array, "B H"]


@dataclasses.dataclass(frozen=True)
class BoundEagle3:
    """What the engine runs."""

    model: Eagle3Model
    k: int

    @property
    def reads(self) -> Reads:
        return Reads(hidden_layers=self.model.reads)

    @property
    def max_positions(self) -> int:
        return self.model.config.max_positions

    def init(self, batch: int, num_slots: int) -> State:
        config = self.model.config
        cache = KVCache.zeros(1, batch, num_slots, config.num_kv_heads, config.head_dim, self.model.dtype)
        return State(cache, jnp.zeros((batch, config.hidden_size), self.model.dtype))

    def extend(
        self,
        params: Params,
        state: State,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        target_out: Output,
        start: Int[Array, " B"] | None = None,
    ) -> State:
        """The rows of prompt tokens: their keys and values alone, since nothing else is read of them."""
        made = self.model.features(params, target_out.hidden)
        before = jnp.concatenate([state.features[:, None], made[:, :-1]], axis=1)
        start = jnp.zeros(len(tokens), jnp.int32) if start is None else start
        cache = self._kept(params, state.cache, tokens, before, start)
        return State(cache, jnp.where((lengths > 0)[:, None], _at(made, lengths - 1), state.features))

    def draft(self, params: Params, target: TargetView, state: State, context: Context) -> tuple[Draft, State]:
        """One pass a token, the root's first. Without a token before the root there is nothing to read, nor a draft."""
        root = jnp.take_along_axis(context.tokens, (context.lengths - 1)[:, None], axis=1)
        slot = jnp.maximum(context.lengths - 2, 0)[:, None]

        def feed(carry: tuple[KVCache, Array], newest: Int[Array, "B 1"], offset: Int[Array, ""]) -> tuple[Any, Any]:
            cache, features = carry
            final, features, cache = self._pass(params, cache, newest, features, slot + offset)
            return self.model.head(params, final), (cache, features)

        draft, (cache, _), _ = one_by_one(feed, (state.cache, state.features[:, None]), root, context, self.k)
        draft = dataclasses.replace(draft, valid=draft.valid & (context.lengths > 1)[:, None])
        return draft, state._replace(cache=cache)

    def commit(self, params: Params, state: State, outcome: Outcome) -> State:
        """The block's rows as the target's features make them, from the root's to that of the target's own token."""
        start = outcome.context.lengths - 1
        root = jnp.take_along_axis(outcome.context.tokens, start[:, None], axis=1)
        made = self.model.features(params, outcome.target_out.hidden)
        tokens = jnp.concatenate([root, outcome.tokens], axis=1)
        before = jnp.concatenate([state.features[:, None], made], axis=1)
        return State(self._kept(params, state.cache, tokens, before, start), _at(made, outcome.verdict.num_accepted))

    def _kept(
        self,
        params: Params,
        cache: KVCache,
        tokens: Int[Array, "B N"],
        before: Float[Array, "B N H"],
        start: Int[Array, " B"],
    ) -> KVCache:
        """With the rows of ``tokens``, of which the first is at position ``start[b]``; a row's first has none, and what
        is then written behind the last is overwritten."""
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        skipped = (start == 0).astype(jnp.int32)
        chosen = jnp.minimum(index + skipped[:, None], tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(tokens, chosen, axis=1)
        before = jnp.take_along_axis(before, chosen[..., None], axis=1)
        return self._pass(params, cache, tokens, before, jnp.maximum(start - 1, 0)[:, None] + index)[2]

    def _pass(
        self, params: Params, cache: KVCache, tokens: Array, features: Array, slots: Int[Array, "B N"]
    ) -> tuple[Array, Array, KVCache]:
        """Rows at these slots: (what the head reads, what stands in for features, the cache)."""
        window = self.model.config.layer(0).window
        memory = memories(cache, slots, slots, None, (window,))[window].over(cache.fold().layers[0])
        final, features, layer = self.model(params, tokens, features, slots + 1, memory)
        return final, features, cache.written((layer,))


def _at(x: Float[Array, "B T H"], index: Int[Array, " B"]) -> Float[Array, "B H"]:
    return jnp.take_along_axis(x, jnp.maximum(index, 0)[:, None, None], axis=1)[:, 0]


# --- training -------------------------------------------------------------------------------------------------------


@flax.struct.dataclass
class Rows:
    """The rows of true features see each other."""

    sight: Sight

    def attend(self, q, k, v, scale: float | None = None, soft_cap: float | None = None) -> tuple[Array, Layer]:
        """See `specjax.models.attention.memory.Attended`."""
        layer = Layer.of(k, v)
        return attend(q, *layer, self.sight, scale, soft_cap), layer


@flax.struct.dataclass
class Unrolled:
    """Rows of a later depth see those of true features, and what precedes them in their own block."""

    true: Layer
    sight: Sight
    own: Own
    place: int

    def attend(self, q, k, v, scale: float | None = None, soft_cap: float | None = None) -> tuple[Array, Own]:
        """See `specjax.models.attention.memory.Attended`."""

        def put(old: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new[:, :, None].astype(old.dtype), self.place, axis=2)

        own = Own(put(self.own.keys, k), put(self.own.values, v))
        reached = jnp.arange(own.keys.shape[2], dtype=jnp.int32) <= self.place
        return attend_to_both(q, self.true, self.sight, own, reached, scale, soft_cap), own


@dataclasses.dataclass(frozen=True)
class TrainedEagle3(TrainedDrafter):
    """In training. ``depths``: rows of a block that are unrolled; ``decay``: what a depth weighs beside the one
    before; ``shared``: parameters that are the target's own."""

    model: Eagle3Model
    depths: int = 3
    decay: float = 0.8
    shared: tuple[str, ...] = ()
    form: TrainingForm = PLAIN
    serving: ClassVar[str] = "A directory as the library speculators writes them: servers of that format read it too."
    library: ClassVar[str] = "speculators"

    @property
    def config(self) -> ModelConfig:
        """The sizes of what is trained."""
        return self.model.config

    @property
    def reads(self) -> Reads:
        return Reads(hidden_layers=self.model.reads)

    def init_params(self, key: Key[Array, ""], target: Any) -> Params:
        return {name: value for name, value in self.model.init(key).items() if name not in self.shared}

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """Depth by depth, see the head of this file. What a block reads lies in its own document, or it does not
        count."""
        assert target_out is not None
        rows, fed = batch.tokens.shape
        tokens, positions = jnp.asarray(batch.tokens), batch.token_positions
        place, documents = jnp.arange(fed, dtype=jnp.int32), batch.documents
        of_queries = jnp.zeros((rows, fed), jnp.int32) if documents is None else documents.segments
        segments = of_queries, jnp.where(positions == 0, -1, of_queries)
        features = self.model.features(params, target_out.hidden)
        shares = [self.decay**depth for depth in range(self.depths)]
        config, true = self.config, None
        zeros = jnp.zeros((rows, fed, max(1, self.depths - 1), config.num_kv_heads, config.head_dim), self.model.dtype)
        own = Own(zeros, zeros)
        for depth, share in enumerate(shares):
            features = jnp.roll(features, 1, axis=1)  # of the token before
            sight = Sight((place - depth)[None], segments=segments)
            memory = Rows(sight) if true is None else Unrolled(true, sight, own, depth - 1)
            final, features, layer = self.model(params, tokens, features, positions, memory)
            weight = jnp.where(inside_document(documents, place - 1 - depth), jnp.asarray(batch.weight), 0.0)
            yield Prediction(final, functools.partial(self.model.head, params), weight, None, share / sum(shares))
            if true is None:
                true = layer
            else:  # the block that ends at t continues the one that ends at t - 1
                own = jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), layer)

    def at_depths(self, depths: int) -> TrainedEagle3:
        return dataclasses.replace(self, depths=depths)

    def complete(self, params: Params, target_params: Params) -> Params:
        """See `specjax.types.Sharing`."""
        shared = {name: _dense(target_params, name, params["norm"]["scale"].dtype) for name in self.shared}
        return {**params, **shared}

    def in_training(self, form: TrainingForm) -> TrainedEagle3:
        if form.scan_layers:
            raise ConfigError("scan_layers: an eagle3 draft has one layer; set it false")
        model = dataclasses.replace(self.model, dtype=form.dtype or self.model.dtype)
        return dataclasses.replace(self, model=model, form=form)

    def parameter_sharding(
        self, path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh
    ) -> NamedSharding | None:
        return sharding_of(path, shape, self.model.config, mesh)

    def to_drafter(self, params: Params, target: Any, k: int) -> Eagle3:
        return Eagle3(LoadedEagle3(self.model, params), k)

    def save(self, params: Params, target: Any, directory: Path, *, name: str = "draft", card: str | None = None):
        """A directory of the library speculators, which `specjax.load_drafter` and servers of that format read."""
        save_eagle3(LoadedEagle3(self.model, params, name), directory, target.name, card)


def _dense(params: Params, name: str, dtype: Any) -> Any:
    """The target's parameter of that name; of a tied head, its embedding."""
    if name == "head" and "head" not in params:
        return {"kernel": params["embedding"].T.astype(dtype)}
    return jax.tree.map(lambda x: x.astype(dtype), params[name])


# --- loaded, and on disk --------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class LoadedEagle3:
    """A draft's weights and what computes with them."""

    spec: Eagle3Model
    params: Params
    name: str = "draft"


@dataclasses.dataclass(frozen=True)
class Eagle3:
    """A draft that reads its target's hidden states (EAGLE-3, 2503.01840), and proposes ``k`` tokens one by one."""

    model: Any
    """A `LoadedEagle3`, or the directory of one or of the run that left it."""
    k: Annotated[int, Field(ge=1, le=64)] = 5
    """Tokens of a block, 1 to 64."""
    kind: Literal["eagle3"] = "eagle3"
    """Name in the registry, in configs and in results."""

    @classmethod
    def load(cls, directory: str | os.PathLike, target: Any, k: int, check_finite: bool = True) -> Eagle3:
        """See `specjax.drafters.loading.load_drafter`.

        Args:
            directory: what `save_eagle3` wrote, or its hub id.
            target: the `LoadedModel` whose dtype the weights are cast to.
            k: draft tokens a block.
            check_finite: refuse NaN and infinite weights.

        Returns:
            The drafter.

        Raises:
            ModelError: for what cannot be read.
        """
        return cls(load_eagle3(directory, str(target.dtype), check_finite), k)

    def bind(self, target: Any) -> Bound:
        """The draft beside its target.

        Args:
            target: the `LoadedModel` to speculate for.

        Returns:
            What the engine runs, and the draft's weights.

        Raises:
            ModelError: the draft reads what the target does not have, or it cannot be read itself.
        """
        named = isinstance(self.model, (str, os.PathLike))
        draft = load_eagle3(hf.draft_of(self.model), str(target.dtype)) if named else self.model
        check_readable(draft.spec, target.config)
        return Bound(BoundEagle3(draft.spec, self.k), draft.params)


def check_readable(draft: Eagle3Model, target: ModelConfig) -> None:
    """Raises `ModelError` with the reason unless ``draft`` can read a target of these sizes."""
    sizes = {"hidden_size": (draft.feature_size, target.hidden_size)}
    sizes["vocab_size"] = draft.config.vocab_size, target.vocab_size
    for name, (own, read) in sizes.items():
        if own != read:
            raise ModelError(
                f"eagle3: reads a target of {name}={own}, and this one has {read}; use the draft's own target, or "
                "distill one for this"
            )
    if max(draft.reads) > target.num_layers:
        raise ModelError(f"eagle3: reads stream {max(draft.reads)}, and the target has 0 .. {target.num_layers}")


_LAYER = "layers.0"
TENSORS: dict[str, Tensor] = {
    "embedding": Tensor("embed_tokens.weight"),
    **linear("fc", "fc"),
    **norm("input_norm", "input_norm"),
    **norm("fc_norms.{}", "fc_norm.{}"),
    **norm("layer.token_norm", f"{_LAYER}.input_layernorm"),
    **norm("layer.hidden_norm", f"{_LAYER}.hidden_norm"),
    **norm("layer.mlp_norm", f"{_LAYER}.post_attention_layernorm"),
    **norm("norm", "norm"),
    **linear("head", "lm_head"),
}
for _name in ("q_proj", "k_proj", "v_proj", "o_proj"):
    TENSORS |= linear(f"layer.attention.{_name}", f"{_LAYER}.self_attn.{_name}")
for _name in ("q_norm", "k_norm"):
    TENSORS |= norm(f"layer.attention.{_name}", f"{_LAYER}.self_attn.{_name}")
for _name in ("gate_proj", "up_proj", "down_proj"):
    TENSORS |= linear(f"layer.mlp.{_name}", f"{_LAYER}.mlp.{_name}")
"""Our parameters -> the tensors of speculators."""


def _stored_as(config: ModelConfig) -> Family:
    layers = family_of("qwen3" if config.qk_norm == "head" else "llama", "eagle3")
    return dataclasses.replace(layers, tensors=TENSORS, prefix="")


def save_eagle3(draft: LoadedEagle3, directory: str | os.PathLike, target: str, card: str | None = None) -> None:
    """Write a directory that `load_eagle3` and speculators read, in place of what is there. Raises `ModelError`."""
    spec, family = draft.spec, _stored_as(draft.spec.config)
    layers = {"model_type": family.model_type, **hf.described(family, spec.config)}
    dtype = narrowest(draft.params) or str(jnp.dtype(spec.dtype))
    settings = {
        hf.DRAFTER: "eagle3",
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "dtype": dtype,
        "transformer_layer_config": layers,
        "draft_vocab_size": spec.config.vocab_size,
        "target_hidden_size": spec.feature_size,
        "eagle_aux_hidden_state_layer_ids": list(spec.reads),
        **dataclasses.asdict(spec.options),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }

    def write(partial: Path) -> None:
        write_params(partial, draft.params, family, spec, dtype, hf.MAX_SHARD_BYTES)
        write_json(partial / "config.json", settings)
        (partial / hf.CARD).write_text(card or f"# {draft.name}\n\nAn EAGLE-3 draft.\n", encoding="utf-8")

    hf.write_directory(directory, True, write)


def load_eagle3(directory: str | os.PathLike, dtype: str = "float32", check_finite: bool = True) -> LoadedEagle3:
    """The draft that `save_eagle3` wrote. Raises `ModelError` for what cannot be read."""
    found = hf.resolve(directory)
    verify_manifest(found, ignored=(hf.CARD,))
    file = found / "config.json"
    settings = read_json(file)
    if settings.get("speculators_model_type") != "eagle3":
        raise ModelError(
            f"{file}: speculators_model_type={settings.get('speculators_model_type')!r} is no eagle3 draft"
        )
    layers, reads = settings.get("transformer_layer_config"), settings.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(layers, dict) or not isinstance(reads, list) or not all(type(i) is int for i in reads):
        raise ModelError(
            f"{file}: needs `transformer_layer_config` and `eagle_aux_hidden_state_layer_ids`, a list of layers"
        )
    config = family_of(layers.get("model_type"), file).read_config(Settings(layers, file))
    size = settings.get("target_hidden_size") or config.hidden_size
    options = Options(**{f.name: bool(settings.get(f.name, f.default)) for f in dataclasses.fields(Options)})
    spec = Eagle3Model(config, tuple(reads), size, options, dtype)
    params = read_params(found, _stored_as(config), spec, dtype, check_finite=check_finite)
    return LoadedEagle3(dataclasses.replace(spec, dtype=str(params["embedding"].dtype)), params, Path(directory).name)


# --- as a config says it --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Eagle3Draft:
    """The section `draft` of a config: a layer of the target's sizes, with its embedding and head, frozen."""

    reads: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """The target's streams that it captures, ascending, i: what leaves layer i - 1; None: 2, L / 2 and L - 3 of L."""
    depths: Annotated[int, Field(ge=1, le=16)] = 3
    """Tokens of a block that training unrolls."""
    depth_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """What the loss of a depth weighs beside that of the one before."""
    norm_before_residual: bool = True
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    kind: Literal["eagle3"] = "eagle3"

    def draft(self, config: RunConfig, target: Any, rows: TextRows) -> Initial:
        from specjax.distill.init import Initial

        drafter, init = self.drafter(config, target), config.draft.init
        if init not in (None, "target", "scratch"):
            raise ConfigError(f"draft.init: {init!r}; an eagle3 draft begins as its target's last layer, or `scratch`")
        _, key = jax.random.split(jax.random.key(config.seed))
        params = drafter.init_params(key, target)
        if init != "scratch":
            hf.refuse_quantised(target.params, "draft.init: target")
            params = as_the_last_layer(drafter.model, params, target)
        return Initial(drafter, params)

    def drafter(self, config: RunConfig, target: Any) -> TrainedEagle3:
        full: ModelConfig = target.config
        if config.draft.architecture != type(config.draft.architecture)():
            raise ConfigError("draft.architecture: an eagle3 draft has its target's sizes; leave it out")
        count = full.num_layers
        reads = tuple(sorted({min(2, count), count // 2, max(count - 3, 0)})) if self.reads is None else self.reads
        if list(reads) != sorted(set(reads)) or not reads or reads[-1] > count:
            raise ConfigError(f"draft.reads: {list(reads)}; name some of the target's streams 0 .. {count}, ascending")
        options = Options(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Options)})
        model = Eagle3Model(layer_like(full), reads, full.hidden_size, options)
        return TrainedEagle3(model, self.depths, self.depth_decay, ("embedding", "head"))

    def load(self, directory: str | os.PathLike, target: Any, k: int, check_finite: bool = True) -> Eagle3:
        return Eagle3.load(directory, target, k, check_finite)


def layer_like(full: ModelConfig) -> ModelConfig:
    """One layer of Llama, or of Qwen 3, of a target's sizes."""
    rope = next((kind.rope for kind in reversed(full.layers) if kind.rope is not None), None)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_positions")
    like: dict[str, Any] = {name: getattr(full, name) for name in sizes}
    like |= {"qk_norm": "head"} if full.qk_norm == "head" else {}
    return ModelConfig(**like, num_layers=1, layers=(LayerKind(rope=rope),), tie_embeddings=False)


def as_the_last_layer(model: Eagle3Model, params: Params, target: Any) -> Params:
    """``params`` with the target's final norm and, where it is of the same form, its last layer, whose attention reads
    the features as it read its stream: at first those of the deepest captured stream alone."""
    full, size = target.config, model.config.hidden_size
    fc = jnp.zeros_like(params["fc"]["kernel"]).at[-size:].set(jnp.eye(size))
    if not _like_llama(full):
        return {**params, "fc": {"kernel": fc}}
    last: Any = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), target.params["layers"][full.num_layers - 1])
    attention = {**params["layer"]["attention"], **last["attention"]}
    for name in ("q_proj", "k_proj", "v_proj"):
        kernel = last["attention"][name]["kernel"]
        attention[name] = {"kernel": jnp.concatenate([jnp.zeros_like(kernel), kernel])}
    norms = {"hidden_norm": last["attention_norm"], "mlp_norm": last["mlp_norm"]}
    layer = {**params["layer"], **norms, "attention": attention, "mlp": last["mlp"]}
    norm = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), target.params["norm"])
    return {**params, "fc": {"kernel": fc}, "layer": layer, "norm": norm}


def _like_llama(full: ModelConfig) -> bool:
    """Whether its layers are of the form of `layer_like`."""
    like = layer_like(full)
    kinds = dict.fromkeys(("num_layers", "layers", "tie_embeddings", "embedding_multiplier", "logit_multiplier"))
    return dataclasses.replace(full, **{name: getattr(like, name) for name in kinds}) == like
