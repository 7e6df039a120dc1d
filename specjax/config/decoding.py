"""Sections of a config that measure a trained draft: acceptance, decoding speed, and the certificate."""

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


_BESIDE = {kind: where for kind, where in DRAFTERS.items() if kind not in DRAFTS}


@dataclass(frozen=True, config=STRICT)
class Eval:
    """Acceptance and losses on held-out text, under teacher forcing."""

    positions: Positive = 50_000
    """Number of held-out positions that the final acceptance and losses are measured on."""
    batch_size: Positive = 8
    """Most rows evaluated at a time; never more than a step of the draft's last stage computes at a time."""


@dataclass(frozen=True, config=STRICT)
class Bench:
    """Decoding of held-out prompts; all points of the grid are timed in turns."""

    prompts: Positive = 12
    """Number of timed prompts. Three times as many others choose k, and acceptance on those predicts the speedup."""
    prompt_tokens: Annotated[int, Field(ge=1)] = 56
    """Tokens of a prompt cut from plain text; a chat's prompt is all that comes before an answer, at most this many
    tokens. The default, ``new_tokens`` and a block of 8 just fill the smallest cache, so each point is one program."""
    new_tokens: Positive = 192
    ignore_eos: bool = True
    """True: every prompt gets all its ``new_tokens``. False: an answer ends where the target ends it, as a user's does;
    behind that end a chat model repeats itself, and lookup looks better than it is."""
    batch_sizes: Annotated[tuple[Positive, ...], *Grid] = (1, 8)
    """Numbers of rows that the distilled draft and ``drafters`` decode at once."""
    temperatures: Annotated[tuple[Annotated[float, Field(ge=0)], ...], *Grid] = (0.0, 1.0)
    ks: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], *Grid] = (1, 2, 3, 5, 7)
    batch_ks: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], *Grid] | None = None
    """Draft lengths of batches larger than 1; None: ``ks``."""
    drafters: Annotated[tuple[kind_in(_BESIDE), ...], AfterValidator(distinct)] = ("ngram",)  # pyright: ignore
    """Registered drafters without weights of their own, measured beside the trained draft at their default settings;
    `hybrid`: n-gram lookup, and the trained draft where that finds nothing."""
    drafts: Mapping[Annotated[str, AfterValidator(_is_no_other)], str] = Field(default_factory=dict)
    """Name in the results -> directory of another draft, decoded at batch 1 and the best k of the trained draft."""
    controller: buildable(CONTROLLERS) = "fixed"  # pyright: ignore[reportInvalidTypeForm]
    """Controller that chooses how many of k tokens a block proposes; `package.module:Class` for one of your own."""
    adaptive: bool = True
    """Also decode with lengths chosen by measured block costs, up to the longest k, at each batch size and
    temperature."""
    price_per_hour: Annotated[float, Field(gt=0)] | None = None
    """Price of an hour of the machine, in any currency; adds the cost of a thousand tokens to every point."""
    repeats: Positive = 5
    """Number of timed repetitions of plain decoding, the trained draft and its hybrid at batch 1; all else is timed
    once."""

    @property
    def max_k(self) -> int:
        return max((*self.ks, *(self.batch_ks or ())))

    def ks_of(self, batch_size: int) -> tuple[int, ...]:
        """Draft lengths of the grid at a batch size."""
        return self.ks if batch_size == 1 or self.batch_ks is None else self.batch_ks


@dataclass(frozen=True, config=STRICT)
class Sampling:
    """Sampling parameters of all decoding in a run, apart from the temperature; specjax/sampling.py explains them."""

    top_k: NonNegative = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: NonNegative = 0
    logit_bias: dict[int, float] = dataclasses.field(default_factory=dict)
    """Token id -> number added to its logit."""
    banned_tokens: tuple[NonNegative, ...] = ()
    allowed_tokens: tuple[NonNegative, ...] = ()
    """The only token ids that may be emitted; empty: all may."""
    stop_token_ids: tuple[NonNegative, ...] = ()
    """Token ids that end a generation, besides the target's end-of-sequence ids."""

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `Decoder.generate`."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


@dataclass(frozen=True, config=STRICT)
class Certify:
    """Checks of `specjax certify`, and the error probabilities of its test."""

    drafter: buildable(DRAFTERS) = None  # pyright: ignore[reportInvalidTypeForm]
    """Drafter to certify: `{kind: draft_model, model: PATH, k: 5}`, `{kind: ngram, k: 5}`, ...; None: the draft trained
    in `out`."""
    k: Annotated[int, Field(ge=1, le=64)] = 5
    """Draft length of the trained draft."""
    controller: buildable(CONTROLLERS) = "fixed"  # pyright: ignore[reportInvalidTypeForm]
    """Controller that chooses how many of k tokens a block proposes; `package.module:Class` for one of your own."""
    temperature: Annotated[float, Field(ge=1e-5)] = 1.0
    prompts: Annotated[int, Field(ge=4)] = 8
    prompt_tokens: Positive = 64
    new_tokens: Annotated[int, Field(ge=3)] = 192
    batch_size: Positive = 16
    """Number of rows of a batch of sampled generations; the prompts take turns."""
    total_variation: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Total variation from the target's distribution that the test finds with probability `power`."""
    power: Annotated[float, Field(gt=0, lt=1)] = 0.99
    level: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    """Probability that the test fails an exact drafter and verifier by chance."""
    margin: Annotated[float, Field(ge=0)] = 1e-4
    """Largest gap between the two best logits at which another greedy choice counts as rounding."""
