"""The host half of decoding: prompts in, results or a stream of events out. It runs the jitted chunks of
`specjax.decode.programs` on a batch that `specjax.decode.request` checked and padded. `generate` and `stream` share a
loop.
"""

from __future__ import annotations

import collections
import dataclasses
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np

from specjax import backend, registry
from specjax.decode import request as request_lib
from specjax.decode import stops as stops_lib
from specjax.decode.arguments import bound, controller_for, drafter_of, verifier_of, weights_of
from specjax.decode.calibration import BlockTimer, finds, forced_length, measured
from specjax.decode.engine import Engine, EngineParams, Logprobs, NoDraft
from specjax.decode.known_costs import Correction, KnownCosts
from specjax.decode.options import SamplingOptions
from specjax.decode.programs import NO_LIMIT, compiled_chunk, grow, prefilled, slide
from specjax.decode.request import Batch, Prompt
from specjax.decode.result import (
    Event,
    GenerationResult,
    HostSync,
    commit_times,
    finish_reason,
    origin_names,
    pieces_of,
    proposals,
    stats_by_row,
)
from specjax.decode.scheduler import Scheduler, without_caches
from specjax.decode.text import Cut, Detokenizer, RowText
from specjax.errors import ConfigError, DataError
from specjax.interfaces import (
    BoundDrafter,
    Calibration,
    Controller,
    DecodeState,
    Drafter,
    LogitsProcessor,
    Target,
    Verifier,
)
from specjax.models.decode_layout import same_arrays
from specjax.models.files import check_model
from specjax.models.vocabulary import TokenRows

_EVENT_SECONDS = 0.05
_STOP_STRING_STEPS = 8
"""Number of blocks between two searches for stop strings."""


class Decoder:
    """Speculative decoding with a target and, optionally, a drafter (2211.17192, 2302.01318).

    Args:
        target: the `LoadedModel` to decode with; under a lossless verifier the output has its distribution.
        drafter: `DraftModel`, `NGram`, ..., or by name where no model is needed ('ngram'), or a mapping ``{kind: ...,
            field: value}``; None: plain decoding through the same engine.
        verifier: a registered kind, a mapping or an instance; an all-greedy batch uses `greedy`.
        controller: the rule for each block's length, up to the drafter's ``k``: a registered kind, a mapping or an
            instance.
        prefill_chunk: most tokens of each prompt that one pass of the prefill feeds, which bounds its memory; None: as
            many as speed it up, fewer in a larger batch or on a device with less memory.

    Raises:
        ConfigError: a drafter, verifier or controller is unknown or has a field out of range, a drafter of trees meets
            a verifier of chains, or ``prefill_chunk`` is below 1.
        ModelError: an argument that must be a model is none, or the vocabularies differ.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | str | Mapping[str, Any] | None = None,
        verifier: Verifier | str | Mapping[str, Any] = "speculative",
        controller: Controller | str | Mapping[str, Any] = "adaptive",
        prefill_chunk: int | None = None,
    ):
        check_model(target, "target")
        self.target = target
        self._given = drafter_of(drafter)
        self._bind()
        self._verifier = verifier_of(verifier)
        self._controller = controller_for(controller, self._drafter)
        if prefill_chunk is not None and not (request_lib.is_whole(prefill_chunk) and prefill_chunk >= 1):
            raise ConfigError(f"prefill_chunk: {prefill_chunk!r}; give at least 1 token, a whole number, or None")
        self._prefill_chunk = prefill_chunk
        self._costs = KnownCosts(
            self._controller, self._drafter.max_depth, finds(self._drafter), self._drafter.match_classes
        )
        self._greedy_verifier: Verifier = registry.build(registry.VERIFIERS, "greedy", "verifier")

    def _bind(self) -> None:
        self._weights = weights_of(self._given, self.target)
        self._drafter, self._drafter_params = bound(self._given or NoDraft(), self.target)

    @property
    def calibrations(self) -> dict[tuple[bool, int], Calibration]:
        """Block costs by (True if all rows are greedy, number of rows of the padded batch). They come from `calibrate`,
        or are set to those of another decoder, so that both choose the same lengths. `adaptive` corrects them as it
        decodes."""
        return self._costs.calibrations

    @calibrations.setter
    def calibrations(self, known: dict[tuple[bool, int], Calibration]) -> None:
        self._costs.calibrations = known

    @property
    def lossless(self) -> bool:
        """True if sampled output has the target's distribution."""
        return self._verifier.lossless

    @property
    def controller(self) -> Controller:
        """The rule for the length of each block, up to the drafter's ``k``."""
        return self._controller

    @property
    def weighs(self) -> bool:
        """True if the controller chooses lengths by block costs: see `calibrate`."""
        return self._controller.needs_costs

    def moves_no_token(self, greedy: bool) -> bool:
        """True if the lengths of blocks change no token: in greedy decoding, and where noise belongs to positions
        (`coupled`). Elsewhere they decide which sample of its distribution a row gets.

        Args:
            greedy: True if all rows are at temperature 0.

        Returns:
            True if lengths may depend on a clock while a row still replays from its seed.
        """
        return greedy or self._verifier.noise == "coupled"

    def program_of(self, prompts: Sequence[Prompt], **sampling: Unpack[SamplingOptions]) -> tuple[bool, int]:
        """The key in `calibrations` of the costs that a batch of these prompts is decoded with.

        Args:
            prompts: texts, or lists of token ids.
            sampling: `SamplingOptions`.

        Returns:
            True if all rows are greedy, and the number of rows of the padded batch.

        Raises:
            DataError: an argument cannot be used; the message names argument, row and value.
            TypeError: a keyword is none of `SamplingOptions`.
        """
        batch = self._run(prompts, 1, 0, True, sampling=sampling).batch
        return batch.greedy, batch.rows

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        seed: int | Sequence[int] = 0,
        ignore_eos: bool = False,
        stop_strings: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
        skip_special_tokens: bool = True,
        logprobs: Logprobs | bool | None = None,
        logits_processor: LogitsProcessor | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> GenerationResult:
        """Decode a batch of prompts. Budget, seed, stop strings and sampling parameters are one value for all rows or
        one a row.

        A row whose next token has no distribution to come from (NaN or infinite logits of the target, or no token left
        by the logits processor) ends there, with the finish reason `invalid_logits`; the other rows go on.

        Args:
            prompts: texts, or lists of token ids.
            max_new_tokens: the budget, in tokens.
            seed: an integer s gives row i the seed derived from (s, i); the seeds used are in the result, and any row
                replays alone from its own (``seed=[result.seeds[i]]``); after `calibrate`, see
                `GenerationResult.seeds`.
            ignore_eos: go on past the target's end-of-sequence ids.
            stop_strings: end a row whose new text contains one. The text stops before it, the tokens stop with the one
                that completes it, and counters include what was decoded before the host found it.
            skip_special_tokens: leave special tokens out of the text, though not out of the tokens. Stop strings are
                searched in that text; one that contains a special token, in the text with them.
            logprobs: log-probabilities of the emitted tokens: 'raw' (or True) under the target's own distribution, over
                the tokens of its tokenizer; 'processed' after all sampling parameters.
            logits_processor: a pure, traceable ``(logits[B, V], specjax.interfaces.LogitsContext) -> logits[B, V]``,
                for draft and target alike, before temperature. Each function is compiled for, so pass the same one
                again, not a new lambda.
            sampling: `SamplingOptions`.

        Returns:
            New tokens, text, counts and seeds, row by row.

        Raises:
            DataError: an argument cannot be used; the message names argument, row and value.
            TypeError: a keyword is none of `SamplingOptions`.
        """
        run = self._run(prompts, max_new_tokens, seed, ignore_eos, stop_strings, logprobs, logits_processor, sampling)
        detokenize = self._detokenizer(skip_special_tokens)
        if detokenize is not None and any(run.stops):
            run.texts = [RowText(detokenize, stops) for stops in run.stops]
        # The first chunk is one block, so that the host sees the time to the first token.
        chunks = self._chunks(run, _STOP_STRING_STEPS if any(run.stops) else NO_LIMIT, first=1)
        last = collections.deque(chunks, maxlen=1)
        return self._result(run, jax.device_get(last.pop()), detokenize)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        seed: int = 0,
        ignore_eos: bool = False,
        stop_strings: str | Sequence[str] | None = None,
        skip_special_tokens: bool = True,
        logprobs: Logprobs | bool | None = None,
        logits_processor: LogitsProcessor | None = None,
        steps_per_event: int | None = 1,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[Event]:
        """Decode one prompt and hand out tokens as they are committed. Tokens and text equal those of `generate` with
        the same arguments. Text that later tokens can still change, such as a part of a character or of a stop string,
        waits for a later event.

        Args:
            prompt: a text, or a list of token ids.
            max_new_tokens: as in `generate`.
            seed: as in `generate`.
            ignore_eos: as in `generate`.
            stop_strings: as in `generate`.
            skip_special_tokens: as in `generate`.
            logprobs: as in `generate`.
            logits_processor: as in `generate`.
            steps_per_event: blocks between two events; None: as many as take a twentieth of a second, which looks as
                smooth. Each event costs the host time, with a draft of a small target as much as a block.
            sampling: `SamplingOptions`.

        Returns:
            Events; the last one is ``done``.

        Raises:
            DataError: an argument cannot be used; the message names argument and value.
            TypeError: a keyword is none of `SamplingOptions`.
        """
        if steps_per_event is not None and (not request_lib.is_whole(steps_per_event) or steps_per_event < 1):
            raise DataError(
                f"steps_per_event: {steps_per_event!r}; an event takes a whole number of blocks, at least one"
            )
        run = self._run([prompt], max_new_tokens, seed, ignore_eos, stop_strings, logprobs, logits_processor, sampling)
        detokenize = self._detokenizer(skip_special_tokens)
        if detokenize is not None:
            run.texts = [RowText(detokenize, run.stops[0])]
        return self._events(run, None if steps_per_event is None else min(int(steps_per_event), NO_LIMIT))

    def _events(self, run: _Run, steps_per_event: int | None) -> Iterator[Event]:
        sent = start = int(run.batch.request.lengths[0])
        for state in self._chunks(run, steps_per_event):
            host = jax.device_get(state)
            length, pieces = int(host.lengths[0]), []
            if run.texts:
                length = start + run.texts[0].tokens
                first, shares = run.texts[0].release()
                origins = host.origin[0, start + first : start + first + len(shares)]
                pieces = pieces_of(shares, origin_names(origins))
            tokens, text = host.tokens[0, sent:length].tolist(), "".join(piece.text for piece in pieces)
            values = None if host.logprobs is None else host.logprobs[0, sent:length].tolist()
            sent = length
            done = bool(host.done[0])
            reason = finish_reason(host.finish[0], run.cut(0)) if done else None
            stats, seconds = stats_by_row(host, self._drafter.max_depth)[0], run.looks[-1].seconds
            yield Event(tokens, text, pieces, stats, done, seconds, values, reason)

    def generate_each(
        self, requests: Iterable[Mapping[str, Any] | None], *, rows: int, most_tokens: int
    ) -> Iterator[tuple[int, GenerationResult]]:
        """Decode requests through ``rows`` rows of one program: whenever a row ends, the next request takes its place.
        A request gets the tokens that it gets alone.

        Args:
            requests: arguments of `stream` each, with ``prompt``, but no ``stop_strings``, ``logprobs`` or
                ``logits_processor``. They are drawn when a row is free, so an iterator may make them from earlier
                results; it gives None where the next one needs a result that is still to come.
            rows: number of rows that decode together.
            most_tokens: most tokens of a request, prompt and budget together, which sets the size of the cache.

        Returns:
            Pairs (number of the request, its result), in the order in which the requests end.

        Raises:
            DataError: an argument cannot be used, or a request exceeds ``most_tokens``.
        """
        engine, params = self.engine(False, rows)
        scheduler = Scheduler(engine, params, rows)
        slots = request_lib.slots_for(self.target, self._drafter.num_nodes, most_tokens)
        detokenize = self._detokenizer(True)
        running: dict[int, _Run] = {}

        def batches() -> Iterator[Batch | None]:
            number = 0
            for request in requests:
                if request is None:
                    yield None
                    continue
                given = {"max_new_tokens": 128, "seed": 0, "ignore_eos": False} | dict(request)
                own = [given.pop(name) for name in ("prompt", "max_new_tokens", "seed", "ignore_eos")]
                run = self._run([own[0]], own[1], [own[2]], own[3], sampling=given)
                if int((run.batch.request.lengths + run.batch.request.budget).max()) > most_tokens:
                    raise DataError(f"request {number}: its prompt and budget exceed most_tokens={most_tokens}")
                running[number], number = run, number + 1
                yield run.batch.within(slots)

        for number, host in scheduler.run(batches()):
            run = running.pop(number)
            run.looks.append(HostSync(time.perf_counter() - run.start, np.asarray(host.lengths)))
            yield number, self._result(dataclasses.replace(run, engine=engine), host, detokenize)

    def compile(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        logprobs: Logprobs | bool | None = None,
        logits_processor: LogitsProcessor | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> None:
        """Compile all programs that `generate` runs for arguments of these sizes, without decoding a token.

        Args:
            prompts: prompts of the sizes to compile for.
            max_new_tokens: as in `generate`.
            logprobs: as in `generate`.
            logits_processor: as in `generate`.
            sampling: `SamplingOptions`.

        Raises:
            DataError: an argument cannot be used; the message names argument, row and value.
            TypeError: a keyword is none of `SamplingOptions`.
        """
        run = self._run(prompts, max_new_tokens, 0, True, None, logprobs, logits_processor, sampling)
        self._compile(run)
        where = run.batch.greedy, run.batch.rows
        if run.params.calibration is not None and self._costs.never_propose(where):  # the program once costs are known
            engine, run.params = self._plain_program(*where, run.batch.extras)
            kept = {name: getattr(run.engine, name) for name in ("processor", "logprobs", "tokens")}
            run.engine = dataclasses.replace(engine, **kept)
            self._compile(run)

    def _compile(self, run: _Run) -> None:
        first, *more = run.batch.slots
        chunk = compiled_chunk(run.engine)
        limits = np.int32(0), np.int32(NO_LIMIT)
        state = slide(chunk(run.params, self._prefill(run, first), *limits))
        for slots in more:
            state = chunk(run.params, slide(grow(state, slots)), *limits)

    def engine(self, greedy: bool, rows: int = 1, extras: tuple[str, ...] | None = None) -> tuple[Engine, EngineParams]:
        """The program of an all-greedy batch or of any other, and its weights.

        Args:
            greedy: True if all rows are at temperature 0.
            rows: number of rows of the padded batch, which selects the known block costs.
            extras: sampling steps that rows ask for in addition to temperature, where they select another program;
                None: any steps, which the program then finds out for itself.

        Returns:
            The engine, static and hashable, and its parameters.
        """
        return self._engine(greedy, rows, extras, self._costs.of((greedy, rows)))

    def _engine(
        self, greedy: bool, rows: int, extras: tuple[str, ...] | None, calibration: Calibration | None
    ) -> tuple[Engine, EngineParams]:
        """The engine and its parameters, given the known block costs; ``calibration`` None: nothing is known."""
        if not same_arrays(self._weights, weights_of(self._given, self.target)):
            self._bind()
        layout, verifier = self.target.layout(), self._greedy_verifier if greedy else self._verifier
        controller = self._controller
        if calibration is None and self.weighs:
            controller = controller.without_costs()
        engine = Engine(
            layout.spec,
            self._drafter,
            verifier,
            greedy,
            controller=controller,
            extras=extras if backend.asks_the_host() else None,
            prefill_chunk=self._prefill_chunk,
        )
        return engine, EngineParams(layout.params, self._drafter_params, calibration)

    def calibrate(
        self,
        prompts: Sequence[Prompt],
        *,
        blocks: int = 12,
        seconds: float = 3.0,
        costs: Calibration | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Calibration | None:
        """Measure the seconds of a block of every length in a batch of these prompts, and how often proposed tokens are
        accepted. The controller then weighs with them in all batches of as many padded rows, greedy or not as this one.
        In addition to the measuring time, it compiles what `generate` does.

        Args:
            prompts: texts, or lists of token ids; not those that the decoder is judged by. If the target has too few
                positions for the blocks behind them, they lose their first tokens.
            blocks: most blocks of the longest length in a turn; shorter lengths run more, and long blocks fewer.
            seconds: seconds of turns, of which there are at least three. Before them, blocks for about as long, at
                least 32, tell how often proposed tokens are accepted.
            costs: costs of programs of the same shapes, measured on this machine before. Up to three turns check
                them; as soon as these agree, there are no more.
            sampling: `SamplingOptions`.

        Returns:
            The measured costs; None if the controller does not weigh, or if the target has too few positions for a
            block.

        Raises:
            DataError: an argument cannot be used; the message names argument, row and value.
            TypeError: a keyword is none of `SamplingOptions`.
        """
        if not self.weighs:
            return None
        depth, nodes = self._drafter.max_depth, self._drafter.num_nodes
        prompts, blocks = request_lib.fitting(self.target, prompts, blocks, nodes + 1)
        if not blocks:
            return None
        new = blocks * (nodes + 1)
        run = self._run(prompts, new, 0, True, sampling=sampling)
        where = run.batch.greedy, run.batch.rows
        # With any calibration, the program is the one that chooses lengths, and the draft reads the prompts.
        held = forced_length(depth, self._drafter)
        run.engine, run.params = self._engine(*where, run.batch.extras, held)
        found = measured(run.engine, run.params, self._prefill(run, run.batch.slots[-1]), blocks, seconds, costs)
        self._costs.record(where, found, run.batch.shapes)
        if self._program(run.batch)[0] != run.engine:  # another program will decode than was timed
            self.compile(prompts, max_new_tokens=new, **sampling)
        return found

    def prefilled(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int, **sampling: Unpack[SamplingOptions]
    ) -> DecodeState:
        """The state after prefill, with a cache that has room for the whole generation, for `specjax.costs.timer`.

        Args:
            prompts: texts, or lists of token ids.
            max_new_tokens: as in `generate`.
            sampling: `SamplingOptions`.

        Returns:
            The engine's state, with the prompts fed and no token emitted.

        Raises:
            DataError: an argument cannot be used; the message names argument, row and value.
            TypeError: a keyword is none of `SamplingOptions`.
        """
        run = self._run(prompts, max_new_tokens, 0, True, sampling=sampling)
        run.engine, run.params = self.engine(run.batch.greedy, run.batch.rows, run.batch.extras)
        return self._prefill(run, run.batch.slots[-1])

    def started(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int, **sampling: Unpack[SamplingOptions]
    ) -> DecodeState:
        """The state of a generation before its first block, made as `generate` makes it: encode, pad, prefill.

        Args:
            prompts: texts, or lists of token ids.
            max_new_tokens: as in `generate`.
            sampling: `SamplingOptions`.

        Returns:
            The host's part of the state, with the prompts fed and no token emitted.

        Raises:
            DataError: an argument cannot be used; the message names argument, row and value.
            TypeError: a keyword is none of `SamplingOptions`.
        """
        return next(iter(self._chunks(self._run(prompts, max_new_tokens, 0, True, sampling=sampling), 0)))

    def _run(
        self, prompts, max_new_tokens, seed, ignore_eos, stop_strings=None, logprobs=None, processor=None, sampling=None
    ) -> _Run:
        start = time.perf_counter()
        args = (self.target, self._drafter.num_nodes, prompts, max_new_tokens, seed, ignore_eos, sampling or {})
        batch = request_lib.prepare(*args)
        _warn_of_a_short_draft(self._drafter, batch)
        if self._verifier.noise == "none" and not batch.greedy:
            kind = self._verifier.kind
            raise DataError(
                f"verifier {kind!r} decodes at temperature 0 only; use 'speculative' for other temperatures"
            )
        logprobs = ("raw" if logprobs else None) if isinstance(logprobs, bool) else logprobs
        if logprobs not in (None, "raw", "processed"):
            raise DataError(f"logprobs: {logprobs!r}; give 'raw' (or True), 'processed' or None")
        if processor is not None:
            request_lib.check_processor(processor, batch.request, batch.slots[-1])
        engine, params = self._program(batch)
        tokens = TokenRows.of(self.target) if logprobs == "raw" else None
        engine = dataclasses.replace(engine, processor=processor, logprobs=logprobs, tokens=tokens)
        stops = stops_lib.check(stop_strings, len(prompts), self.target.tokenizer is not None)
        return _Run(batch, engine, params, stops, start)

    def _program(self, batch: Batch) -> tuple[Engine, EngineParams]:
        """The program of a batch: that of plain decoding if its controller would never propose anything."""
        where, extras = (batch.greedy, batch.rows), batch.extras
        correction = self._costs.correction(where)
        if self._costs.never_propose(where) and (correction is None or not correction.wants(batch.shapes)):
            return self._plain_program(*where, extras)
        return self.engine(*where, extras)

    def _plain_program(self, greedy: bool, rows: int, extras: tuple[str, ...]) -> tuple[Engine, EngineParams]:
        engine, params = self.engine(greedy, rows, extras)
        spec, nothing = bound(NoDraft(), self.target)
        engine = dataclasses.replace(engine, drafter=spec, controller=controller_for("fixed", spec))
        return engine, dataclasses.replace(params, drafter=nothing, calibration=None)

    def _correct(self, run: _Run, scheduler: Scheduler, correction: Correction, controller: Any) -> None:
        """Measure the block costs now, in the state that the generation goes on from. ``controller``: its controller's
        state before the first block."""
        timer = BlockTimer(run.engine, run.params, scheduler.state, controller)
        try:
            found = correction.corrected(timer, run.engine, run.batch.shapes)
        finally:
            scheduler.state = timer.state
        self.calibrations[run.batch.greedy, run.batch.rows] = found
        run.params = scheduler.params = dataclasses.replace(run.params, calibration=found)

    def _prefill(self, run: _Run, slots: int) -> DecodeState:
        return prefilled(run.engine, run.params, run.batch.request, slots)

    def _detokenizer(self, skip_special_tokens: bool) -> Detokenizer | None:
        return None if self.target.tokenizer is None else Detokenizer(self.target.tokenizer, skip_special_tokens)

    def _chunks(self, run: _Run, max_steps: int | None, first: int | None = None) -> Iterator[DecodeState]:
        """The host's part of the state at the end of each chunk; in the last one every row is done. ``max_steps``: most
        blocks of a chunk; None: see `stream`. ``first``: most blocks of the first chunk, if it differs."""
        scheduler = Scheduler(run.engine, run.params, run.batch.rows)
        correction = self._costs.correction((run.batch.greedy, run.batch.rows))
        scheduler.insert(run.batch)
        # A copy, since the program consumes the state.
        fresh = None if correction is None else jax.device_put(scheduler.state.controller, may_alias=False)
        steps = 1 if max_steps is None else max_steps if first is None else first
        while True:
            if correction is None:
                scheduler.chunk(steps)
            else:
                if correction.due and run.params.calibration is not None:
                    self._correct(run, scheduler, correction, fresh)
                begun, before = time.perf_counter(), scheduler.blocks
                steps = min(steps, correction.patience)
                scheduler.chunk(steps)
                correction.decoded(time.perf_counter() - begun, int((scheduler.blocks - before).max()))
            run.looks.append(HostSync(time.perf_counter() - run.start, scheduler.lengths))
            if run.texts:
                scheduler.stop(_ended(run, scheduler))
            yield without_caches(scheduler.state, run.engine.controller)
            if scheduler.done.all():
                return
            steps = _smooth(run.looks, steps) if max_steps is None else max_steps

    def _result(self, run: _Run, host: DecodeState, detokenize: Detokenizer | None) -> GenerationResult:
        rows = range(len(run.batch.seeds))
        starts, ends = host.prompt_lengths, host.lengths
        cuts = [run.cut(i) for i in rows]
        spans = [slice(starts[i], ends[i] if (c := cuts[i]) is None else starts[i] + c.tokens) for i in rows]
        tokens = [host.tokens[i, span].tolist() for i, span in zip(rows, spans, strict=True)]
        every = [np.asarray(host.origin[i, starts[i] : ends[i]]) for i in rows]
        times = commit_times(every, starts[: len(rows)].tolist(), run.looks)
        texts = [""] * len(rows)
        if detokenize is not None:
            texts = [detokenize(tokens[i]) if cuts[i] is None else run.texts[i].text for i in rows]
        return GenerationResult(
            tokens=tokens,
            text=texts,
            origins=[origin_names(host.origin[i, span]) for i, span in zip(rows, spans, strict=True)],
            proposals=[proposals(host.origin[i, span]) for i, span in zip(rows, spans, strict=True)],
            commit_times=[row[: len(new)] for row, new in zip(times, tokens, strict=True)],
            looks=[look.seconds for look in run.looks],
            seconds=time.perf_counter() - run.start,
            stats=stats_by_row(host, self._drafter.max_depth)[: len(rows)],
            seeds=run.batch.seeds,
            verifier=run.engine.verifier.kind,
            lossless=run.engine.verifier.lossless,
            finish_reasons=[finish_reason(host.finish[i], cuts[i]) for i in rows],
            logprobs=None
            if host.logprobs is None
            else [host.logprobs[i, span].tolist() for i, span in zip(rows, spans, strict=True)],
            detokenize=detokenize,
        )


@dataclasses.dataclass
class _Run:
    """One generation. ``start``: time of the call, by `time.perf_counter`; ``texts``: text of each row, if the host
    reads it during decoding; ``looks``: the host syncs so far, one a chunk."""

    batch: Batch
    engine: Engine
    params: EngineParams
    stops: list[tuple[str, ...]]
    start: float
    looks: list[HostSync] = dataclasses.field(default_factory=list)
    texts: list[RowText] = dataclasses.field(default_factory=list)

    def cut(self, row: int) -> Cut | None:
        return self.texts[row].cut if self.texts else None


def _smooth(looks: Sequence[HostSync], last: int) -> int:
    """Number of blocks of the next chunk that takes about `_EVENT_SECONDS`, after one of ``last`` blocks."""
    if len(looks) < 2:
        return 1
    of_block = max(looks[-1].seconds - looks[-2].seconds, 1e-6) / last
    return max(1, min(round(_EVENT_SECONDS / of_block), 2 * last))


def _ended(run: _Run, scheduler: Scheduler) -> list[int]:
    """Feed the new tokens to the rows' texts; returns the rows that a stop string ends."""
    tokens, ended = jax.device_get(scheduler.state.tokens), []
    for i, text in enumerate(run.texts):
        start = int(run.batch.request.lengths[i])
        text.feed(tokens[i, start + text.fed : scheduler.lengths[i]].tolist(), bool(scheduler.done[i]))
        if text.cut is not None:
            ended.append(i)
    return ended


def _warn_of_a_short_draft(drafter: BoundDrafter, batch: Batch) -> None:
    """Warn if a generation may pass the draft's last position. It stays exact: the target verifies the proposed tokens
    there as it does all others."""
    end, limit = int(np.max(batch.request.lengths + batch.request.budget)), drafter.max_positions
    if limit is not None and end > limit:
        warnings.warn(
            f"the draft has {limit} positions, and this generation may reach {end}: expect few of its proposals to be "
            f"accepted past {limit}; use a draft with as many positions, or fewer new tokens",
            stacklevel=4,
        )
