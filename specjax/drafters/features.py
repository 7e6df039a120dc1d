"""Drafts that read the target's hidden states, between its own embedding and head: what they have in common. A kind
adds its weights and forward pass (`FeatureModel`), how it drafts (a `specjax.types.BoundDrafter`), how it is trained
(`TrainedFeatureDraft`) and its stored form (`specjax.drafters.formats`).

Dims: B rows, T tokens fed, S features of the target's, H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, Key
from pydantic import Field

from specjax import registry
from specjax.drafters.base import TrainedDrafter, stored_start
from specjax.errors import ConfigError, ModelError
from specjax.models import hf
from specjax.models.attention.memory import Attended
from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.decode_layout import described, same_arrays, stored_kernels
from specjax.models.kernels import Transposed
from specjax.models.layers import Linear
from specjax.models.products import soft_capped
from specjax.models.rotary import Rope, rotary_table
from specjax.models.sharding import sharding_of
from specjax.models.training import placed
from specjax.models.transformer import param_shapes
from specjax.models.vocabulary import NEVER
from specjax.types import PLAIN, Bound, Output, Params, Reads, TrainingForm

if TYPE_CHECKING:
    from specjax.config import RunConfig
    from specjax.data.rows import Rows as TextRows
    from specjax.distill.init import Initial

ENDS = ("embedding", "head")
"""Parameters that a draft may have from its target, as they are; a tied head is none of its own."""


class Kept:
    """Some ids of a vocabulary, ascending: what a draft of fewer can propose. Static and hashable."""

    def __init__(self, ids: Any, size: int):
        found = np.asarray(ids)
        if found.ndim != 1 or not len(found) or found.min() < 0 or found.max() >= size:
            raise ValueError(f"ids of 0 .. {size - 1} are to be named")
        if (np.diff(found) <= 0).any():
            raise ValueError("the ids do not ascend")
        self.ids, self.size = found.astype(np.int32), size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and self.size == other.size and np.array_equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash((self.size, self.ids.tobytes()))

    def __repr__(self) -> str:
        return f"Kept({len(self.ids)} of {self.size})"

    @property
    def digest(self) -> str:
        return f"{self!r} {hashlib.sha256(self.ids.tobytes()).hexdigest()}"

    @property
    def mask(self) -> Bool[np.ndarray, " V"]:
        return np.isin(np.arange(self.size), self.ids)

    def over_all(self, logits: Float[Array, "*B W"]) -> Float[Array, "*B V"]:
        """Over the whole vocabulary; the others are never drawn."""
        everything = jnp.full((*logits.shape[:-1], self.size), NEVER, logits.dtype)
        return everything.at[..., self.ids].set(logits)


# --- the forward pass -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FeatureModel:
    """A draft's forward pass, a function of its parameters; static and hashable. ``config``: of its layers, with the
    target's vocabulary; ``reads``: the target's streams that it captures (0: its embeddings, i: what leaves its layer
    i - 1), ``feature_size`` numbers of each."""

    config: ModelConfig
    reads: tuple[int, ...]
    feature_size: int
    dtype: str = "float32"
    kept: Kept | None = None
    """The ids that it can propose, of which its head has a row each; None: all."""
    net: ClassVar[Callable[..., nnx.Module]]
    """The weights, made of (spec, rngs)."""
    of_last: ClassVar[bool] = False
    """What it reads is the target's last stream, whatever its number."""

    def init(self, key: Array) -> Params:
        """Fresh parameters, a nested dict of arrays."""
        return nnx.to_pure_dict(nnx.split(self.net(self, rngs=nnx.Rngs(params=key)))[1])

    def module(self, params: Params) -> Any:
        """The NNX module that holds ``params``."""
        return nnx.merge(_graphdef(self), nnx.State(params))

    @property
    def most(self) -> int | None:
        """The longest block; None: any."""
        return None

    def embedded(self, module: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        return module.embedding[...][tokens].astype(self.dtype)

    def head(self, params: Params, final: Float[Array, "B T H"]) -> Float[Array, "B T V"]:
        """Logits over the target's vocabulary, in float32."""
        return self.over_all(self.scaled(self.module(params).head(final, wide=True)))

    def scaled(self, logits: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """As the target makes logits of what its head gives."""
        return soft_capped(logits * self.config.logit_multiplier, self.config.logit_soft_cap)

    def over_all(self, logits: Float[Array, "B T W"]) -> Float[Array, "B T V"]:
        """What the rows of its head give, over the target's vocabulary."""
        return logits if self.kept is None else self.kept.over_all(logits)

    @property
    def proposable(self) -> Bool[Array, " V"] | None:
        """See `specjax.types.Prediction.kept`."""
        return None if self.kept is None else jnp.asarray(self.kept.mask)

    def run(self, block: Callable[..., tuple[Array, Any]], i: int, x: Array, positions: Array, memory: Any, form: Any):
        """Layer ``i`` as ``block(x, table, memory)``, which gives (x, what it keeps)."""
        rope = self.config.layer(i).rope
        table = None if rope is None else rotary_table(positions, rope, self.config.head_dim, self.dtype, None)
        through = jax.checkpoint(block) if form.remat else block
        x, kept = through(placed(x, form.sharding), table, memory)
        return placed(x, form.sharding), kept

    def run_block(self, block: Any, i: int, x: Array, positions: Array, memory: Attended, form: TrainingForm):
        """The same of a plain layer."""
        return self.run(lambda x, table, memory: block(x, table, memory)[:2], i, x, positions, memory, form)


@functools.lru_cache(maxsize=64)
def _graphdef(spec: FeatureModel) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: spec.net(spec, rngs=nnx.Rngs(0))))[0]


def embedding_and_head(spec: FeatureModel, rngs: nnx.Rngs) -> tuple[nnx.Param, Linear]:
    """Fresh ones."""
    config, dtype = spec.config, spec.dtype
    table = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), dtype) * 0.02)
    return table, Linear(config.hidden_size, head_rows(spec), rngs=rngs, dtype=dtype)


def head_rows(spec: FeatureModel) -> int:
    """Ids that it can propose."""
    return spec.config.vocab_size if spec.kept is None else len(spec.kept.ids)


@dataclasses.dataclass(frozen=True)
class BoundFeatures:
    """What a bound draft of this sort says of itself; `specjax.types.BoundDrafter` is the rest."""

    model: FeatureModel
    k: int

    @property
    def reads(self) -> Reads:
        return Reads(hidden_layers=self.model.reads)

    @property
    def max_positions(self) -> int:
        return self.model.config.max_positions


# --- loaded, beside a target ----------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False, repr=False)
class LoadedDraft:
    """A draft's weights and what computes with them; of `ENDS` those that are not the target's."""

    spec: FeatureModel
    params: Params
    name: str = "draft"

    def __repr__(self) -> str:
        """A line, of any number of weights."""
        return described(self, self.params)

    @property
    def most(self) -> int | None:
        """The longest block; None: any."""
        return self.spec.most

    def beside(self, target: Any) -> Params:
        """All weights as decoding reads them, made once: those that are missing are the target's, not copied."""
        layout = target.layout()
        (made_of, found), parts = self.__dict__.get("_beside", (None, None)), [layout, *jax.tree.leaves(self.params)]
        if not same_arrays(made_of, parts):
            ends = {name: _laid_out(layout.params, name) for name in ENDS if name not in self.params}
            # As trained first: what stands for a kernel of the target's is no array, and stays.
            found = stored_kernels(self.spec, {**self.params, **self._wanted(ends)})
            self._beside = parts, found
        return found

    def _wanted(self, ends: Mapping[str, Any]) -> Params:
        wanted = param_shapes(self.spec)
        return {name: value for name, value in ends.items() if name in wanted}


def _laid_out(params: Params, name: str) -> Any:
    tied = name == "head" and "head" not in params
    return {"kernel": Transposed(params["embedding"])} if tied else params[name]


def dense(params: Params, name: str, dtype: Any) -> Any:
    """The target's parameter of that name as it is trained with; of a tied head, its embedding."""
    if name == "head" and "head" not in params:
        return {"kernel": params["embedding"].T.astype(dtype)}
    return jax.tree.map(lambda x: x.astype(dtype), params[name])


def end_of(spec: FeatureModel, params: Params, name: str, dtype: Any) -> Any:
    """One of `ENDS` of a target, as a draft of this form has it: of a head, the ids that it can propose."""
    found = dense(params, name, dtype)
    return {"kernel": found["kernel"][:, spec.kept.ids]} if name == "head" and spec.kept is not None else found


@dataclasses.dataclass(frozen=True)
class FeatureDrafter:
    """A draft that reads its target's hidden states, and proposes ``k`` tokens."""

    model: Any
    """A `LoadedDraft`, or the directory of one or of the run that left it."""
    k: Annotated[int, Field(ge=1, le=64)] = 5
    """Tokens of a block, 1 to 64."""
    kind: str = ""
    """Name in the registry, in configs and in results."""
    bound: ClassVar[Callable[[Any, int], Any]]
    """What the engine runs, of (spec, k)."""

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike,
        target: Any,
        k: int,
        check_finite: bool = True,
        asked: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `specjax.drafters.loading.load_drafter`.

        Args:
            directory: a draft of this kind in any of its formats, or its hub id.
            target: the `LoadedModel` whose dtype the weights are cast to.
            k: draft tokens a block.
            check_finite: refuse NaN and infinite weights.
            asked: keys of config.json that the draft leaves unsaid, and what they are.

        Returns:
            The drafter.

        Raises:
            ModelError: for what cannot be read.
        """
        return cls(cls._read(directory, target, check_finite, asked), k)

    def bind(self, target: Any) -> Bound:
        """The draft beside its target.

        Args:
            target: the `LoadedModel` to speculate for.

        Returns:
            What the engine runs, and the draft's weights laid out for decoding; ends that are the target's, shared.

        Raises:
            ModelError: the draft reads what the target does not have, or it cannot be read itself.
        """
        draft = self._loaded(target)
        return Bound(type(self).bound(draft.spec, self.k), draft.beside(target))

    def _loaded(self, target: Any) -> LoadedDraft:
        named = isinstance(self.model, (str, os.PathLike))
        draft: LoadedDraft = self._read(hf.draft_of(self.model), target) if named else self.model
        check_readable(self.kind, draft.spec, target.config)
        if draft.most is not None and self.k > draft.most:
            raise ModelError(f"{self.kind}: k={self.k}, and this draft proposes at most {draft.most}; lower k")
        return draft

    @classmethod
    def _read(
        cls,
        directory: str | os.PathLike,
        target: Any,
        check_finite: bool = True,
        asked: Mapping[str, Any] | None = None,
    ) -> LoadedDraft:
        from specjax.drafters import formats

        return formats.load(directory, registry.kind_of(cls), target, check_finite, asked=asked)


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
class TrainedFeatureDraft(TrainedDrafter):
    """In training. ``shared``: parameters that are the target's own, frozen."""

    model: FeatureModel
    shared: tuple[str, ...] = ()
    form: TrainingForm = PLAIN
    drafter: ClassVar[type[FeatureDrafter]]

    @property
    def config(self) -> ModelConfig:
        """The sizes of what is trained."""
        return self.model.config

    @property
    def reads(self) -> Reads:
        return Reads(hidden_layers=self.model.reads)

    @property
    def serving(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `TrainedDrafter.serving`."""
        from specjax.drafters import formats

        form, lost = formats.own_form(self.model, self._kind)
        if lost is not None:
            return f"Only specjax reads it (`specjax.load_drafter`): the library speculators has no words for {lost}."
        return f"A directory in the form of {form}: servers of that form read it too."

    @property
    def library(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `TrainedDrafter.library`."""
        from specjax.drafters import formats

        return "speculators" if formats.own_form(self.model, self._kind)[0] == "speculators" else "specjax"

    def with_ids(self, kept: Kept) -> Any:
        """The same, of a draft that proposes these ids alone."""
        return dataclasses.replace(self, model=dataclasses.replace(self.model, kept=kept))

    def init_params(self, key: Key[Array, ""], target: Any) -> Params:
        return {name: value for name, value in self.model.init(key).items() if name not in self.shared}

    def complete(self, params: Params, target_params: Params) -> Params:
        """See `specjax.types.Sharing`."""
        dtype = jax.tree.leaves(params)[0].dtype
        return {**params, **{name: end_of(self.model, target_params, name, dtype) for name in self.shared}}

    def in_training(self, form: TrainingForm) -> Any:
        if form.scan_layers:
            raise ConfigError(f"scan_layers: {self._kind} drafts run layer by layer; set it false")
        model = dataclasses.replace(self.model, dtype=form.dtype or self.model.dtype)
        return dataclasses.replace(self, model=model, form=form)

    def parameter_sharding(
        self, path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh
    ) -> NamedSharding | None:
        return sharding_of(path, shape, self.model.config, mesh)

    def to_drafter(self, params: Params, target: Any, k: int) -> FeatureDrafter:
        own = {name: value for name, value in params.items() if name not in self._stored_once}
        return type(self).drafter(LoadedDraft(self.model, own), k)

    def save(self, params: Params, target: Any, directory: Path, *, name: str = "draft", card: str | None = None):
        """A directory in the form of `specjax.drafters.formats.own_form`."""
        from specjax.drafters import formats

        draft = LoadedDraft(self.model, params, name)
        formats.save(
            draft,
            self._kind,
            directory,
            target=target.source or target.name,
            target_layers=target.config.num_layers,
            card=card,
            shared=self._stored_once,
        )

    @property
    def _stored_once(self) -> tuple[str, ...]:
        """What is shared whole: of a head only some rows are read, and they are copied."""
        return tuple(name for name in self.shared if name != "head" or self.model.kept is None)

    @property
    def _kind(self) -> str:
        return registry.kind_of(type(self).drafter)


# --- as a config says it --------------------------------------------------------------------------------------------


class FeatureDraft:
    """The section `draft` of a config: what its kinds share. A dataclass of this has ``kind`` and ``drafter``."""

    kind: str
    drafter_class: ClassVar[type[FeatureDrafter]]
    keeps_hidden: ClassVar[bool] = True
    """A cached teacher keeps hidden states, not logits."""
    of_training: ClassVar[frozenset[str]] = frozenset()
    """Fields that say how a draft is trained or read; the others describe one."""
    unsaid: ClassVar[Mapping[str, str]] = {}
    """Fields that describe one and that a stored one may leave unsaid -> their keys in its config.json."""

    def described(self, config: RunConfig, target: Any) -> Any:
        """The `TrainedFeatureDraft` of these fields."""
        raise NotImplementedError

    def drafter(self, config: RunConfig, target: Any) -> Any:
        """What is trained: of these fields, or of the directory that `draft.init` names; a `TrainedFeatureDraft`."""
        described, first = self.described(config, target), self._stored(config, target)
        return described if first is None else self._as(described, first)

    def first(self, drafter: Any, params: Params, target: Any, rows: TextRows) -> Params:
        """``params`` with what the target has for them; ``rows``: the training text."""
        return params

    def draft(self, config: RunConfig, target: Any, rows: TextRows) -> Initial:
        from specjax.distill.init import Initial

        stored, drafter, init = self._stored(config, target), self.described(config, target), config.draft.init
        if stored is not None:
            hf.refuse_quantised(target.params, f"draft.init: {init}")
            own = _without_the_targets(stored, target)
            return Initial(self._as(drafter, own), own.params)
        if drafter.model.kept is not None:
            kept = most_frequent(rows, len(drafter.model.kept.ids), drafter.model.kept.size)
            drafter = drafter.with_ids(kept)
        _, key = jax.random.split(jax.random.key(config.seed))
        params = drafter.init_params(key, target)
        if init not in ("scratch", {"kind": "scratch"}):
            hf.refuse_quantised(target.params, "draft.init: target")
            params = self.first(drafter, params, target, rows)
        return Initial(drafter, params)

    def _stored(self, config: RunConfig, target: Any) -> LoadedDraft | None:
        """The draft whose training is to go on, in float32."""
        from specjax.drafters.formats import Beside

        path = stored_start(config, self.of_training.union(self.unsaid))
        if path is None:
            return None
        drafter = self.load(hf.draft_of(path), Beside(target.config, "float32"), 1)
        check_readable(self.kind, drafter.model.spec, target.config)
        return drafter.model

    def _as(self, described: Any, draft: LoadedDraft) -> Any:
        """The draft in training, as ``described`` says how."""
        wanted = param_shapes(draft.spec)
        shared = tuple(name for name in ENDS if name in wanted and name not in draft.params)
        return dataclasses.replace(described, model=draft.spec, shared=shared)

    def load(self, directory: str | os.PathLike, target: Any, k: int, check_finite: bool = True) -> FeatureDrafter:
        named = {key: getattr(self, field) for field, key in self.unsaid.items()}
        asked = {key: _as_json(value) for key, value in named.items() if value is not None}
        return type(self).drafter_class.load(directory, target, k, check_finite, asked)


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _without_the_targets(draft: LoadedDraft, target: Any) -> LoadedDraft:
    """Without weights that are the target's, number by number, stored or not: those stay as they are."""

    def same(name: str) -> bool:
        of_target = end_of(draft.spec, target.params, name, jnp.float32)
        found = jax.tree.leaves(draft.params[name]), jax.tree.leaves(of_target)
        return all(x.shape == y.shape and bool(jnp.array_equal(x, y)) for x, y in zip(*found, strict=True))

    of_target = [name for name in ENDS if name in draft.params and same(name)]
    return dataclasses.replace(draft, params={n: x for n, x in draft.params.items() if n not in of_target})


def streams(reads: tuple[int, ...] | None, config: RunConfig, full: ModelConfig) -> tuple[int, ...]:
    """The target's streams that a config names; None: the published default, 2, L / 2 and L - 3 of L layers, but of a
    shallow target a third, two thirds and all of them. Raises `ConfigError`."""
    refuse_architecture(config)
    count = full.num_layers
    if reads is None:
        published = published_streams(count)
        thirds = (-(-count // 3), -(-2 * count // 3), count)
        reads = tuple(sorted(set(published if count >= SHALLOW else thirds)))
    if list(reads) != sorted(set(reads)) or not reads or reads[-1] > count:
        raise ConfigError(f"draft.reads: {list(reads)}; name some of the target's streams 0 .. {count}, ascending")
    return reads


def published_streams(count: int) -> tuple[int, ...]:
    """Those of a target of so many layers that published drafts capture where they do not say which."""
    return 2, count // 2, count - 3


def first_ids(count: int | None, full: ModelConfig) -> Kept | None:
    """As many ids as a config asks for, before a text says which (`most_frequent`). Raises `ConfigError`."""
    if count is None or count == full.vocab_size:
        return None
    if count > full.vocab_size:
        raise ConfigError(f"draft.draft_vocab_size: {count:,}, and the target has {full.vocab_size:,} ids; lower it")
    return Kept(np.arange(count), full.vocab_size)


def most_frequent(rows: TextRows, count: int, size: int) -> Kept:
    """The ids that training asks for most often, by a sample of its rows; how much of it they cover is told."""
    often = _counted(rows, size)
    kept = Kept(np.sort(np.argsort(-often, kind="stable")[:count]), size)
    share = 100 * often[kept.ids].sum() / max(often.sum(), 1e-30)
    _log.info("draft vocabulary: %s of %s ids, %.2f%% of what is predicted", f"{count:,}", f"{size:,}", share)
    return kept


def coverage(kept: Kept, rows: TextRows) -> float:
    """The share of what training asks for that is among ``kept``, by a sample of its rows."""
    often = _counted(rows, kept.size)
    return float(often[kept.ids].sum() / max(often.sum(), 1e-30))


def _counted(rows: TextRows, size: int) -> Float[np.ndarray, " V"]:
    """How often each id is asked for in a row, on average, as much as its prediction counts: that of a prompt's token
    less or not at all."""
    from specjax.data.rows import RowsToCount, spread

    total = np.zeros(size)
    for part, share in rows.counted() if isinstance(rows, RowsToCount) else [(rows, 1.0)]:
        sample = spread(part, _SAMPLE)
        labels, weight = (np.asarray(x).reshape(-1) for x in (sample.labels, sample.weight))
        total += share / len(sample.labels) * np.bincount(labels, weight.astype(np.float64), minlength=size)
    return total


_SAMPLE = 2**20
"""Tokens of each part of the training rows that ids are counted in."""
_log = logging.getLogger(__name__)


def refuse_architecture(config: RunConfig) -> None:
    """Raises `ConfigError` where sizes are asked for that are the target's."""
    if config.draft.architecture != type(config.draft.architecture)():
        raise ConfigError(
            f"draft.architecture: a draft of kind {config.draft.kind} has its target's sizes; leave it out"
        )


def mask_token(asked: int | None, full: ModelConfig) -> int:
    """An id of the target's; None: the last. Raises `ConfigError`."""
    found = full.vocab_size - 1 if asked is None else asked
    if found >= full.vocab_size:
        raise ConfigError(f"draft.mask_token: {found}, and the target has ids 0 .. {full.vocab_size - 1}")
    return found


SHALLOW = 12
"""Layers of a target below which the published streams leave out what its last half computes."""


def layers_like(full: ModelConfig, count: int = 1, qk_norm: bool | None = None) -> ModelConfig:
    """Layers of Llama, or of Qwen 3, of a target's sizes. ``qk_norm``: whether queries and keys are normed, as in
    those of Qwen 3; None: where the target's are."""
    found = next((kind.rope for kind in reversed(full.layers) if kind.rope is not None), Rope())
    # Half a head, or pairs side by side, no layer of Llama rotates: all of it, as fast.
    rope = found if (found.partial, found.interleaved) == (1, False) else Rope(found.theta)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_positions")
    like: dict[str, Any] = {name: getattr(full, name) for name in (*sizes, "logit_multiplier", "logit_soft_cap")}
    like |= {"qk_norm": "head"} if (full.qk_norm == "head" if qk_norm is None else qk_norm) else {}
    like |= {"norm": Norm(eps=full.norm.eps)} if full.norm.kind == "rms" else {}
    return ModelConfig(**like, num_layers=count, layers=(LayerKind(rope=rope),), tie_embeddings=False)


def last_layer(target: Any) -> Params | None:
    """The target's, in float32, where it is of the form of `layers_like`."""
    full = target.config
    kinds = dict.fromkeys(("num_layers", "layers", "tie_embeddings", "embedding_multiplier"))
    like = layers_like(full)
    if dataclasses.replace(full, **{name: getattr(like, name) for name in kinds}) != like:
        return None
    if full.layer(full.num_layers - 1).rope != like.layer(0).rope:
        return None
    return in_float32(target.params["layers"][full.num_layers - 1])


def same_norm(full: ModelConfig) -> bool:
    """Whether a target's final norm is of the form of `layers_like`."""
    return full.norm.kind == "rms" and full.norm.offset == 0


def in_float32(params: Params) -> Params:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)


def of_hidden(target_out: Output, dtype: Any) -> tuple[Array, ...]:
    """The captured streams in ``dtype``."""
    return tuple(x.astype(dtype) for x in target_out.hidden)
