"""Base of the drafts that read the target's hidden states and lie between its embedding and its head. A kind adds its
weights and forward pass (`FeatureModel`), its drafting (a `specjax.interfaces.BoundDrafter`), its training
(`TrainedFeatureDraft`) and its stored form (`specjax.formats`). A *stream* is a hidden state by its number of layers:
stream i leaves i layers of the target.

Dims: B rows, T tokens fed, S features of the target's, H hidden, V vocabulary, W ids that the draft can propose.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import registry
from specjax.drafters.base import ModelDrafter
from specjax.errors import ConfigError, ModelError
from specjax.interfaces import (
    PLAIN,
    Bound,
    BoundDrafter,
    NarrowHead,
    Output,
    Params,
    Reads,
    Target,
    Trainable,
    TrainingForm,
)
from specjax.models.attention.kv_source import KVSource
from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.decode_layout import described, same_arrays, stored_kernels
from specjax.models.kernels import Transposed
from specjax.models.kernels.quantised import Scheme
from specjax.models.layers import InitKeys, Linear
from specjax.models.products import rows_of, soft_capped
from specjax.models.rotary import Rope, rotary_table
from specjax.models.sharding import sharding_of
from specjax.models.training import placed
from specjax.models.vocabulary import DraftVocabulary
from specjax.models.weights import quantised

EMBEDDING_AND_HEAD = ("embedding", "head")
"""Parameters that a draft may take unchanged from its target; a tied head is the embedding, no parameter of its own."""


# --- the forward pass -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FeatureModel:
    """A draft's forward pass, a function of its parameters; static and hashable. ``config``: configuration of its
    layers, with the target's vocabulary; ``reads``: the target's streams that it captures (0: the embeddings, i: the
    output of layer i - 1), each of ``feature_size`` numbers."""

    config: ModelConfig
    reads: tuple[int, ...]
    feature_size: int
    dtype: str = "float32"
    vocabulary: DraftVocabulary | None = None
    """The draft vocabulary, for each id of which the head has a row; None: all ids."""
    kind: ClassVar[str] = ""
    """Name of its kind in the registry, in configs and in results."""
    net: ClassVar[Callable[..., nnx.Module]]
    """Module of the weights, called with (spec, rngs)."""
    of_last: ClassVar[bool] = False
    """True: the draft reads the target's last stream, whatever its number."""
    candidates: ClassVar[int] = 0
    """Number of ids among which it chooses a token; 0: it draws from all."""
    window_at_root: ClassVar[bool] = True
    """True if a window is counted from the root of a block, False if from each slot."""

    def init(self, key: Array) -> Params:
        """Fresh parameters, a nested dict of arrays."""
        return nnx.to_pure_dict(nnx.split(self.net(self, rngs=InitKeys(key)))[1])

    def module(self, params: Params) -> Any:
        """The NNX module that holds ``params``."""
        return nnx.merge(_abstract(self)[0], nnx.State(params))

    @property
    def shapes(self) -> Params:
        """Shapes and dtypes of the parameters that `init` makes."""
        return nnx.to_pure_dict(_abstract(self)[1])

    @property
    def most(self) -> int | None:
        """Largest draft length; None: any."""
        return None

    def bound(self, k: int, draft: LoadedDraft, target: Target) -> Bound:
        """The form that the engine runs, which proposes ``k`` tokens, and all weights of ``draft`` beside its
        ``target``."""
        return Bound(self.decoding(k), draft.beside(target))

    def decoding(self, k: int) -> BoundDrafter:
        """The form that the engine runs."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it decodes: define decoding")

    def embedded(self, module: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        return rows_of(module.embedding[...], tokens, self.dtype)

    def head(self, params: Params, final: Float[Array, "B T H"]) -> Float[Array, "B T V"]:
        """Logits over the target's vocabulary, in float32."""
        return self.over_all(self.scaled(self.module(params).head(final, wide=True)))

    def scaled(self, logits: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """``logits`` of the head, scaled and soft-capped as the target does it."""
        return soft_capped(logits * self.config.logit_multiplier, self.config.logit_soft_cap)

    def over_all(self, logits: Float[Array, "B T W"]) -> Float[Array, "B T V"]:
        """``logits`` of the draft vocabulary, extended to the target's vocabulary."""
        return logits if self.vocabulary is None else self.vocabulary.over_all(logits)

    def narrow(self, params: Params) -> NarrowHead | None:
        """The head over the draft vocabulary alone; None without one."""
        if self.vocabulary is None:
            return None
        return NarrowHead(self.vocabulary.ids, lambda final: self.scaled(self.module(params).head(final, wide=True)))

    @property
    def in_vocabulary(self) -> Bool[Array, " V"] | None:
        """Mask over the target's vocabulary of the ids that it can propose, see
        `specjax.interfaces.Prediction.in_vocabulary`."""
        return None if self.vocabulary is None else jnp.asarray(self.vocabulary.mask)

    def run(self, block: Callable[..., tuple[Array, Any]], i: int, x: Array, positions: Array, kv: Any, form: Any):
        """Layer ``i`` as ``block(x, table, kv)``, which returns (x, what ``kv.attend`` returns); ``table``: its rotary
        table."""
        rope = self.config.layer(i).rope
        table = None if rope is None else rotary_table(positions, rope, self.config.head_dim, self.dtype, None)
        through = jax.checkpoint(block) if form.remat else block
        x, layer = through(placed(x, form.sharding), table, kv)
        return placed(x, form.sharding), layer

    def run_block(self, block: Any, i: int, x: Array, positions: Array, kv: KVSource, form: TrainingForm):
        """Layer ``i`` as `run` does it, for a plain transformer block."""
        return self.run(lambda x, table, kv: block(x, table, kv)[:2], i, x, positions, kv, form)


@functools.lru_cache(maxsize=64)
def _abstract(spec: FeatureModel) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: spec.net(spec, rngs=InitKeys(0))))


def embedding_and_head(spec: FeatureModel, rngs: nnx.Rngs) -> tuple[nnx.Param, Linear]:
    """A fresh embedding and a fresh head."""
    config, dtype = spec.config, spec.dtype
    table = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), dtype) * 0.02)
    return table, Linear(config.hidden_size, head_rows(spec), rngs=rngs, dtype=dtype)


def head_rows(spec: FeatureModel) -> int:
    """Number of ids that the draft can propose."""
    return spec.config.vocab_size if spec.vocabulary is None else len(spec.vocabulary.ids)


@dataclasses.dataclass(frozen=True)
class BoundFeatures(BoundDrafter):
    """Base of the bound forms, with the streams that a draft reads and its number of positions.
    `specjax.interfaces.BoundDrafter` lists the rest."""

    model: FeatureModel
    k: int

    @property
    def reads(self) -> Reads:
        return Reads(hidden_layers=self.model.reads)

    @property
    def max_positions(self) -> int:
        return self.model.config.max_positions

    @property
    def model_config(self) -> ModelConfig:
        return self.model.config


# --- loaded, beside a target ----------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False, repr=False)
class LoadedDraft:
    """A draft's spec and weights; of `EMBEDDING_AND_HEAD` only those that are not the target's."""

    spec: FeatureModel
    params: Params
    name: str = "draft"

    def __repr__(self) -> str:
        """A single line, however many weights there are."""
        return described(self, self.params)

    def beside(self, target: Target) -> Params:
        """All weights as decoding reads them, made once. Weights that the draft lacks are the target's, not copied."""
        layout = target.layout()
        (made_of, found), parts = self.__dict__.get("_beside", (None, None)), [layout, *jax.tree.leaves(self.params)]
        if not same_arrays(made_of, parts):
            ends = {name: _laid_out(layout.params, name) for name in EMBEDDING_AND_HEAD if name not in self.params}
            # Kernels of the target that are laid out already are no arrays: `stored_kernels` leaves them as they are.
            found = stored_kernels(self.spec, {**self.params, **self._wanted(ends)})
            self._beside = parts, found
        return found

    def quantised(self, scheme: Scheme) -> LoadedDraft:
        """This draft with its own kernels in few bits. What it shares with its target stays as it is there."""
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: quantised(tuple(key.key for key in path), leaf, scheme), self.params
        )
        return LoadedDraft(self.spec, params, f"{self.name}-int{scheme.bits}")

    def _wanted(self, ends: Mapping[str, Any]) -> Params:
        wanted = self.spec.shapes
        return {name: value for name, value in ends.items() if name in wanted}


def _laid_out(params: Params, name: str) -> Any:
    tied = name == "head" and "head" not in params
    return {"kernel": Transposed(params["embedding"])} if tied else params[name]


def dense(params: Params, name: str, dtype: Any) -> Any:
    """The target's parameter ``name`` as an array to train with; of a tied head, the embedding transposed."""
    if name == "head" and "head" not in params:
        return {"kernel": params["embedding"].T.astype(dtype)}
    return jax.tree.map(lambda x: x.astype(dtype), params[name])


def end_of(spec: FeatureModel, params: Params, name: str, dtype: Any) -> Any:
    """One of the target's `EMBEDDING_AND_HEAD` as a draft of this spec has it: a head is cut to the draft
    vocabulary."""
    found = dense(params, name, dtype)
    if name != "head" or spec.vocabulary is None:
        return found
    return {"kernel": found["kernel"][:, spec.vocabulary.ids]}


@dataclasses.dataclass(frozen=True)
class FeatureDrafter(ModelDrafter):
    """A draft that reads its target's hidden states, and proposes ``k`` tokens: EAGLE-3 (2503.01840), P-EAGLE
    (2602.01469), multi-token prediction (2412.19437), Medusa (2401.10774), DFlash (2602.06036), DSpark (2607.05147),
    DFlash2, or early exit (2404.16710)."""

    model: Any
    """A `LoadedDraft`, or the directory of one, or of the run that left one."""
    kind: str = ""
    """Name in the registry, in configs and in results; left out: that of ``model``."""

    def __post_init__(self) -> None:
        if not self.kind and isinstance(self.model, LoadedDraft):
            object.__setattr__(self, "kind", self.model.spec.kind)

    @property
    def longest(self) -> int | None:
        return self.model.spec.most if isinstance(self.model, LoadedDraft) else None

    def _read(self, target: Target) -> LoadedDraft:
        return registry.reader()(self.model, target, self.k, self.kind).model

    def _bound(self, draft: Any, target: Target) -> Bound:
        if not isinstance(draft, LoadedDraft):
            raise ModelError(f"{self.kind}: model={draft!r}; give specjax.load_drafter(PATH, target)")
        check_readable(self.kind, draft.spec, target.config)
        most = draft.spec.most
        if most is not None and self.k > most:
            raise ModelError(f"{self.kind}: k={self.k}, and this draft proposes at most {most}; lower k")
        return draft.spec.bound(self.k, draft, target)


def check_readable(kind: str, draft: FeatureModel, target: ModelConfig) -> None:
    """Raises `ModelError` with the reason unless ``draft`` can read a target of these sizes."""
    sizes = {"hidden_size": (draft.feature_size, target.hidden_size)}
    sizes["vocab_size"] = draft.config.vocab_size, target.vocab_size
    for name, (own, read) in sizes.items():
        if own != read:
            raise ModelError(
                f"{kind}: reads a target of {name}={own}, and this one has {read}; use the draft's own target, or "
                "distill one for this"
            )
    if draft.of_last and draft.reads != (target.num_layers,):
        raise ModelError(
            f"{kind}: reads the last stream of a target of {draft.reads[0]} layers, and this one has "
            f"{target.num_layers}; use the draft's own target, or distill one for this"
        )
    if min(draft.reads) < 0:
        raise ModelError(
            f"{kind}: names no streams, and a target of {target.num_layers} layers has not those that are meant then; "
            "name them in its config.json"
        )
    if max(draft.reads) > target.num_layers:
        raise ModelError(f"{kind}: reads stream {max(draft.reads)}, and the target has 0 .. {target.num_layers}")


# --- training -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TrainedFeatureDraft(Trainable):
    """A draft that reads hidden states, in training. ``shared``: names of parameters that are the target's own,
    frozen."""

    model: FeatureModel
    shared: tuple[str, ...] = ()
    form: TrainingForm = PLAIN

    @property
    def shares_target(self) -> bool:
        return True

    @property
    def longest(self) -> int | None:
        return self.model.most

    @property
    def config(self) -> ModelConfig:
        """Configuration of the draft's layers."""
        return self.model.config

    @property
    def reads(self) -> Reads:
        return Reads(hidden_layers=self.model.reads)

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        return self.model.vocabulary

    def with_vocabulary(self, vocabulary: DraftVocabulary) -> Any:
        """This draft with another draft vocabulary."""
        return dataclasses.replace(self, model=dataclasses.replace(self.model, vocabulary=vocabulary))

    def init_params(self, key: Key[Array, ""], target: Target | None) -> Params:
        return {name: value for name, value in self.model.init(key).items() if name not in self.shared}

    def complete(self, params: Params, target_params: Params) -> Params:
        dtype = jax.tree.leaves(params)[0].dtype
        return {**params, **{name: end_of(self.model, target_params, name, dtype) for name in self.shared}}

    def in_training(self, form: TrainingForm) -> Any:
        if form.scan_layers:
            raise ConfigError(f"scan_layers: {self.kind} drafts run layer by layer; set it false")
        model = dataclasses.replace(self.model, dtype=form.dtype or self.model.dtype)
        return dataclasses.replace(self, model=model, form=form)

    def parameter_sharding(
        self, path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh
    ) -> NamedSharding | None:
        return sharding_of(path, shape, self.model.config, mesh)

    def to_drafter(self, params: Params, target: Target, k: int) -> FeatureDrafter:
        own = {name: value for name, value in params.items() if name not in self.stored_once}
        return FeatureDrafter(LoadedDraft(self.model, own), k)

    @property
    def stored_once(self) -> tuple[str, ...]:
        """Names of the parameters that are exactly the target's. A head cut to the draft vocabulary is a copy, and none
        of them."""
        return tuple(name for name in self.shared if name != "head" or self.model.vocabulary is None)

    @property
    def kind(self) -> str:
        """Name in the registry, in configs and in results."""
        return self.model.kind


# --- layers and streams ---------------------------------------------------------------------------------------------


def published_streams(count: int) -> tuple[int, ...]:
    """Streams that published drafts capture of a target of ``count`` layers if they name none."""
    return 2, count // 2, count - 3


def layers_like(full: ModelConfig, count: int = 1, qk_norm: bool | None = None) -> ModelConfig:
    """Layers of Llama, or of Qwen 3, with a target's sizes. ``qk_norm``: True if queries and keys are normed, as in
    Qwen 3; None: as in the target."""
    found = next((kind.rope for kind in reversed(full.layers) if kind.rope is not None), Rope())
    # Llama's layers rotate whole heads, not parts or interleaved pairs: of such a target they take the theta alone.
    rope = found if (found.partial, found.interleaved) == (1, False) else Rope(found.theta)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_positions")
    like: dict[str, Any] = {name: getattr(full, name) for name in (*sizes, "logit_multiplier", "logit_soft_cap")}
    like |= {"qk_norm": "head"} if (full.qk_norm == "head" if qk_norm is None else qk_norm) else {}
    like |= {"norm": Norm(eps=full.norm.eps)} if full.norm.kind == "rms" else {}
    return ModelConfig(**like, num_layers=count, layers=(LayerKind(rope=rope),), tie_embeddings=False)


def of_hidden(target_out: Output, dtype: Any) -> tuple[Array, ...]:
    """The captured streams in ``dtype``."""
    return tuple(x.astype(dtype) for x in target_out.hidden)
