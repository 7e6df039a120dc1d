"""The host half of decoding: prompts in, results or a stream of events out. Runs the jitted chunks of
`specjax.decode.engine` on what `specjax.decode.request` checked and padded; `generate` and `stream` are the same loop.
"""

from __future__ import annotations

import collections
import dataclasses
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np

from specjax import backend, registry
from specjax.decode import request as request_lib
from specjax.decode import stops as stops_lib
from specjax.decode.arguments import bound, check_calibration, controller_for, drafter_of, verifier_of, weights_of
from specjax.decode.calibration import BlockTimer, Correction, guessed, held_to, measured
from specjax.decode.engine import Engine, EngineParams, Logprobs, NoDraft, max_depth, num_nodes
from specjax.decode.programs import NO_LIMIT, compiled_chunk, grow, prefilled, slide
from specjax.decode.request import Batch, Prompt, SamplingOptions
from specjax.decode.result import (
    Event,
    GenerationResult,
    Look,
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
from specjax.models.decode_layout import same_arrays
from specjax.models.files import check_model
from specjax.models.vocabulary import TokenRows
from specjax.types import BoundDrafter, Calibration, Controller, DecodeState, Drafter, LogitsProcessor, Verifier

_STOP_STRING_STEPS = 8
"""Blocks between two looks for stop strings."""


class Decoder:
    """Speculative decoding with a target and, optionally, a drafter (2211.17192, 2302.01318).

    Args:
        target: the `LoadedModel` to decode with; under a lossless verifier the output has its distribution.
        drafter: `DraftModel`, `NGram`, ..., or by name where no model is needed ('ngram'), or a mapping ``{kind: ...,
            field: value}``; None decodes autoregressively through the same engine.
        verifier: a registered kind, a mapping or an instance; an all-greedy batch uses `greedy`.
        controller: how much of the drafter's ``k`` is proposed: a registered kind, a mapping or an instance.
        prefill_chunk: most tokens of each prompt that are fed at a time, for what memory a pass may take; None: as many
            as are worth it, fewer in a larger batch or where the device has less memory.

    Raises:
        ConfigError: a drafter, verifier or controller is unknown or has a field out of range, a drafter of trees meets
            a verifier of chains, or ``prefill_chunk`` is no token.
        ModelError: something given as a model is none, or the vocabularies differ.
    """

    def __init__(
        self,
        target: Any,
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
        self._controller = controller_for(controller, max_depth(self._drafter))
        if prefill_chunk is not None and not (request_lib.is_whole(prefill_chunk) and prefill_chunk >= 1):
            raise ConfigError(f"prefill_chunk: {prefill_chunk!r}; give at least 1 token, a whole number, or None")
        self._prefill_chunk = prefill_chunk
        self.calibrations: dict[tuple[bool, int], Calibration] = {}
        """What blocks cost, by whether all rows are greedy and by the rows of the padded batch: from `calibrate`, or
        set to what another decoder measured, so that it chooses as that one did. `adaptive` corrects them as it
        decodes."""
        self._corrections: dict[tuple[bool, int], Correction] = {}
        self._greedy_verifier: Verifier = registry.build(registry.VERIFIERS, "greedy", "verifier")

    def _bind(self) -> None:
        self._weights = weights_of(self._given, self.target)
        self._drafter, self._drafter_params = bound(self._given or NoDraft(), self.target)

    @property
    def lossless(self) -> bool:
        """Whether sampled output has the target's distribution."""
        return self._verifier.lossless

    @property
    def controller(self) -> Controller:
        """How much of the drafter's ``k`` is proposed."""
        return self._controller

    @property
    def weighs(self) -> bool:
        """Whether the controller chooses by what blocks cost: see `calibrate`."""
        return getattr(self._controller, "needs_calibration", False)

    def moves_no_token(self, greedy: bool) -> bool:
        """Whether the lengths of blocks leave every token as it is: greedily, and where noise belongs to positions
        (`coupled`). Elsewhere they change which sample of its distribution a row gets.

        Args:
            greedy: whether all rows are at temperature 0.

        Returns:
            Whether lengths may be chosen by a clock, and a row still replays from its seed.
        """
        return greedy or self._verifier.noise == "coupled"

    def program_of(self, prompts: Sequence[Prompt], **sampling: Unpack[SamplingOptions]) -> tuple[bool, int]:
        """Which of `calibrations` a batch of these prompts is decoded with.

        Args:
            prompts: texts, or lists of token ids.
            sampling: `SamplingOptions`.

        Returns:
            Whether all rows are greedy, and the rows of the padded batch.

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

        A row whose next token has no distribution to come from (NaN or infinite logits of the target, or nothing left
        by the processor) ends there, with the finish reason `invalid_logits`; the others go on.

        Args:
            prompts: texts, or lists of token ids.
            max_new_tokens: the budget, in tokens.
            seed: an integer s gives row i the seed derived from (s, i); the seeds used are in the result, and any row
                replays alone from its own (``seed=[result.seeds[i]]``); after `calibrate`, see
                `GenerationResult.seeds`.
            ignore_eos: go on past the target's end-of-sequence ids.
            stop_strings: end a row where its new text holds one: the text stops before it, the tokens with the one that
                completes it (counters also hold what was decoded before the host saw it).
            skip_special_tokens: they are in the tokens, but not in the text, where stop strings are looked for; only
                a stop string that has one of them in it is found where they stand.
            logprobs: log-probabilities of the emitted tokens: 'raw' (or True) of the target's own distribution, over
                the tokens of its tokenizer; 'processed' after all sampling parameters.
            logits_processor: a pure, traceable ``(logits[B, V], specjax.types.LogitsContext) -> logits[B, V]``, for
                draft and target alike, before temperature; compiled for, so pass the same function again, not a new
                lambda.
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
        # The first chunk is of one block, so that the time to the first token is seen.
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
        steps_per_event: int = 1,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[Event]:
        """Decode one prompt, handing out tokens as they are committed. The tokens are those of `generate` with the same
        arguments, and so is the text: what later tokens can still change, a part of a character or of a stop string,
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
            steps_per_event: blocks between two events.
            sampling: `SamplingOptions`.

        Returns:
            Events, the last of which is done.

        Raises:
            DataError: an argument cannot be used; the message names argument and value.
            TypeError: a keyword is none of `SamplingOptions`.
        """
        if not request_lib.is_whole(steps_per_event) or steps_per_event < 1:
            raise DataError(
                f"steps_per_event: {steps_per_event!r}; an event takes a whole number of blocks, at least one"
            )
        run = self._run([prompt], max_new_tokens, seed, ignore_eos, stop_strings, logprobs, logits_processor, sampling)
        detokenize = self._detokenizer(skip_special_tokens)
        if detokenize is not None:
            run.texts = [RowText(detokenize, run.stops[0])]
        return self._events(run, min(int(steps_per_event), NO_LIMIT))

    def _events(self, run: _Run, steps_per_event: int) -> Iterator[Event]:
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
            stats, seconds = stats_by_row(host, max_depth(self._drafter))[0], run.looks[-1].seconds
            yield Event(tokens, text, pieces, stats, done, seconds, values, reason)

    def compile(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        logprobs: Logprobs | bool | None = None,
        logits_processor: LogitsProcessor | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> None:
        """Compile all that `generate` runs for arguments of these sizes, without decoding a token.

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
        if run.params.calibration is not None and self._never_proposes(where):  # once its costs have been measured
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
        """The program of an all-greedy batch or of any other, and the weights that it takes.

        Args:
            greedy: whether all rows are at temperature 0.
            rows: of the padded batch, for what is known of its costs.
            extras: what rows ask for beside their temperature, where that is another program; None: whatever they ask
                for, which the program then sees for itself.

        Returns:
            The engine, static and hashable, and its parameters.
        """
        return self._engine(greedy, rows, extras, self._known((greedy, rows)))

    def _engine(
        self, greedy: bool, rows: int, extras: tuple[str, ...] | None, calibration: Calibration | None
    ) -> tuple[Engine, EngineParams]:
        """`engine` by what is known of a block's costs."""
        if not same_arrays(self._weights, weights_of(self._given, self.target)):
            self._bind()
        layout, verifier = self.target.layout(), self._greedy_verifier if greedy else self._verifier
        controller = self._controller
        if calibration is None and self.weighs:
            controller = getattr(controller, "uncalibrated", controller)
            if controller is self._controller:
                calibration = guessed(layout.params, self._drafter_params, max_depth(self._drafter))
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
        """Measure what blocks of every length cost in a batch of these prompts, and how often proposals are kept, for
        the controller of all batches of as many rows, greedy or not as this one. Beside its seconds, it compiles what
        `generate` does.

        Args:
            prompts: texts, or lists of token ids; not those that the decoder is judged by. Where the target has too few
                positions for what follows them, they lose their first tokens.
            blocks: of each length in a turn, the fastest of which counts.
            seconds: of turns, of which there are at least three.
            costs: what programs of the same shapes were found to cost, on this machine: one turn, and no more if it
                agrees.
            sampling: `SamplingOptions`.

        Returns:
            What was measured; None if the controller does not weigh, or if the target has too few positions for a
            block.

        Raises:
            DataError: an argument cannot be used; the message names argument, row and value.
            TypeError: a keyword is none of `SamplingOptions`.
        """
        if not self.weighs:
            return None
        depth, nodes = max_depth(self._drafter), num_nodes(self._drafter)
        prompts, blocks = request_lib.fitting(self.target, prompts, blocks, nodes + 1)
        if not blocks:
            return None
        new = blocks * (nodes + 1)
        run = self._run(prompts, new, 0, True, sampling=sampling)
        where = run.batch.greedy, run.batch.rows
        # Whatever it is, so that the program is the one that chooses, and the draft reads the prompts.
        held = held_to(depth, depth)
        run.engine, run.params = self._engine(*where, run.batch.extras, held)
        found = measured(run.engine, run.params, self._prefill(run, run.batch.slots[-1]), blocks, seconds, costs)
        self.calibrations[where] = found
        self._corrections[where] = Correction(found, measured=True, shapes={run.batch.shapes})
        if self._program(run.batch)[0] != run.engine:  # what was timed is not what will decode
            self.compile(prompts, max_new_tokens=new, **sampling)
        return found

    def prefilled(
        self, prompts: Sequence[Prompt], *, max_new_tokens: int, **sampling: Unpack[SamplingOptions]
    ) -> DecodeState:
        """The state after prefill, in a cache that holds the whole generation, for `specjax.evaluation.costs`.

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
        """A generation up to its first block, as `generate` does it: encode, pad, prefill, no step.

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
        args = (self.target, num_nodes(self._drafter), prompts, max_new_tokens, seed, ignore_eos, sampling or {})
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
        """`engine`, or that of plain decoding where its controller would never propose anything."""
        where, extras = (batch.greedy, batch.rows), batch.extras
        correction = self._correction(where)
        if self._never_proposes(where) and (correction is None or not correction.wants(batch.shapes)):
            return self._plain_program(*where, extras)
        return self.engine(*where, extras)

    def _never_proposes(self, where: tuple[bool, int]) -> bool:
        known, correction = self._known(where), self._correction(where)
        never = getattr(self._controller, "never_proposes", None)
        if known is None or never is None:
            return False
        return bool(never(known)) and (correction is None or bool(never(correction.origin)))

    def _plain_program(self, greedy: bool, rows: int, extras: tuple[str, ...]) -> tuple[Engine, EngineParams]:
        engine, params = self.engine(greedy, rows, extras)
        spec, nothing = bound(NoDraft(), self.target)
        engine = dataclasses.replace(engine, drafter=spec, controller=controller_for("fixed", 0))
        return engine, dataclasses.replace(params, drafter=nothing, calibration=None)

    def _known(self, where: tuple[bool, int]) -> Calibration | None:
        """Raises `ConfigError` for one that a user set and that is none."""
        known = self.calibrations.get(where)
        if known is not None:
            check_calibration(known, where, max_depth(self._drafter))
        return known

    def _correction(self, where: tuple[bool, int]) -> Correction | None:
        """Of what the lengths of such batches are chosen by; None where nobody corrects it."""
        known = self._known(where)
        if known is None or not getattr(self._controller, "corrects", False):
            return None
        found = self._corrections.get(where)
        if found is None or found.known is not known:
            found = self._corrections[where] = Correction(known, measured=False)
        return found

    def _correct(self, run: _Run, scheduler: Scheduler, correction: Correction, controller: Any) -> None:
        """Measure what blocks cost now, in the state that the generation goes on from; ``controller``: its controller's
        before the first block."""
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

    def _chunks(self, run: _Run, max_steps: int, first: int | None = None) -> Iterator[DecodeState]:
        """What the host reads of the states at chunk ends; the last one has every row done. ``first``: most steps of
        the first chunk, if they are others."""
        scheduler = Scheduler(run.engine, run.params, run.batch.rows)
        correction = self._correction((run.batch.greedy, run.batch.rows))
        scheduler.insert(run.batch)
        # A copy: the program takes the state over.
        fresh = None if correction is None else jax.device_put(scheduler.state.controller, may_alias=False)
        while True:
            steps = max_steps if run.looks or first is None else first
            if correction is None:
                scheduler.chunk(steps)
            else:
                if correction.due and run.params.calibration is not None:
                    self._correct(run, scheduler, correction, fresh)
                begun, before = time.perf_counter(), scheduler.blocks
                scheduler.chunk(min(steps, correction.patience))
                correction.decoded(time.perf_counter() - begun, int((scheduler.blocks - before).max()))
            run.looks.append(Look(time.perf_counter() - run.start, scheduler.lengths))
            if run.texts:
                scheduler.stop(_ended(run, scheduler))
            yield without_caches(scheduler.state)
            if scheduler.done.all():
                return

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
            stats=stats_by_row(host, max_depth(self._drafter))[: len(rows)],
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
    """One generation. ``start``: of the call, by `time.perf_counter`; ``texts``: of the rows, where text is read as it
    comes; ``looks``: one a chunk so far."""

    batch: Batch
    engine: Engine
    params: EngineParams
    stops: list[tuple[str, ...]]
    start: float
    looks: list[Look] = dataclasses.field(default_factory=list)
    texts: list[RowText] = dataclasses.field(default_factory=list)

    def cut(self, row: int) -> Cut | None:
        return self.texts[row].cut if self.texts else None


def _ended(run: _Run, scheduler: Scheduler) -> list[int]:
    """Feeds the rows' texts what is new; returns the rows that a stop string ends."""
    tokens, ended = jax.device_get(scheduler.state.tokens), []
    for i, text in enumerate(run.texts):
        start = int(run.batch.request.lengths[i])
        text.feed(tokens[i, start + text.fed : scheduler.lengths[i]].tolist(), bool(scheduler.done[i]))
        if text.cut is not None:
            ended.append(i)
    return ended


def _warn_of_a_short_draft(drafter: BoundDrafter, batch: Batch) -> None:
    """Exact all the same: what a draft proposes past its positions is verified as everything else is."""
    end, limit = int(np.max(batch.request.lengths + batch.request.budget)), getattr(drafter, "max_positions", None)
    if limit is not None and end > limit:
        warnings.warn(
            f"the draft has {limit} positions, and this generation may reach {end}: expect few of its proposals to be "
            f"accepted past {limit}; use a draft with as many positions, or fewer new tokens",
            stacklevel=4,
        )
