"""The section `draft` of DFlash, DSpark and DFlash 2 drafts."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from pydantic import Field

from specjax.config import RunConfig
from specjax.data.rows import Rows
from specjax.drafters.dflash.heads import Sequential
from specjax.drafters.dflash.model import DFlashModel
from specjax.drafters.dflash.training import TrainedDFlash
from specjax.drafters.features import EMBEDDING_AND_HEAD, LoadedDraft, layers_like
from specjax.errors import ConfigError
from specjax.interfaces import Params, Target
from specjax.models.training import in_float32
from specjax.training.drafts.features import FeatureDraft, last_layer, mask_token, streams
from specjax.training.init.draft_vocabulary import first_ids


@dataclasses.dataclass(frozen=True)
class DFlashDraft(FeatureDraft):
    """The section `draft` of a DFlash draft: layers of the target's sizes, with its embedding and head, frozen."""

    block_size: Annotated[int, Field(ge=2, le=64)] = 8
    """Number of slots of a block, the root's among them."""
    mask_token: Annotated[int, Field(ge=0)] | None = None
    """Id that no text has, whose embedding the slots begin with; None: the last of the vocabulary."""
    reads: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Numbers of the target's streams that the draft captures, as in `eagle3`; published drafts capture five or six."""
    layers: Annotated[int, Field(ge=1, le=16)] = 2
    """Number of the draft's layers; published drafts have five."""
    qk_norm: bool | None = None
    """True if queries and keys are normed, as in all published drafts and their servers; None: if the target's are."""
    sample_from_anchor: bool = False
    """True if a slot predicts the token behind its own, not its own."""
    anchors: Annotated[int, Field(ge=1)] = 64
    """Number of blocks that training draws from a row of text."""
    draft_vocab_size: Annotated[int, Field(ge=1)] | None = None
    """Size of the draft vocabulary, the most frequent ids of the training data; None: all ids."""
    gamma: Annotated[float, Field(gt=0)] = 4.0
    """Number of depths over which the weight of a depth falls by a factor of e."""
    kind: Literal["dflash"] = "dflash"  # pyright: ignore[reportIncompatibleVariableOverride]
    of_training: ClassVar[Any] = frozenset({"anchors", "gamma", "confidence"})

    def described(self, config: RunConfig, target: Target) -> TrainedDFlash:
        full = target.config
        reads = streams(self.reads, config, full)
        layers = layers_like(full, self.layers, self.qk_norm)
        mask = mask_token(self.mask_token, full)
        model = DFlashModel(
            layers,
            reads,
            full.hidden_size,
            vocabulary=first_ids(self.draft_vocab_size, full),
            slots=self.block_size,
            mask_token=mask,
            from_root=self.sample_from_anchor is not False,
            **self.own(full),
        )
        return TrainedDFlash(model, EMBEDDING_AND_HEAD, anchors=self.anchors, gamma=self.gamma)

    def own(self, full: Any) -> dict[str, Any]:
        """Fields of `DFlashModel` that its kind adds, for a target of these sizes."""
        return {}

    def first(self, drafter: Any, params: Params, target: Target, rows: Rows) -> Params:
        """``params`` with some of the target's layers, evenly from the first to the last, and its final norm. Each
        layer reads the deepest captured stream."""
        model, full = drafter.model, target.config
        size, count = model.config.hidden_size, model.config.num_layers
        if last_layer(target) is None:
            return params
        chosen = [max(0, round((i + 1) * full.num_layers / count) - 1) for i in range(count)]
        of_target = [in_float32(target.params["layers"][layer]) for layer in chosen]
        layers = {i: {**params["layers"][i], **layer} for i, layer in enumerate(of_target)}
        for i, layer in layers.items():
            layer["attention"] = _normed(params["layers"][i]["attention"], layer)
        fc = jnp.zeros_like(params["fc"]["kernel"]).at[-size:].set(jnp.eye(size))
        norms = {"hidden_norm": layers[count - 1]["attention_norm"]}
        norms["norm"] = in_float32(target.params["norm"])
        # Copy: each parameter is trained, so each needs its own array.
        return {**params, "fc": {"kernel": fc}, "layers": layers, **jax.tree.map(jnp.copy, norms)}


def _normed(own: Params, layer: Params) -> Params:
    """The attention of a target's layer, with the query and key norms of a draft's ``own``. A norm that the target
    lacks gets a scale that leaves queries and keys the size they have there, for independently drawn numbers."""
    found = dict(layer["attention"])
    for name in own.keys() - found.keys():
        kernel = found[name.replace("norm", "proj")]["kernel"] * layer["attention_norm"]["scale"][:, None]
        size = jnp.sqrt(jnp.mean(jnp.sum(kernel**2, axis=0)))
        found[name] = jax.tree.map(lambda scale, size=size: jnp.full_like(scale, size), own[name])
    return {name: x for name, x in found.items() if name in own}


@dataclasses.dataclass(frozen=True)
class DSparkDraft(DFlashDraft):
    """The section `draft` of a DSpark draft: `DFlashDraft` with a head that draws its tokens in sequence."""

    sample_from_anchor: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """True if a slot predicts the token behind its own, not its own; None: True, or as a stored draft says."""
    markov_rank: Annotated[int, Field(ge=1)] = 256
    """Rank of the bias that the token before adds to the logits."""
    markov_head_type: Sequential = "vanilla"
    """Form of the bias that the token before adds: by itself, gated by the slot, or with a state along the block."""
    confidence: Annotated[float, Field(ge=0)] = 1.0
    """Weight, beside the loss, of the error in the draft's prediction of its own acceptance; 0: it predicts none."""
    confidence_with_markov: bool = True
    """True if the draft's prediction of its own acceptance also reads the token before."""
    kind: Literal["dspark"] = "dspark"  # pyright: ignore[reportIncompatibleVariableOverride]

    def described(self, config: RunConfig, target: Target) -> TrainedDFlash:
        return dataclasses.replace(super().described(config, target), confidence=self.confidence)

    def own(self, full: Any) -> dict[str, Any]:
        heads = {
            "confident": self.confidence > 0,
            "confident_of_markov": self.confidence > 0 and self.confidence_with_markov,
        }
        return {"markov_rank": self.markov_rank, "markov": self.markov_head_type, **heads}

    def _stored(self, config: RunConfig, target: Target) -> LoadedDraft | None:
        found: Any = super()._stored(config, target)
        if found is not None and config.draft.settings.get("confidence") and not found.spec.confident:
            raise ConfigError("draft.confidence: the draft that draft.init names has no such head; leave it out")
        return found


@dataclasses.dataclass(frozen=True)
class DFlash2Draft(DFlashDraft):
    """The section `draft` of a DFlash 2 draft: `DFlashDraft` with convolutions and a choice among candidates."""

    conv_kernel_size: Annotated[int, Field(ge=1, le=8)] = 2
    """Number of slots that a convolution blends, a slot itself among them."""
    conv_group_size: Annotated[int, Field(ge=1)] = 16
    """Number of channels that share what a slot adds to the taps; it divides the hidden size."""
    selector_rank: Annotated[int, Field(ge=1)] = 256
    """Rank of the scores for how well a candidate follows the token before."""
    selector_top_k: Annotated[int, Field(ge=1)] = 16
    """Number of candidates of a slot, which are all that it can propose."""
    kind: Literal["dflash2"] = "dflash2"  # pyright: ignore[reportIncompatibleVariableOverride]

    def own(self, full: Any) -> dict[str, Any]:
        if self.draft_vocab_size is not None:
            raise ConfigError("draft.draft_vocab_size: a dflash2 draft chooses among all ids; leave it out")
        if full.hidden_size % self.conv_group_size:
            raise ConfigError(
                f"draft.conv_group_size: {self.conv_group_size} does not divide the target's hidden size "
                f"{full.hidden_size:,}"
            )
        if self.conv_kernel_size > self.block_size:
            raise ConfigError(
                f"draft.conv_kernel_size: {self.conv_kernel_size}, and a block has {self.block_size} slots"
            )
        if self.selector_top_k > full.vocab_size:
            raise ConfigError(
                f"draft.selector_top_k: {self.selector_top_k}, and the target has {full.vocab_size:,} ids"
            )
        selector = {"candidates": self.selector_top_k, "selector_rank": self.selector_rank}
        return {"taps": self.conv_kernel_size, "group": self.conv_group_size, "causal_window": False, **selector}
