"""Training as everything else sees it: batches, predictions, teachers' logits, and the abstract drafter in training and
loss.

Dims: B rows, T tokens of a row, C some of the T, D hidden, V vocabulary.
"""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.errors import ConfigError
from specjax.interfaces.decoding import Drafter
from specjax.interfaces.model import NOTHING, Documents, Model, Output, Params, Reads, Target


@flax.struct.dataclass
class FullLogits:
    """Teacher logits over the whole vocabulary."""

    logits: Float[Array, "B T V"]


@flax.struct.dataclass
class TopKLogits:
    """The k largest of the teacher's logits, and the logsumexp of all, which gives the mass of the tail."""

    values: Float[Array, "B T k"]
    ids: Int[Array, "B T k"]
    logsumexp: Float[Array, "B T"]
    tail_values: Float[Array, "B T n"] | None = None
    """Logits of n tokens drawn from the teacher's distribution over the tail (one may come twice). None: only its mass
    is known."""
    tail_ids: Int[Array, "B T n"] | None = None


@flax.struct.dataclass
class Batch:
    """Rows of text to train on: ``labels[b, t]`` follows ``tokens[b, t]``."""

    tokens: Int[Array, "B T"]
    labels: Int[Array, "B T"]
    weight: Float[Array, "B T"]
    """Weight of the prediction of ``labels``; 0: it does not count (padding, a prompt)."""
    positions: Int[Array, "B T"] | None = None
    """Positions inside the token's own document; None: 0 .. T-1."""
    segments: Int[Array, "B T"] | None = None
    """Document of the row that each token belongs to; attention stays inside it. None: a row is one document."""
    teacher: TopKLogits | None = None
    """The target's logits, cached; None: the target is asked."""
    number: Int[Array, " B"] | None = None
    """Number of the step that the row is drawn for, if a drafter that ``samples_anchors`` is trained on it. Outside
    training, number of the part of the drafter's predictions to make (None: all of them)."""
    streams: tuple[Float[Array, "B T D"], ...] | None = None
    """Residual streams that the draft's `Reads` name, cached, and behind them `Output.final`; None: the target is
    asked."""
    logsumexp: Float[Array, "B T"] | None = None
    """Logsumexp of the target's logits, cached with the streams."""

    @staticmethod
    def of_rows(rows: Iterable[Batch]) -> Batch:
        """One batch of numpy arrays from single rows, whose arrays have no batch axis."""
        return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)

    @property
    def token_positions(self) -> Int[Array, "B T"]:
        """Position of each token inside its own document."""
        if self.positions is not None:
            return jnp.asarray(self.positions)
        return jnp.broadcast_to(jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None], self.tokens.shape)

    @property
    def documents(self) -> Documents | None:
        """The documents of the rows, which set the attention mask. None: each token sees all before it, and itself."""
        return None if self.segments is None else Documents(jnp.asarray(self.segments))

    def mask_for(self, model: Model) -> Documents | Bool[Array, "B T T"] | None:
        """The attention mask for a model: `Documents` if it says ``takes_documents``, else an entry a pair. None: each
        token sees all before it, and itself."""
        documents = self.documents
        return documents if documents is None or model.takes_documents else documents.mask


@dataclasses.dataclass(frozen=True, eq=False)
class NarrowHead:
    """A head over a draft vocabulary alone. ``head(hidden)[..., i]`` is the logit of ``ids[i]``; the ids ascend."""

    ids: Int[np.ndarray, " W"]
    head: Callable[[Float[Array, "B C D"]], Float[Array, "B C W"]]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One prediction of every position, in a drafter's training forward. ``head(hidden[:, a:b])`` are the logits of
    those positions, so that they need not all exist at once. Position t of row b predicts the token that the target
    predicts at ``rows[b, t]`` of its output (None: at t). ``weight[b, t]`` is the weight of position t, and ``share``
    that of this prediction among the drafter's."""

    hidden: Float[Array, "B T D"]
    head: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]]
    weight: Float[Array, "B T"]
    rows: Int[Array, "B T"] | None = None
    share: float = 1.0
    in_vocabulary: Bool[Array, " V"] | None = None
    """Draft vocabulary: a loss compares with the target's distribution over these ids. None: all."""
    loss_logits: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]] | None = None
    """Logits that a loss compares, if the drafter draws from fewer tokens; None: those of ``head``."""
    confidence: Callable[[Float[Array, "B C D"]], Float[Array, "B C"]] | None = None
    """Logit of the drafter's estimate of the chance that its token is accepted; None: it has none. The estimate is
    trained towards the overlap of its distribution with the target's."""
    confidence_share: float = 1.0
    """Weight of the cross-entropy of that estimate, in nats, beside the loss."""
    narrow: NarrowHead | None = None
    """Head over the draft vocabulary alone, on which training costs less; None: there is none."""

    @property
    def logits(self) -> Float[Array, "B T V"]:
        """Logits of all positions at once."""
        return self.head(self.hidden)

    @property
    def target_rows(self) -> Int[Array, "B T"]:
        """`rows`, or 0 .. T-1 if they are left out."""
        if self.rows is not None:
            return self.rows
        return jnp.broadcast_to(jnp.arange(self.hidden.shape[1], dtype=jnp.int32)[None], self.hidden.shape[:2])


@dataclasses.dataclass(frozen=True)
class TrainingForm:
    """Form of a forward pass in training, which changes its cost, and of its numbers no more than their rounding.
    ``remat``: activations are computed again in the backward pass. ``scan_layers``: equal layers are one compiled loop.
    ``sharding``: that of ``[B, T, D]`` between layers, over a mesh; None: on one device. ``dtype``: type of the
    computation; None: its own. ``matmul_dtype``: type to which operands of matrix products are rounded in a float32
    computation; None: they are not."""

    remat: bool = False
    scan_layers: bool = False
    sharding: NamedSharding | None = None
    dtype: str | None = None
    matmul_dtype: str | None = None


PLAIN = TrainingForm()


class Trainable(abc.ABC):
    """A drafter in training, with all that a job asks of it: static and hashable. It aligns positions itself.
    ``params`` are all weights that it computes with, those of the target included (`complete`)."""

    reads: Reads = NOTHING
    """The parts of the target's forward pass that it reads; its predictions then need the target, and cannot be made
    from cached logits."""
    shares_target: bool = False
    """True if some of its weights are the target's, frozen, see `complete`."""
    samples_anchors: bool = False
    """True if it chooses at random what it trains on; its draws are a function of `Batch.number` and of the row."""
    samples_alone: bool = False
    """True if it decodes without the target, as a model of its own (`to_model`)."""
    config: Any = None
    """Settings of its transformer, by which memory is planned before there are weights; None: it has none."""
    serving: ClassVar[str] = "`specjax.load_drafter` reads it."
    """Sentence for the draft's card: the software that decodes with what `save` wrote."""
    library: ClassVar[str] = "specjax"
    """Library that loads the draft, for hubs that read cards."""

    @property
    def longest(self) -> int | None:
        """Largest draft length of the drafter that it becomes; None: any."""
        return None

    @property
    def vocabulary(self) -> Any:
        """The ids that it can propose, a `DraftVocabulary`; None: all. A kind that has one gives ``with_vocabulary``
        too, which returns this draft with another."""
        return None

    @abc.abstractmethod
    def init_params(self, key: Key[Array, ""], target: Target | None) -> Params:
        """Random first weights for a draft of ``target``, without those of the target."""

    @abc.abstractmethod
    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """The drafter's predictions one after the other, by depth: the j-th one is what it proposes at depth j of a
        block."""

    def complete(self, params: Params, target_params: Params) -> Params:
        """All weights that it computes with: its own and the target's."""
        return params

    def unrolled(self, depths: int) -> Trainable | None:
        """This drafter with a prediction for each of the first ``depths`` tokens of a block, or with a single one that
        holds at all depths; None: it cannot predict so many."""
        return None

    def in_training(self, form: TrainingForm) -> Trainable:
        """This drafter as a training stage runs it. Raises `ConfigError` if it cannot run in this form."""
        if form.remat or form.scan_layers:
            name = type(self).__name__
            raise ConfigError(f"remat, scan_layers: {name} has no transformer of its own; set both false")
        return self

    def parameter_sharding(
        self, path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh
    ) -> NamedSharding | None:
        """Sharding of the parameter at ``path`` on a mesh with the axes data, fsdp and tensor; None: every device has
        all of it. Also called for the optimizer state of the same path."""
        return None

    def passes(self, length: int) -> int:
        """Number of passes over whole rows of ``length`` tokens that a training step makes, for planning memory."""
        return 1

    def parts(self, length: int) -> int:
        """Number of parts in which an evaluation makes the predictions of rows of ``length`` tokens, so that it never
        holds more of them at once than training does. `Batch.number` names the part."""
        return 1

    def by_part(self, batch: Batch, measure: Callable[[Batch], Any]) -> Any:
        """Sum of ``measure`` over the parts of a batch, computed one after the other.

        Args:
            batch: rows that are evaluated, not drawn for a training step.
            measure: gives a pytree of arrays for a batch, which names its part unless there is only one.

        Returns:
            The summed pytree.
        """
        parts, shape = self.parts(batch.tokens.shape[1]), batch.tokens.shape[:1]
        if parts == 1:
            return measure(batch)

        def of_part(number: Int[Array, ""]) -> Any:
            return measure(dataclasses.replace(batch, number=jnp.broadcast_to(number, shape)))

        found = jax.lax.map(of_part, jnp.arange(parts, dtype=jnp.int32))
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), found)

    def to_drafter(self, params: Params, target: Target, k: int) -> Drafter:
        """The drafter that decodes with these weights and proposes ``k`` tokens a block."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it decodes: define to_drafter")

    def to_model(self, params: Params, target: Target, name: str = "draft") -> Target:
        """The draft as a model of its own, if it ``samples_alone``."""
        raise NotImplementedError(f"{type(self).__name__} is no model of its own")

    def save(self, params: Params, target: Target, directory: Path, *, name: str = "draft", card: str | None = None):
        """Write a directory with everything that decoding needs, replacing what is there; ``card``: its README.md."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is saved: define save")


@flax.struct.dataclass
class LossContext:
    """The inputs of a loss, apart from the prediction."""

    alpha: Float[Array, ""]
    """Running mean of the batches' alpha (`TrainState.alpha`), from before this step: equal in all parts of the
    step."""
    weight: Float[Array, "B T"]
    """Weight of each prediction; 0: it does not count."""
    references: Mapping[str, Float[Array, "B T V"]] = dataclasses.field(default_factory=dict)
    """Logits of the frozen drafts that the loss compares with, by its names for them."""
    chosen: Any = None
    """Choice of the loss among the positions of whole rows, see `Loss`; None: it takes these for whole rows."""
    in_vocabulary: Bool[Array, "B T"] | None = None
    """True if the draft vocabulary holds the text's next token; None: it always does."""


class Loss(abc.ABC):
    """The cost of a prediction: one value a predicted token, in float32, without a mean. The trainer adds up ``weight *
    value`` and ``weight`` over microbatches and devices and divides once. A loss is frozen and hashable: equal ones
    share their compiled step.

    A loss that ``selects`` weighs the positions of a row against each other: `scores` and `choose` come before it. No
    gradient goes through either.
    """

    kind: str
    """Name in the registry, in configs and in results."""
    needs_target: bool = False
    """True if it compares with the target's distribution."""
    needs_whole_distribution: bool = False
    """True if it refuses `TopKLogits`."""
    needs_labels: bool = False
    """True if it takes the text's next tokens as correct, so that a prompt, which no draft is to write, means nothing
    to it."""
    selects: bool = False
    """True if it has `scores` and `choose`."""

    @property
    def labels_alone(self) -> bool:
        """True if it compares with the text's next token and nothing else, so that a position whose token is outside
        the draft vocabulary gives it nothing to compare with."""
        return self.needs_labels

    @abc.abstractmethod
    def __call__(
        self,
        draft_logits: Float[Array, "B T V"],
        teacher: FullLogits | TopKLogits | None,
        tokens: Int[Array, "B T"],
        context: LossContext | None = None,
    ) -> Float[Array, "B T"]:
        """The cost of each predicted token, in nats unless the loss says otherwise. ``tokens``: the next tokens, for
        losses that need labels. One call covers some positions of the rows. Raises `ValueError` if ``teacher`` or
        ``context`` lacks what it needs."""

    def references(self, target: Target) -> dict[str, tuple[Trainable, Params]]:
        """The frozen drafts that it compares with, by name, each with its weights. Raises `ModelError` if one cannot be
        loaded or has another vocabulary than ``target``."""
        return {}

    def scores(
        self,
        draft_logits: Float[Array, "B T V"],
        teacher: FullLogits | TopKLogits | None,
        tokens: Int[Array, "B T"],
        context: LossContext | None = None,
    ) -> Any:
        """Arrays ``[B, T]`` by which it chooses among positions, or a pytree of such."""
        return None

    def choose(self, scores: Any, weight: Float[Array, "B T"]) -> Any:
        """Its choice by the scores of whole rows: arrays ``[B, T]``, which come back in `LossContext.chosen`."""
        return None


class Initial(NamedTuple):
    """A draft about to be trained: the drafter in training, and its first weights without those of the target."""

    drafter: Trainable
    params: Params


class Init(abc.ABC):
    """A source of a draft's first weights, as `draft.init` of a config names it: a frozen dataclass."""

    kind: str
    """Name in the registry and in configs."""

    @abc.abstractmethod
    def draft(self, config: Any, target: Target, rows: Any) -> Initial:
        """The draft with its first weights. ``config``: the `specjax.config.RunConfig`; ``rows``: rows of the training
        text. Raises `ConfigError` or `ModelError` if the draft cannot fit."""

    def drafter(self, config: Any, target: Target) -> Trainable | None:
        """The drafter of `draft`, without reading weights, so that memory is planned before there are any; None: that
        is not known."""
        return None


class DraftKind(Init):
    """A kind of trained drafter, as the section `draft` of a config describes it."""

    keeps_hidden: ClassVar[bool] = False
    """True if a cache of the target holds hidden states for it, not logits."""
    of_training: ClassVar[frozenset[str] | None] = None
    """Fields that say how a draft is trained or read; the others describe the draft, and a stored one has its own.
    None: not told apart."""

    @abc.abstractmethod
    def load(self, directory: str | os.PathLike, target: Target, k: int, check_finite: bool = True) -> Drafter:
        """The drafter that `Trainable.save` wrote to ``directory``, for decoding with ``target``. ``check_finite``
        refuses NaN and infinite weights. Raises `ModelError` for a directory that it cannot read."""


class Source(abc.ABC):
    """A source of training data, as `data` of a stage names it: a frozen dataclass."""

    kind: str
    """Name in the registry and in configs."""
    prompts: str | None = None
    """File of the prompts that its text continues; None: they are cut from the text of the run."""

    @abc.abstractmethod
    def rows(self, context: Any) -> Any:
        """Rows that a stage trains on, for a `specjax.training.sources.text.SourceContext`; they are made if they do
        not exist."""

    def vocabulary_rows(self, context: Any) -> Sequence[tuple[Any, float]]:
        """Rows that show, before there is a draft, which ids it has to predict, each with its share of all rows."""
        return [(context.text, 1.0)]

    def batches(self, batches: Any, directory: Path, sample: Any, steps: int) -> Any:
        """The order of the rows: ``batches``, or one that writes its own rows into ``directory`` with ``sample``."""
        return batches

    def why_not_longer(self, steps: int, taken: int) -> str | None:
        """Reason why a stage of ``steps``, of which ``taken`` are taken, cannot become a longer one, or a longer one
        become it; None if it can."""
        return None
