"""Arguments of a generation, checked row by row and padded into the buckets that programs are compiled for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from specjax import sampling
from specjax.data import encoding
from specjax.decode.arguments import token_ids
from specjax.decode.options import NUMBERS, SamplingOptions
from specjax.decode.programs import Request
from specjax.errors import DataError
from specjax.interfaces import LogitsContext, LogitsProcessor, Model, SamplingParams, Target
from specjax.models.vocabulary import unused_ids

Prompt = str | Sequence[int]
LEAST_PROMPT, LEAST_SLOTS, STOP_IDS = 16, 256, 8


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch ready for the engine. ``slots``: cache sizes in the order of their use, the last one with room for every
    row's whole generation."""

    request: Request
    seeds: list[int]
    greedy: bool
    slots: tuple[int, ...]

    extras: tuple[str, ...] = ()
    """Sampling steps that rows ask for in addition to temperature, see `Context.extras`."""

    @property
    def rows(self) -> int:
        """Number of padded rows."""
        return self.request.prompt.shape[0]

    @property
    def shapes(self) -> tuple[int, ...]:
        """Sizes of the padded batch: rows, width of the prompts, slots of its first cache."""
        return (*self.request.prompt.shape, self.slots[0])

    def within(self, slots: int) -> Batch:
        """The batch in a cache of ``slots`` slots, which has room for it."""
        request = dataclasses.replace(self.request, prompt=self.request.prompt[:, :slots])
        return dataclasses.replace(self, request=request, slots=(slots,))


@dataclasses.dataclass(frozen=True)
class _Checked:
    """A checked request, row by row. ``bias``: numbers added to the logits, minus infinity for banned tokens."""

    prompts: list[list[int]]
    budgets: list[int]
    numbers: dict[str, list]
    seeds: list[int]
    stops: list[list[int]]
    bias: Float[np.ndarray, "B V"]


def prepare(
    target: Target,
    k: int,
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int],
    seed: int | Sequence[int],
    ignore_eos: bool,
    options: Mapping[str, Any],
) -> Batch:
    """A request for blocks of ``k`` proposed tokens, checked and padded. Raises `DataError` naming the argument, the
    row and the value that cannot be used, and `TypeError` for an unknown option."""
    checked = _check(target, prompts, max_new_tokens, seed, ignore_eos, options)
    greedy = all(t == 0 for t in checked.numbers["temperature"])
    longest = max(map(len, checked.prompts))
    end = max(len(row) + budget for row, budget in zip(checked.prompts, checked.budgets, strict=True))
    _, width, slots = padded_sizes(target, k, len(checked.prompts), longest, end - longest)
    asked = {name for name, values in checked.numbers.items() if any(x != NUMBERS[name].neutral for x in values)}
    extras = sampling.extras_of(asked)
    return Batch(_padded(checked, width, greedy), checked.seeds, greedy, slots, extras)


def fitting(target: Target, prompts: Any, blocks: int, size: int) -> tuple[list[list[int]], int]:
    """The prompts as token ids, and the number of blocks of ``size`` tokens that can follow them: at most ``blocks``, 0
    if the target has no positions for one. To make room for the blocks, prompts lose their first tokens. Raises
    `DataError` as `prepare` does."""
    rows, positions = _encoded(target, prompts), positions_of(target)
    blocks = min(blocks, (positions - 1) // size)
    return [row[-max(positions - blocks * size, 1) :] for row in rows], blocks


def positions_of(target: Target) -> int:
    """Number of tokens of the longest generation that is exact, prompt included."""
    positions, limit = target.config.max_positions, target.spec.dynamic_limit
    return positions if limit is None else min(positions, limit)


def _encoded(target: Target, prompts: Any) -> list[list[int]]:
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        found = type(prompts).__name__ if isinstance(prompts, (str, Mapping, np.ndarray)) else repr(prompts)
        raise DataError(f"prompts: {found}; give a list of strings or of token-id lists; for one prompt, a list of one")
    if not prompts:
        raise DataError("prompts: the list is empty; give at least one prompt")
    unused = unused_ids(target)
    return [_encode(target, prompt, i, unused) for i, prompt in enumerate(prompts)]


def _check(target: Target, prompts: Any, max_new_tokens: Any, seed: Any, ignore_eos: bool, options: Any) -> _Checked:
    """The checks of `prepare`, before padding."""
    unknown = next((name for name in options if name not in SamplingOptions.__annotations__), None)
    if unknown is not None:
        raise TypeError(
            f"{unknown!r} is no argument of a generation, known are {', '.join(SamplingOptions.__annotations__)}"
        )
    rows, unused = _encoded(target, prompts), unused_ids(target)
    count, size = len(rows), target.config.vocab_size
    budgets = [
        _whole("max_new_tokens", i, x, 1) for i, x in enumerate(per_row("max_new_tokens", max_new_tokens, count))
    ]
    numbers = {name: _numbers(name, options.get(name, r.neutral), count) for name, r in NUMBERS.items()}
    seeds = _seeds(seed, count)
    _check_sizes(target, rows, budgets, numbers)
    stops = _stop_ids(target, options, count, ignore_eos)
    bias = _bias(options, size, count)
    bias[:, unused] = -np.inf
    for i, (row, least) in enumerate(zip(bias, numbers["min_new_tokens"], strict=True)):
        left = np.isfinite(row)
        if least:
            left[stops[i]] = False
        if not left.any():
            raise DataError(
                f"row {i}: banned_tokens, allowed_tokens, logit_bias and min_new_tokens leave no token; allow one"
            )
    return _Checked(rows, budgets, numbers, seeds, stops, bias)


def _check_sizes(target: Target, rows: list[list[int]], budgets: list[int], numbers: Mapping[str, list]) -> None:
    positions, size = positions_of(target), target.config.vocab_size
    limited = target.spec.dynamic_limit is not None
    for i, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
        if len(row) + budget > positions:
            dynamic = " (past them its dynamic rotary scaling changes with every token, and a block would not be exact)"
            raise DataError(
                f"prompt {i} has {len(row)} tokens; with max_new_tokens={budget} it exceeds the target's "
                f"{positions} positions{dynamic if limited else ''}; shorten one of them"
            )
        if numbers["top_k"][i] > size:
            raise DataError(f"top_k of row {i}: {numbers['top_k'][i]} exceeds the vocabulary of {size}; 0 keeps all")
        if numbers["min_new_tokens"][i] > budget:
            raise DataError(
                f"min_new_tokens of row {i}: {numbers['min_new_tokens'][i]} exceeds max_new_tokens={budget}"
            )


def _padded(checked: _Checked, width: int, greedy: bool) -> Request:
    """The request, with prompts padded to ``width`` tokens. It has host arrays where the engine's types say device
    arrays: the jitted prefill takes both."""
    count, size = checked.bias.shape
    padded = bucket(count)
    prompt: Any = np.zeros((padded, width), np.int32)
    for i, row in enumerate(checked.prompts):
        prompt[i, : len(row)] = row
    stop_ids: Any = np.full((padded, bucket(max(map(len, checked.stops)), STOP_IDS)), -1, np.int32)
    for i, ids in enumerate(checked.stops):
        stop_ids[i, : len(ids)] = ids
    bias: Any = np.zeros((padded, size), np.float32)
    bias[:count] = checked.bias

    def pad(values, fill, dtype) -> Any:
        return np.asarray([*values, *[fill] * (padded - count)], dtype)

    neutral = {name: r.neutral for name, r in NUMBERS.items()} | {"temperature": 0.0 if greedy else 1.0}
    sampled = {
        name: pad(checked.numbers[name], neutral[name], np.int32 if r.whole else np.float32)
        for name, r in NUMBERS.items()
    }
    return Request(
        prompt=prompt,
        lengths=pad(map(len, checked.prompts), 1, np.int32),
        budget=pad(checked.budgets, 0, np.int32),
        sampling=SamplingParams(bias=bias, **sampled),
        seeds=pad([(s >> 32, s & 0xFFFFFFFF) for s in checked.seeds], (0, 0), np.uint32),
        stop_ids=stop_ids,
    )


def request_shapes(rows: int, width: int, vocab_size: int) -> Request:
    """The shapes of a request with ``rows`` padded rows and prompts of ``width`` tokens, without data."""

    def of(*sizes: int, dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    numbers = {name: of(rows, dtype=np.int32 if r.whole else np.float32) for name, r in NUMBERS.items()}
    sampling = SamplingParams(bias=of(rows, vocab_size, dtype=np.float32), **numbers)
    seeds, stop_ids = of(rows, 2, dtype=np.uint32), of(rows, STOP_IDS)
    return Request(of(rows, width), of(rows), of(rows), sampling, seeds, stop_ids)


def padded_sizes(target: Target | Model, k: int, rows: int, prompt: int, new: int) -> tuple[int, int, tuple[int, ...]]:
    """Padded rows, width of the prompts, and cache sizes in the order of their use, of a batch of ``rows`` prompts of
    ``prompt`` tokens and ``new`` new ones. A length past the target's positions, which `prepare` refuses, counts as the
    largest possible."""
    most = most_slots(target, k)
    width = min(bucket(prompt, LEAST_PROMPT), most)
    return bucket(rows), width, slot_buckets(width, min(prompt + new + k + 1, most), most)


def slots_for(target: Target | Model, k: int, tokens: int) -> int:
    """Cache slots for rows of so many ``tokens`` at most, with a block of ``k`` proposed tokens behind them."""
    return min(_rounded_up(tokens + k + 1), most_slots(target, k))


def most_slots(target: Target | Model, k: int) -> int:
    """Cache slots of the target's longest generation, with a block of ``k`` proposed tokens that begins at its last
    position."""
    return _rounded_up(target.config.max_positions + k + 1)


def _rounded_up(slots: int) -> int:
    """``slots``, rounded up to a size that vectors divide."""
    return -(-slots // 32) * 32


def slot_buckets(width: int, needed: int, most: int) -> tuple[int, ...]:
    """Cache sizes in the order of their use: powers of two from the prompt's bucket on, or from 256, up to ``needed``;
    the last one is cut to ``most``."""
    slots = [min(max(width, LEAST_SLOTS), most)]
    while slots[-1] < needed:
        slots.append(min(2 * slots[-1], most))
    return tuple(slots)


def check_processor(processor: LogitsProcessor, request: Request, slots: int) -> None:
    """Raise `DataError`, before any decoding, for a processor that cannot be called or that changes the shape or dtype
    of the logits."""
    batch, size = request.sampling.bias.shape
    logits, lengths = jax.ShapeDtypeStruct((batch, size), np.float32), jax.ShapeDtypeStruct((batch,), np.int32)
    context = LogitsContext(jax.ShapeDtypeStruct((batch, slots), np.int32), lengths, lengths)  # type: ignore[arg-type]
    name = getattr(processor, "__name__", type(processor).__name__)
    try:
        hash(processor)
        out = jax.eval_shape(processor, logits, context)
    except TypeError as error:
        raise DataError(f"logits_processor {name}: cannot be called as f(logits, context): {error}") from error
    if getattr(out, "shape", None) != logits.shape or out.dtype != logits.dtype:
        found = f"{out.dtype}{list(out.shape)}" if hasattr(out, "shape") else type(out).__name__
        raise DataError(
            f"logits_processor {name}: returns {found} for logits of float32{list(logits.shape)}; "
            "return an array of the same shape and dtype"
        )


def per_row(name: str, value: Any, count: int) -> list:
    value = _scalar(value)
    if isinstance(value, (int, float, np.number)):
        return [value] * count
    if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, str):
        raise DataError(f"{name}: {value!r}; give one value, or a list of one a row")
    values = list(value)
    if len(values) != count:
        raise DataError(f"{name}: {len(values)} values for {count} prompts; give one value or one a row")
    return values


def _scalar(value: Any) -> Any:
    """The number in an array without dimensions; any other value as it is."""
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value


def _number(value: Any) -> float:
    """The value as a float; NaN for anything that is no number, and for a boolean."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf if value > 0 else -math.inf


def _told(value: Any) -> str:
    text = str(value)
    return text if len(text) < 40 else f"{text[:36]}..."


def derive_seeds(seed: int, count: int) -> list[int]:
    """64-bit seeds of the rows. Row i gets number i of the SplitMix64 stream (Steele et al. 2014) that starts at the
    mixed ``seed``. So neither neighbouring seeds nor neighbouring rows share a stream, and (s, i) gives another seed
    than (i, s)."""
    golden = np.uint64(0x9E3779B97F4A7C15)

    def mix(x):
        x = x + golden
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    start = mix(np.full(1, seed % 2**64, np.uint64))
    return mix(start + golden * np.arange(count, dtype=np.uint64)).tolist()


def _seeds(seed: Any, count: int) -> list[int]:
    """One seed a row: those given, or seeds derived from the single one given."""
    seed = _scalar(seed)
    if isinstance(seed, (Sequence, np.ndarray)) and not isinstance(seed, str):
        return [_whole("seed", i, s) % 2**64 for i, s in enumerate(per_row("seed", seed, count))]
    return derive_seeds(_whole("seed", None, seed), count)


def is_whole(value: Any) -> bool:
    """True for an integer; a float is none, not even 3.0, and neither is a boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _whole(name: str, row: int | None, value: Any, least: int | None = None) -> int:
    """The value as an integer. Raises `DataError` if it is no whole number, or below ``least``."""
    if is_whole(value) and (least is None or value >= least):
        return int(value)
    of_row = "" if row is None else f" of row {row}"
    expected = "a whole number" if least is None else f"a whole number of at least {least}"
    raise DataError(f"{name}{of_row}: {value!r} is not {expected}")


def _numbers(name: str, value: Any, count: int) -> list:
    limits, values = NUMBERS[name], per_row(name, value, count)
    for i, x in enumerate(values):
        # In float32, as on the device: a value that overflows there is no number.
        if not (abs(_number(x)) < 1e30 and limits.holds(float(np.float32(x))) and (not limits.whole or int(x) == x)):
            raise DataError(f"{name} of row {i}: {_told(x)} is not {limits.expected}")
    return values


def _lists(name: str, options: Mapping[str, Any], size: int, count: int) -> list:
    """A list of token ids (or a mapping from them) for each row, from one for all rows or one a row; None in a row
    becomes an empty one."""
    value = _scalar(options.get(name))
    if value is None:
        return [()] * count
    what = "mapping from token id to number" if name == "logit_bias" else "list"
    if not isinstance(value, (Mapping, Sequence, np.ndarray)) or isinstance(value, str):
        raise DataError(f"{name}: {value!r}; give a {what} for all rows, or one a row")
    if isinstance(value, Mapping) or all(isinstance(x, (int, np.integer)) for x in value):
        rows = [value] * count
    else:
        rows = [() if x is None else x for x in per_row(name, value, count)]
    for i, ids in enumerate(rows):
        if isinstance(ids, str) or not isinstance(ids, (Mapping, Sequence, np.ndarray)):
            raise DataError(f"{name} of row {i}: {ids!r} is no list")
    for i, ids in enumerate(rows):
        if name == "logit_bias" and not isinstance(ids, Mapping) and len(ids):
            raise DataError(f"{name} of row {i}: {ids!r}; give a {what}")
        bad = next((x for x in ids if not (is_whole(x) and 0 <= x < size)), None)
        if bad is not None:
            raise DataError(f"{name} of row {i}: {bad} is no token id of the vocabulary of {size}")
    return rows


def _stop_ids(target: Target, options: Mapping[str, Any], count: int, ignore_eos: bool) -> list[list[int]]:
    own = [] if ignore_eos else list(target.eos_ids)
    given = _lists("stop_token_ids", options, target.config.vocab_size, count)
    return [list(dict.fromkeys([*own, *map(int, ids)])) for ids in given]


def _bias(options: Mapping[str, Any], size: int, count: int) -> np.ndarray:
    bias = np.zeros((count, size), np.float32)
    for i, values in enumerate(_lists("logit_bias", options, size, count)):
        for token, value in dict(values).items():
            if not (number := _number(value)) <= 1e30:
                raise DataError(f"logit_bias of row {i}: {_told(value)} for token {token} is not a number below 1e30")
            bias[i, token] = number if number > -1e30 else -np.inf
    for row, ids in zip(bias, _lists("banned_tokens", options, size, count), strict=True):
        row[list(ids)] = -np.inf
    for row, ids in zip(bias, _lists("allowed_tokens", options, size, count), strict=True):
        if len(ids):
            row[np.setdiff1d(np.arange(size), ids)] = -np.inf
    return bias


def _encode(target: Target, prompt: Prompt, index: int, unused: np.ndarray) -> list[int]:
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise DataError(f"prompt {index} is text, but the target has no tokenizer; give token ids")
        ids = encoding.encode(target.tokenizer, prompt)
    else:
        ids = token_ids(prompt, f"prompt {index}")
    if not ids:
        raise DataError(f"prompt {index} is empty; give at least one token (for example the beginning-of-sequence)")
    vocabulary = target.config.vocab_size
    bad = next((t for t in ids if not 0 <= t < vocabulary), None)
    if bad is not None:
        raise DataError(f"prompt {index}: token id {bad} is outside the target's vocabulary of {vocabulary}")
    # A draft may have no row for this id, and n-gram lookup would propose it.
    if len(unused) and len(padding := np.intersect1d(ids, unused)):
        raise DataError(
            f"prompt {index}: token id {padding[0]} is no token of the target's tokenizer, which has "
            f"{vocabulary - len(unused)} for {vocabulary} rows; give ids that it knows"
        )
    return ids


def bucket(size: int, smallest: int = 1) -> int:
    """The next power of two, at least ``smallest``."""
    return max(smallest, 1 << max(size - 1, 0).bit_length())
