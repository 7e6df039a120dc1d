"""The section `draft` of heads for multi-token prediction (MTP)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array
from pydantic import Field

from specjax.config import RunConfig
from specjax.data.rows import Rows
from specjax.drafters.features import EMBEDDING_AND_HEAD, layers_like
from specjax.drafters.mtp import MTPModel, Norms, Options
from specjax.drafters.token_rows import TrainedRows
from specjax.interfaces import Batch, Output, Params, Target
from specjax.training.drafts.features import FeatureDraft, refuse_architecture
from specjax.training.init.least_squares import linear_guess, silent, unit


@dataclasses.dataclass(frozen=True)
class MTPDraft(FeatureDraft):
    """The section `draft` of an MTP head: a layer of the target's sizes, with its embedding and head, frozen."""

    depths: Annotated[int, Field(ge=1, le=16)] = 3
    """Number of a block's tokens that training unrolls."""
    depth_decay: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Weight of a depth's loss over that of the depth before."""
    state: Norms | None = None
    """Point at which the target's last stream is read: before its final norm or after it; None: before, or as a stored
    head says."""
    recycled: Norms | None = None
    """Point at which the draft's stand-in for that stream is taken, behind the root: before the draft's own last norm
    or after it; None: after, or as a stored head says."""
    kind: Literal["mtp"] = "mtp"  # pyright: ignore[reportIncompatibleVariableOverride]
    of_training: ClassVar[Any] = frozenset({"depths", "depth_decay", "state", "recycled"})

    def described(self, config: RunConfig, target: Target) -> TrainedRows:
        full = target.config
        refuse_architecture(config)
        options = dataclasses.replace(Options(), **self._named)
        model = MTPModel(layers_like(full), (full.num_layers,), full.hidden_size, options=options)
        return TrainedRows(model, EMBEDDING_AND_HEAD, depths=self.depths, decay=self.depth_decay)

    @property
    def _named(self) -> dict[str, Any]:
        asked = {"state": self.state, "recycled": self.recycled}
        return {name: norms for name, norms in asked.items() if norms is not None}

    def first(self, drafter: Any, params: Params, target: Target, rows: Rows) -> Params:
        """The best linear guess from token and state, to which the layer adds nothing yet."""
        inputs = _TokenAndState(before=drafter.model.options.state == "pre")
        fit = linear_guess(target, rows, drafter.model.reads, {}, inputs)
        layers = {i: silent(layer) for i, layer in params["layers"].items()}
        return {**params, "fc": {"kernel": jnp.asarray(fit.kernel)}, "layers": layers, "norm": fit.norm}


@dataclasses.dataclass(frozen=True)
class _TokenAndState:
    """Inputs of the linear guess: token and state, see `specjax.training.init.least_squares.Inputs`. ``before``: True
    if the state is read before the final norm."""

    before: bool

    def __call__(self, own: Params, token: Array, batch: Batch, streams: tuple[Array, ...], out: Output) -> Array:
        assert out.final is not None
        state = streams[0] if self.before else jnp.roll(out.final, 1, axis=1)
        return jnp.concatenate([unit(token), unit(jnp.asarray(state, jnp.float32))], axis=-1)
