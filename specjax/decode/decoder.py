"""The host half of decoding: prompts in, results or a stream of events out. Checks every input, pads it into buckets,
and runs the jitted chunks of `specjax.decode.engine`; `generate` and `stream` are the same loop.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specjax import registry
from specjax.backend import decode_layout
from specjax.decode import engine as engine_lib
from specjax.decode.engine import Engine, EngineParams, NoDraft, Request
from specjax.decode.result import Event, GenerationResult, Piece, cut_pieces, origin_names, stats_by_row
from specjax.errors import DataError
from specjax.types import DecodeState, Drafter, SamplingParams, Verifier

Prompt = str | Sequence[int]

_NO_LIMIT = np.iinfo(np.int32).max
_MIN_BUCKET, _FIRST_SLOTS, _STOP_IDS = 16, 256, 8


class Decoder:
    """Decode with a target and, optionally, a drafter.

    ``target``: a `specjax.load_model` result. ``drafter``: `DraftModel`, `NGram`, ...; None decodes autoregressively
    through the same engine. ``verifier``: a registered kind or an instance; an all-greedy batch uses `greedy`.
    """

    def __init__(self, target: Any, drafter: Drafter | None = None, verifier: str | Verifier = "speculative"):
        def named(kind: str) -> Verifier:
            return registry.resolve(registry.VERIFIERS, kind, "verifier")()

        if drafter is not None and drafter.k < 1:
            raise DataError(f"drafter {drafter.kind!r}: k={drafter.k}; a block needs at least one proposal")
        self.target = target
        self._drafter, self._drafter_params = (drafter or NoDraft()).bind(target)
        self._verifier = named(verifier) if isinstance(verifier, str) else verifier
        self._greedy_verifier = named("greedy")
        room = target.config.max_positions - self._drafter.k - 1
        if room < 2:
            raise DataError(
                f"drafter k={self._drafter.k} cannot fit: the target has {target.config.max_positions} positions, "
                f"a block needs k + 1 of them; use k <= {max(target.config.max_positions - 3, 0)}"
            )

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        temperature: float | Sequence[float] = 0.0,
        seed: int | Sequence[int] = 0,
        ignore_eos: bool = False,
    ) -> GenerationResult:
        """Decode a batch; every argument is a scalar or one value a row.

        An integer ``seed`` s gives row i the seed derived from (s, i); the seeds used are in the result, and any row
        replays alone from its own (``seed=[result.seeds[i]]``). Raises `DataError` naming the prompt that cannot be
        used: empty, token ids out of range, longer than the target's positions.
        """
        batch = self._prepare(prompts, max_new_tokens, temperature, seed, ignore_eos)
        # The last state alone: a cache that was outgrown is freed.
        state = collections.deque(self._chunks(batch, _NO_LIMIT), maxlen=1).pop()
        return self._result(batch, jax.device_get(_host_part(state)))

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int = 0,
        ignore_eos: bool = False,
        steps_per_event: int = 1,
    ) -> Iterator[Event]:
        """The same loop as `generate` for one prompt, stopping every ``steps_per_event`` blocks to hand out what was
        committed. The tokens are those of `generate` with the same arguments."""
        if steps_per_event < 1:
            raise DataError(f"steps_per_event: {steps_per_event}; an event takes at least one block")
        batch = self._prepare([prompt], max_new_tokens, temperature, seed, ignore_eos)
        sent = start = int(batch.request.lengths[0])
        for state in self._chunks(batch, steps_per_event):
            host = jax.device_get(_host_part(state))
            length, done = int(host.lengths[0]), bool(host.done[0])
            before = host.tokens[0, start:sent].tolist()
            tokens = host.tokens[0, sent:length].tolist()
            text, pieces = self._text(before, tokens, origin_names(host.origin[0, sent:length]), done)
            sent = length
            yield Event(tokens, text, pieces, stats_by_row(host.counters)[0], done)

    def compile(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        temperature: float | Sequence[float] = 0.0,
    ) -> None:
        """Compile all that `generate` runs for arguments of these sizes, without decoding a token."""
        batch = self._prepare(prompts, max_new_tokens, temperature, 0, True)
        engine, params = self.engine(batch.greedy, batch.rows)
        run, slots = engine_lib.chunk(engine), batch.first_slots
        state = run(params, self._prefill(batch, slots), np.int32(0))
        while slots < batch.buffer:
            slots = _next_slots(slots, batch.buffer)
            state = run(params, engine_lib.grow(state, slots), np.int32(0))

    def engine(self, greedy: bool, rows: int) -> tuple[Engine, EngineParams]:
        """The static half, for an all-greedy batch or any other, and the weights as ``rows`` padded rows read them."""
        spec, params = _laid_out(self.target, rows * (self._drafter.k + 1) == 1)
        engine = Engine(spec, self._drafter, self._greedy_verifier if greedy else self._verifier, greedy)
        return engine, EngineParams(params, self._drafter_params)

    def prefilled(self, prompts: Sequence[Prompt], *, max_new_tokens: int, temperature: float) -> DecodeState:
        """The state after prefill, in a cache that holds the whole generation: where `specjax.decode.costs` starts."""
        batch = self._prepare(prompts, max_new_tokens, temperature, 0, True)
        return self._prefill(batch, batch.buffer)

    def started(self, prompts: Sequence[Prompt], *, max_new_tokens: int, temperature: float) -> DecodeState:
        """A generation up to its first block, as `generate` does it: encode, pad, prefill, no step."""
        batch = self._prepare(prompts, max_new_tokens, temperature, 0, True)
        return next(iter(self._chunks(batch, 0)))

    def _prefill(self, batch: _Batch, slots: int) -> DecodeState:
        engine, params = self.engine(batch.greedy, batch.rows)
        return engine_lib.prefill(engine.target, engine.drafter, slots, batch.buffer)(params, batch.request)

    def _text(self, before: list[int], tokens: list[int], origins: list[str], last: bool) -> tuple[str, list[Piece]]:
        if self.target.tokenizer is None:
            return "", []
        pieces = cut_pieces(self._detokenize, before, tokens, origins, last)
        return "".join(piece.text for piece in pieces), pieces

    def _detokenize(self, tokens: Sequence[int]) -> str:
        return self.target.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)

    def _chunks(self, batch: _Batch, max_steps: int) -> Iterator[DecodeState]:
        """States at chunk ends; the last one has every row done. A yielded state is consumed by the next chunk."""
        engine, params = self.engine(batch.greedy, batch.rows)
        slots = batch.first_slots
        state = self._prefill(batch, slots)
        run = engine_lib.chunk(engine)
        while True:
            state = run(params, state, np.int32(max_steps))
            lengths, done = jax.device_get((state.lengths, state.done))
            yield state
            if done.all():
                return
            if lengths.max() + self._drafter.k + 1 > slots:
                slots = _next_slots(slots, batch.buffer)
                state = engine_lib.grow(state, slots)

    def _prepare(self, prompts, max_new_tokens, temperature, seed, ignore_eos) -> _Batch:
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise DataError("prompts: give a list of strings or of token-id lists; for one prompt, a list of one")
        if not prompts:
            raise DataError("prompts: the list is empty; give at least one prompt")
        rows = [self._encode(prompt, i) for i, prompt in enumerate(prompts)]
        count = len(rows)
        budgets = _per_row("max_new_tokens", max_new_tokens, count)
        temperatures = _per_row("temperature", temperature, count)
        if isinstance(seed, (int, np.integer)):
            seeds = derive_seeds(int(seed), count)
        else:
            seeds = [int(s) % 2**64 for s in _per_row("seed", seed, count)]
        limit = self.target.config.max_positions - self._drafter.k
        for i, (row, budget, t) in enumerate(zip(rows, budgets, temperatures, strict=True)):
            if int(budget) != budget or budget < 1:
                raise DataError(f"max_new_tokens of row {i}: {budget} is not a whole number of at least 1")
            if not (np.isfinite(t) and t >= 0):
                raise DataError(f"temperature of row {i}: {t} is not a finite number >= 0")
            if len(row) + budget > limit:
                raise DataError(
                    f"prompt {i} has {len(row)} tokens; with max_new_tokens={budget} and a block of {self._drafter.k} "
                    f"drafts it exceeds the target's {self.target.config.max_positions} positions; shorten one of them"
                )
        greedy = all(t == 0 for t in temperatures)
        if self._verifier.kind == "greedy" and not greedy:
            raise DataError("verifier 'greedy' decodes at temperature 0 only; use 'speculative' for other temperatures")

        width = _bucket(max(map(len, rows)), _MIN_BUCKET)
        new = _bucket(max(int(b) for b in budgets), _MIN_BUCKET, step=64)
        padded = _bucket(count, 1)
        # Host arrays where the engine's types say device arrays: the jitted prefill takes both.
        prompt: Any = np.zeros((padded, width), np.int32)
        for i, row in enumerate(rows):
            prompt[i, : len(row)] = row

        def pad(values, fill, dtype) -> Any:
            return np.asarray([*values, *[fill] * (padded - count)], dtype)

        stops = () if ignore_eos else tuple(self.target.eos_ids)
        stop_ids: Any = np.full((padded, max(_STOP_IDS, len(stops))), -1, np.int32)
        stop_ids[:, : len(stops)] = stops
        words = [(s >> 32, s & 0xFFFFFFFF) for s in seeds]
        request = Request(
            prompt=prompt,
            lengths=pad(map(len, rows), 1, np.int32),
            budget=pad(budgets, 0, np.int32),
            sampling=SamplingParams(temperature=pad(temperatures, 0.0 if greedy else 1.0, np.float32)),
            seeds=pad(words, (0, 0), np.uint32),
            stop_ids=stop_ids,
        )
        buffer = -(-(width + new + self._drafter.k + 1) // 32) * 32
        first = _next_slots(max(_FIRST_SLOTS // 2, (width + self._drafter.k + 2) // 2), buffer)
        return _Batch(request, seeds, greedy, buffer, first)

    def _encode(self, prompt: Prompt, index: int) -> list[int]:
        if isinstance(prompt, str):
            if self.target.tokenizer is None:
                raise DataError(f"prompt {index} is text, but the target has no tokenizer; give token ids")
            ids = self.target.tokenizer(prompt)["input_ids"]
        else:
            ids = [int(t) for t in prompt]
        if not ids:
            raise DataError(f"prompt {index} is empty; give at least one token (for example the beginning-of-sequence)")
        vocabulary = self.target.config.vocab_size
        bad = next((t for t in ids if not 0 <= t < vocabulary), None)
        if bad is not None:
            raise DataError(f"prompt {index}: token id {bad} is outside the target's vocabulary of {vocabulary}")
        return ids

    def _result(self, batch: _Batch, host: DecodeState) -> GenerationResult:
        rows = range(len(batch.seeds))
        spans = [slice(int(host.prompt_lengths[i]), int(host.lengths[i])) for i in rows]
        tokens = [host.tokens[i, span].tolist() for i, span in zip(rows, spans, strict=True)]
        has_text = self.target.tokenizer is not None
        return GenerationResult(
            tokens=tokens,
            text=[self._detokenize(t) for t in tokens] if has_text else [""] * len(tokens),
            origins=[origin_names(host.origin[i, span]) for i, span in zip(rows, spans, strict=True)],
            stats=stats_by_row(host.counters)[: len(rows)],
            seeds=batch.seeds,
            detokenize=self._detokenize if has_text else None,
        )


@dataclasses.dataclass(frozen=True)
class _Batch:
    request: Request
    seeds: list[int]
    greedy: bool
    buffer: int
    first_slots: int

    @property
    def rows(self) -> int:
        """Padded rows."""
        return self.request.prompt.shape[0]


_layouts: weakref.WeakKeyDictionary[Any, dict[bool, tuple[Any, Any, Any]]] = weakref.WeakKeyDictionary()
"""Target -> one_token -> (the weights it was made from, spec, weights laid out), shared by all decoders of a target."""


def _laid_out(target: Any, one_token: bool) -> tuple[Any, Any]:
    one_token = one_token and jax.default_backend() == "cpu"  # elsewhere there is one layout
    known = _layouts.setdefault(target, {})
    if one_token not in known or known[one_token][0] is not target.params:
        known[one_token] = target.params, *decode_layout(target.spec, target.params, one_token=one_token)
    return known[one_token][1:]


def derive_seeds(seed: int, count: int) -> list[int]:
    """Row i's 64-bit seed: number i of the SplitMix64 stream (Steele et al. 2014) that starts at the mixed ``seed``,
    so neither neighbouring seeds nor neighbouring rows share a stream, and (s, i) is not (i, s)."""
    golden = np.uint64(0x9E3779B97F4A7C15)

    def mix(x):
        x = x + golden
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    start = mix(np.full(1, seed % 2**64, np.uint64))
    return mix(start + golden * np.arange(count, dtype=np.uint64)).tolist()


def _host_part(state: DecodeState) -> DecodeState:
    return dataclasses.replace(state, cache=None, drafter=None)


def _per_row(name: str, value: Any, count: int) -> list:
    if isinstance(value, (int, float, np.number)):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise DataError(f"{name}: {len(values)} values for {count} prompts; give one value or one a row")
    return values


def _bucket(size: int, smallest: int, step: int | None = None) -> int:
    """The next power of two (or, past ``step``, the next multiple of it), at least ``smallest``."""
    if step is not None and size > step:
        return -(-size // step) * step
    return max(smallest, 1 << (size - 1).bit_length())


def _next_slots(slots: int, most: int) -> int:
    """Twice the slots; all of them when that would leave less than half a bucket for the last program."""
    return most if 3 * slots >= most else 2 * slots
