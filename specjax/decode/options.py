"""Sampling parameters of a generation: their types, the ranges of those that are numbers, and what they mean. The
command line makes its options of them, so this module imports nothing that takes long."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters, each one value for all rows or one a row; one that is left out changes nothing. Meanings:
    `specjax.sampling`."""

    temperature: float | Sequence[float]
    """Divisor of the logits; 0 is greedy."""
    top_k: int | Sequence[int]
    """Draw from the k most likely tokens only; 0: off."""
    top_p: float | Sequence[float]
    """Draw from the most likely tokens that reach this probability together; 1: off."""
    min_p: float | Sequence[float]
    """Draw from tokens at least this many times as likely as the most likely one; 0: off."""
    repetition_penalty: float | Sequence[float]
    """Divides positive logits of tokens seen in prompt or output, multiplies negative ones; 1: off."""
    presence_penalty: float | Sequence[float]
    """Subtracted from the logit of every token generated so far; 0: off."""
    frequency_penalty: float | Sequence[float]
    """Subtracted from a token's logit once for each time it was generated; 0: off."""
    min_new_tokens: int | Sequence[int]
    """Number of new tokens before the first stop token may come."""
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]]
    """Token id -> number added to its logit."""
    banned_tokens: Sequence[int] | Sequence[Sequence[int]]
    """Tokens that are never drawn."""
    allowed_tokens: Sequence[int] | Sequence[Sequence[int]]
    """The only tokens that may be drawn; an empty list allows all."""
    stop_token_ids: Sequence[int] | Sequence[Sequence[int]]
    """Ids that end a row, in addition to the target's end-of-sequence ids."""


def meanings() -> dict[str, str]:
    """The sentence under each parameter of `SamplingOptions`."""
    (cls,) = ast.parse(inspect.getsource(SamplingOptions)).body
    assert isinstance(cls, ast.ClassDef)
    return {
        ast.unparse(field.target): inspect.cleandoc(ast.literal_eval(text.value))
        for field, text in itertools.pairwise(cls.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


@dataclasses.dataclass(frozen=True)
class Range:
    """Range of a sampling parameter: neutral value, test, description of the valid values."""

    neutral: float
    holds: Callable[[float], bool]
    expected: str
    whole: bool = False


_LEAST, _NORMAL = struct.unpack("f", struct.pack("f", 1e-5))[0], 2.0**-126
"""Least temperature above 0, and least normal float32. Numbers below the latter have fewer digits, and XLA makes 0 of
them."""
NUMBERS = {
    "temperature": Range(0.0, lambda x: x == 0 or x >= _LEAST, "a finite number >= 0 (0, or at least 1e-5)"),
    "top_k": Range(0, lambda x: x >= 0, "a whole number >= 0 (0: all tokens)", whole=True),
    "top_p": Range(1.0, lambda x: _NORMAL <= x <= 1, "in (0, 1], at least 1.2e-38 (1: all tokens)"),
    "min_p": Range(0.0, lambda x: 0 <= x <= 1, "in [0, 1] (0: all tokens)"),
    "repetition_penalty": Range(1.0, lambda x: 1e-20 < x < 1e20, "a finite number > 0, from 1e-20 to 1e20 (1: none)"),
    "presence_penalty": Range(0.0, lambda x: True, "a finite number (0: none)"),
    "frequency_penalty": Range(0.0, lambda x: True, "a finite number (0: none)"),
    "min_new_tokens": Range(0, lambda x: x >= 0, "a whole number >= 0", whole=True),
}
