"""How a trained draft is measured: acceptance, decoding speed, and the certificate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from specjax.config.fields import STRICT, Grid, NonNegative, Positive, buildable, distinct, kind_in
from specjax.registry import CONTROLLERS, DRAFTERS, DRAFTS

_OTHERS = ("autoregressive", "draft_before", "draft_after", *DRAFTERS)


def _is_no_other(name: str) -> str:
    if name in _OTHERS:
        raise ValueError(f"{name!r} names another drafter of the results; give it a name of its own")
    return name


_WEIGHTLESS = {kind: where for kind, where in DRAFTERS.items() if kind not in DRAFTS}


@dataclass(frozen=True, config=STRICT)
class Eval:
    """Acceptance and losses on held-out text, under teacher forcing."""

    positions: Positive = 50_000
    """Held-out positions of the final acceptance and losses."""
    batch_size: Positive = 8
    """Rows at a time; fewer where a step of the draft's last stage takes fewer."""


@dataclass(frozen=True, config=STRICT)
class Bench:
    """Decoding of held-out prompts: everything in the grid, timed interleaved."""

    prompts: Positive = 12
    """Timed prompts. Three times as many others choose k, and their acceptance predicts the speedup."""
    prompt_tokens: Annotated[int, Field(ge=1)] = 56
    """With ``new_tokens`` and a block of 8 just what the smallest cache holds, so that each point is one
    program. Of a plain text; a chat's prompt is what was said before an answer, of at most so many."""
    new_tokens: Positive = 192
    batch_sizes: Annotated[tuple[Positive, ...], *Grid] = (1, 8)
    """Rows decoded at once, by the distilled draft and ``drafters``."""
    temperatures: Annotated[tuple[Annotated[float, Field(ge=0)], ...], *Grid] = (0.0, 1.0)
    ks: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], *Grid] = (1, 2, 3, 5, 7)
    batch_ks: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], *Grid] | None = None
    """Of batches larger than 1; None: ``ks``."""
    drafters: Annotated[tuple[kind_in(_WEIGHTLESS), ...], AfterValidator(distinct)] = ("ngram",)  # pyright: ignore
    """Registered drafters that need no weights, beside the trained draft; at their default settings."""
    drafts: Mapping[Annotated[str, AfterValidator(_is_no_other)], str] = Field(default_factory=dict)
    """Name in the results -> directory of a draft that is decoded beside the trained one, at its best k and batch 1."""
    controller: buildable(CONTROLLERS) = "fixed"  # pyright: ignore[reportInvalidTypeForm]
    """How much of k is proposed, `package.module:Class` from outside."""
    adaptive: bool = True
    """Also decode with lengths chosen by measured costs, up to the longest k, at every batch size and temperature."""
    price_per_hour: Annotated[float, Field(gt=0)] | None = None
    """Of the machine, in any currency: adds the cost of a thousand tokens to every point."""
    repeats: Positive = 5
    """Timed repetitions of the autoregressive loop and of the best k; the rest of the grid is timed once."""

    @property
    def max_k(self) -> int:
        return max((*self.ks, *(self.batch_ks or ())))

    def ks_of(self, batch_size: int) -> tuple[int, ...]:
        """The grid's lengths at a batch size."""
        return self.ks if batch_size == 1 or self.batch_ks is None else self.batch_ks


@dataclass(frozen=True, config=STRICT)
class Sampling:
    """Sampling parameters of all decoding in a run, beside the temperature; their meanings: specjax/sampling.py."""

    top_k: NonNegative = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: NonNegative = 0
    logit_bias: dict[int, float] = dataclasses.field(default_factory=dict)
    """Token id -> what is added to its logit."""
    banned_tokens: tuple[NonNegative, ...] = ()
    allowed_tokens: tuple[NonNegative, ...] = ()
    """All others are banned; empty: none is."""
    stop_token_ids: tuple[NonNegative, ...] = ()
    """Beside the target's end-of-sequence ids."""

    def options(self) -> dict[str, Any]:
        """As arguments of `Decoder.generate`."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


@dataclass(frozen=True, config=STRICT)
class Certify:
    """What `specjax certify` checks, and how surely."""

    drafter: buildable(DRAFTERS) = None  # pyright: ignore[reportInvalidTypeForm]
    """`{kind: draft_model, model: PATH, k: 5}`, `{kind: ngram, k: 5}`, ...; None: the draft trained in `out`."""
    k: Annotated[int, Field(ge=1, le=64)] = 5
    """Draft length of the trained draft."""
    controller: buildable(CONTROLLERS) = "fixed"  # pyright: ignore[reportInvalidTypeForm]
    """How much of k is proposed, `package.module:Class` from outside."""
    temperature: Annotated[float, Field(ge=1e-5)] = 1.0
    prompts: Annotated[int, Field(ge=4)] = 8
    prompt_tokens: Positive = 64
    new_tokens: Annotated[int, Field(ge=3)] = 192
    batch_size: Positive = 16
    """Rows of a batch of sampled generations; the prompts take turns."""
    total_variation: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """A distribution this far off is found with probability `power`."""
    power: Annotated[float, Field(gt=0, lt=1)] = 0.99
    level: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    """Probability that an exact pair is failed by chance."""
    margin: Annotated[float, Field(ge=0)] = 1e-4
    """Largest gap between the two best logits at which another choice is put down to rounding."""
