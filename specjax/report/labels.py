"""Wording and number formats shared by the report and the terminal."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

NOT_MEASURED = "not measured"

DRAFTERS: Mapping[str, str] = {
    "autoregressive": "autoregressive",
    "draft_before": "draft before distillation",
    "draft_after": "draft after distillation",
    "adaptive": "draft, adaptive length",
    "ngram": "n-gram lookup",
    "hybrid": "n-gram lookup, else a draft",
}

FIGURES: Mapping[str, str] = {
    "target_nll": "held-out loss of the target, nats a token",
    "draft_nll": "held-out loss of the draft before distillation, nats a token",
    "nll_gap": "held-out loss of the draft minus the target's, nats a token",
    "alpha_before": "acceptance E Σ min(p, q) before distillation",
    "alpha_after": "acceptance after distillation",
    "alpha_after_at_5": "acceptance after distillation at depth 5 of a block",
    "alpha_ce_control": "acceptance when the same tokens are spent on cross-entropy",
    "alpha_positions": "held-out positions behind the acceptance",
    "greedy_identical": "greedy output equals autoregressive output token for token",
    "tokens_a_call_greedy_k5": "committed tokens a target call, greedy, k = 5, batch 1",
    "tokens_a_call_t1_k3": "committed tokens a target call, temperature 1, k = 3, batch 1",
    "speedup_greedy": "wall time against the best autoregressive loop, greedy, batch 1",
    "speedup_t1": "wall time against the best autoregressive loop, temperature 1, batch 1",
    "greedy_top_speedup": "speedup of the best k in the grid, which the timed prompts themselves choose, greedy",
    "t1_top_speedup": "speedup of the best k in the grid, which the timed prompts themselves choose, temperature 1",
    "ar_tokens_per_s": "autoregressive tokens a second, batch 1",
    "spec_tokens_per_s": "speculative tokens a second, greedy, batch 1",
    "spec_tokens_per_s_t1": "speculative tokens a second, temperature 1, batch 1",
    "memory_floor_share": "autoregressive speed as a share of what memory bandwidth allows",
    "pass_of_4": "a pass of the target over 4 tokens, over one of 1",
    "ar_overhead": "one autoregressive step over its target forward",
    "step_overhead": "one speculative step over its target and draft forwards, timed in turn as a block makes them",
    "step_overhead_apart": "one speculative step over the sum of its forwards timed alone, with all caches warm",
    "speedup_predicted_error": "predicted against measured speedup, relative error",
    "speedup_predicted_error_in_sample": "relative error with the acceptance of the timed prompts: that of the costs",
    "recompiles": "programs compiled after every bucket was seen once",
    "peak_rss_gb": "peak memory of the run, GB",
    "minutes": "training, evaluation and decoding, minutes",
}

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """`text` with control, bidirectional-override and surrogate characters shown instead of obeyed.

    Newline and tab stay. Generated text can hold escape sequences that would drive the terminal, or reorder a page.
    """

    def show(match: re.Match[str]) -> str:
        code = ord(match[0])
        if code < 0x20:
            return chr(0x2400 + code)  # the control pictures block
        return "\u2421" if code == 0x7F else f"\\u{code:04x}"

    return _UNSAFE.sub(show, text)


def format_value(value: Any) -> str:
    """Text of a figure: about four digits, thousands separated; None and NaN are `not measured`."""
    match value:
        case None:
            return NOT_MEASURED
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float() if not math.isfinite(value):
            return NOT_MEASURED
        case float():
            size = abs(value)
            if 0 < size < 0.001:
                return f"{value:.1e}"
            return f"{value:,.{3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0}f}"
        case str():
            return visible(value)
        case Mapping():
            return ", ".join(f"{format_value(key)}: {format_value(item)}" for key, item in value.items())
        case Sequence():
            return ", ".join(map(format_value, value))
        case _:
            return visible(str(value))


def format_or_dash(value: Any) -> str:
    """`format_value`, but a dash for None."""
    return "–" if value is None else format_value(value)


_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?")
_MOST_DIGITS = 17


def format_against(value: Any, bound: str) -> str:
    """`format_value` of a figure, with enough digits to differ from the last number in ``bound``: beside a bound of
    0.10, 0.10013 does not read as 0.100."""
    text, limits = format_value(value), _NUMBER.findall(bound)
    if not limits or isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return text
    limit, digits = float(limits[-1].replace(",", "")), len(text.partition(".")[2])
    if value == limit or "e" in text:
        return text
    while digits < _MOST_DIGITS and f"{value:.{digits}f}" == f"{limit:.{digits}f}":
        digits += 1
        text = f"{value:,.{digits}f}"
    return text


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(name, value) pairs of a summary; nested values have names like `outer.inner`."""
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return found


def counted(count: int, noun: str) -> str:
    """Text like `1 prompt`, `2,000 prompts`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def format_duration(seconds: float | None) -> str:
    """Text like `12.3 s`, `4 min 05 s`, `1 h 02 min`."""
    if seconds is None or not math.isfinite(seconds):
        return NOT_MEASURED
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_date(date: str) -> str:
    """ISO date to the minute, like `2025-11-21 02:10 UTC`; text that is no date stays as it is."""
    try:
        moment = datetime.datetime.fromisoformat(date)
    except ValueError:
        return visible(date)
    return f"{moment:%Y-%m-%d %H:%M} {moment.tzname() or ''}".strip()


def format_temperature_short(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


def format_temperature(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def format_interval(low: float | None, high: float | None) -> str:
    """Text of both ends of an interval, or a dash."""
    return "–" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def drafter_name(drafter: str) -> str:
    return DRAFTERS.get(drafter, visible(drafter))
