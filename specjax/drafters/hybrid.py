"""Text first, else a model: rows whose newest tokens stand earlier in their text propose what followed there, as n-gram
lookup does (2304.04487), and the other rows ask a draft with weights. What is copied and repeated is proposed for
nothing, and often right where a small model is wrong; the model proposes what is new. While every row finds something,
the model does not run.

A row's source depends on its committed tokens alone, so the output keeps the target's distribution: tokens of the text
are drawn from a distribution with all of its mass on them.

Dims: B rows, K draft length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool
from pydantic import Field

from specjax import registry
from specjax.backend import run_if
from specjax.drafters.ngram import NGram
from specjax.errors import ConfigError
from specjax.interfaces import Bound, BoundDrafter, Context, Draft, Drafter, Outcome, Params, Reads, Target, TargetView


@dataclasses.dataclass(frozen=True)
class Hybrid(Drafter):
    """Text first, else a model, row by row: n-gram lookup where it finds something (2304.04487, `specjax.NGram`), and
    ``model`` in the other rows.

    Raises:
        ConfigError: ``model`` is no drafter with weights, or proposes more than ``k`` tokens.
    """

    model: Any
    """A drafter with weights, a mapping such as ``{kind: eagle3, model: PATH}``, or the directory of one, which then
    proposes up to ``k`` tokens."""
    k: Annotated[int, Field(ge=1, le=64)] = 5
    """Most proposed tokens of a block, 1 to 64."""
    max_n: Annotated[int, Field(ge=1, le=16)] = 4
    """Tokens of the longest match, 1 to 16."""
    min_n: Annotated[int, Field(ge=1, le=16)] = 2
    """Tokens of the shortest match, 1 to ``max_n``."""
    kind: Literal["hybrid"] = "hybrid"
    """Name in the registry, in configs and in results."""

    def __post_init__(self) -> None:
        if isinstance(self.model, Mapping):
            object.__setattr__(self, "model", registry.build(registry.DRAFTERS, self.model, "hybrid.model"))
        if isinstance(self.model, NGram | Hybrid) or not isinstance(self.model, (Drafter, str, os.PathLike)):
            raise ConfigError(f"hybrid: model={self.model!r}; give a drafter with weights, or the directory of one")
        if isinstance(self.model, Drafter) and self.model.k > self.k:
            raise ConfigError(f"hybrid: k={self.k}, and its model proposes k={self.model.k} tokens; raise the first")
        self._lookup()  # which checks its own sizes

    def _lookup(self) -> NGram:
        """The drafter of rows that the text has something for."""
        return NGram(self.k, self.max_n, self.min_n)

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model; None if it has none of its own, or is given as a path."""
        return self.model.tokenizer if isinstance(self.model, Drafter) else None

    @property
    def replaceable(self) -> list[Any]:
        """Weights that the model holds now; none of a path."""
        return self.model.replaceable if isinstance(self.model, Drafter) else []

    def bind(self, target: Target) -> Bound:
        """Both drafters bound to the target.

        Args:
            target: the `LoadedModel` to speculate for.

        Returns:
            The bound form, which the engine runs, and the model's weights.

        Raises:
            ModelError: the model cannot be read, or cannot be paired with the target.
            ConfigError: the model proposes trees.
        """
        drafter = self.model if isinstance(self.model, Drafter) else registry.reader()(self.model, target, self.k)
        model, params = drafter.bind(target)
        if model.num_nodes != model.max_depth:
            raise ConfigError(f"hybrid: its model, {drafter.kind!r}, proposes trees; give one that proposes chains")
        return Bound(BoundHybrid(model, self._lookup()), params)


@dataclasses.dataclass(frozen=True)
class BoundHybrid(BoundDrafter):
    """The bound form, which the engine runs. The state is the model's."""

    model: BoundDrafter
    text: NGram

    @property
    def k(self) -> int:
        return self.text.k

    @property
    def reads(self) -> Reads:
        return self.model.reads

    @property
    def reads_late(self) -> bool:
        return self.model.reads_late

    @property
    def previews(self) -> bool:
        return True

    @property
    def match_classes(self) -> int:
        """Number of match classes: the text's, and behind them one of the model."""
        return self.text.match_classes + 1

    @property
    def model_class(self) -> int:
        return self.text.match_classes

    @property
    def max_positions(self) -> int | None:
        return self.model.max_positions

    @property
    def model_config(self) -> Any:
        return self.model.model_config

    def init(self, batch: int, num_slots: int) -> Any:
        return self.model.init(batch, num_slots)

    def extend(self, params: Params, state: Any, tokens, lengths, target_out, start=None) -> Any:
        return self.model.extend(params, state, tokens, lengths, target_out, start)

    def preview(self, context: Context) -> Draft:
        """The text's proposals, and in the other rows as many tokens as the model may propose."""
        text, found = self._found(context)
        valid = jnp.where(found[:, None], text.valid, jnp.arange(self.k, dtype=jnp.int32)[None] < self.model.k)
        return dataclasses.replace(text, valid=valid, match_class=self._classes(text, found))

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        """The text's tokens in rows that it has some for, the model's in the others. A row of the text asks nothing of
        the model, which runs if another row does."""
        text, found = self._found(context)
        most = jnp.full(found.shape, self.k, jnp.int32) if context.limit is None else context.limit
        limit = jnp.where(found, 0, jnp.minimum(most, self.model.k))
        asked = dataclasses.replace(context, limit=limit)

        def drafted(carry: tuple[Draft, Any]) -> tuple[Draft, Any]:
            return self.model.draft(params, target, carry[1], asked)

        shape = jax.eval_shape(lambda: drafted((text, state))[0])
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
        wanted = limit > 0 if context.active is None else (limit > 0) & context.active
        draft, state = run_if(jnp.any(wanted), drafted, (nothing, state))
        return self._merged(text, found, _longer(draft, self.k)), state

    def commit(self, params: Params, state: Any, outcome: Outcome) -> Any:
        """The model's state after verification. A model that reads late what it missed has read no more than the root
        of a block that the text proposed."""
        verdict, of = outcome.verdict, outcome.draft.match_class
        if self.reads_late and of is not None:
            own = jnp.where(of == self.model_class, verdict.num_accepted, 0)
            outcome = dataclasses.replace(outcome, verdict=dataclasses.replace(verdict, num_accepted=own))
        return self.model.commit(params, state, outcome)

    def _found(self, context: Context) -> tuple[Draft, Bool[Array, " B"]]:
        """The text's proposal, and the rows that take it. None does while blocks are measured without the text."""
        text = self.text.preview(context)
        found = jnp.any(text.valid, axis=1)
        if context.calibration is not None and context.calibration.found is not None:
            found &= jnp.any(jnp.isfinite(context.calibration.found))
        return text, found

    def _classes(self, text: Draft, found: Bool[Array, " B"]) -> Array:
        assert text.match_class is not None
        return jnp.where(found, text.match_class, self.model_class)

    def _merged(self, text: Draft, found: Bool[Array, " B"], draft: Draft) -> Draft:
        """The text's tokens in the rows ``found``, those of ``draft`` in the others."""
        of_text, logits, finite = found[:, None], draft.logits, draft.finite
        if logits is not None:
            own = text.tokens[..., None] == jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None]
            certain = jnp.where(own, 0.0, -jnp.inf).astype(logits.dtype)
            logits = jnp.where(of_text[..., None], certain, logits)
        return Draft(
            jnp.where(of_text, text.tokens, draft.tokens),
            jnp.where(of_text, text.valid, draft.valid),
            logits,
            finite=None if finite is None else finite | of_text,
            match_class=self._classes(text, found),
        )


def _longer(draft: Draft, k: int) -> Draft:
    """A chain with room for ``k`` tokens, none proposed in what is added."""
    more = k - draft.tokens.shape[1]
    parts = {name: getattr(draft, name) for name in ("tokens", "valid", "logits", "finite")}
    wide = {
        name: jnp.pad(x, ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2)), constant_values=name == "finite")
        for name, x in parts.items()
        if x is not None
    }
    return dataclasses.replace(draft, **wide)
