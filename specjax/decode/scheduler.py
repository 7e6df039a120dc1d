"""A host queue over the engine: between chunks, requests go into free rows of one compiled program, and rows finish
independently. The content of other rows changes nothing of a row's result (invariants 4 and 8 of the design): each row
has its own length, budget, noise and part of every cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.decode.engine import Engine, EngineParams
from specjax.decode.programs import NO_LIMIT, compiled_chunk, grow, prefilled, slide
from specjax.decode.request import Batch
from specjax.errors import DataError
from specjax.interfaces import STOP_STRING, UNFINISHED, Controller, DecodeState
from specjax.models.cache import first, insert, num_slots, of_first_row
from specjax.runtime.signals import ctrl_c_waits

_END: Any = object()
"""Mark of the end of the requests."""


class Scheduler:
    """A host queue over ``rows`` rows of a decoder's program. ``state``: the state of the engine. ``done``, ``lengths``
    and ``blocks``: the host's copies from it, after the last chunk. A free row counts as done."""

    def __init__(self, engine: Engine, params: EngineParams, rows: int):
        self.engine, self.rows, self.params = engine, rows, params
        self.state: Any = None  # until something is inserted
        self.blocks = np.zeros(self.rows, np.int32)
        self.done, self.lengths = np.ones(rows, bool), np.zeros(rows, np.int32)
        self._slid = np.zeros(rows, np.int32)  # each row's length when its cache last slid
        self._taken: set[int] = set()
        self._buckets: tuple[int, ...] = ()
        self._unread = False

    def _change(self, change: Callable[..., Any], *arguments: Any) -> None:
        """Replace the state by ``change(*arguments)``, which consumes the old one. A Ctrl-C waits meanwhile, so that it
        finds the state before or the state after, never none."""
        with ctrl_c_waits():
            self.state = change(*arguments)

    @property
    def free(self) -> list[int]:
        """Rows that hold no request."""
        return [row for row in range(self.rows) if row not in self._taken]

    def insert(self, batch: Batch) -> list[int]:
        """Prefill the requests of ``batch`` and put them into free rows; returns these rows, in the order of the
        requests. Raises `DataError` if too few rows are free, for a sampled request where all others are greedy, and
        for a request that asks for a sampling step that the program lacks."""
        wanted = len(batch.seeds)
        if wanted > len(self.free):
            raise DataError(f"scheduler: {wanted} requests for {len(self.free)} of {self.rows} rows that are free")
        if self.engine.greedy and not batch.greedy:
            raise DataError("scheduler: a request at a temperature above 0 among greedy ones; make it for sampling")
        known = batch.extras if self.engine.extras is None else self.engine.extras
        for step in batch.extras:
            if step not in known:
                raise DataError(f"scheduler: a request that asks for {step} among others that do not; make it for that")
        rows = self.free[:wanted]
        self._buckets = tuple(sorted({*self._buckets, *batch.slots}))
        if self.state is None and len(batch.request.lengths) == self.rows:
            self.state = prefilled(self.engine, self.params, batch.request, batch.slots[0])
        else:
            if self.state is None:
                self.state = _vacant(prefilled(self.engine, self.params, batch.request, batch.slots[0]), self.rows)
            elif batch.slots[0] > num_slots(self.state.cache):
                self._grow(batch.slots[0])
            # Rows that only pad the batch get an index out of range, and are dropped.
            at = np.full(len(batch.request.lengths), self.rows, np.int32)
            at[:wanted] = rows
            new = prefilled(self.engine, self.params, batch.request, num_slots(self.state.cache))
            self._change(_inserted, self.state, new, at)
        self._taken.update(rows)
        self.done[rows], self.lengths[rows] = False, batch.request.lengths[:wanted]
        self._slid[rows] = self.lengths[rows]
        return rows

    def chunk(self, max_steps: int = NO_LIMIT, stop_after: int | None = None) -> None:
        """Run blocks until all rows are done, until the cache needs its next bucket, after ``max_steps`` blocks, or
        when ``stop_after`` rows have finished in this chunk. Before that, the cache grows or slides if it must."""
        if self._unread:  # an earlier chunk was interrupted
            self._look()
        block, going = self.engine.num_nodes + 1, ~self.done
        slots = num_slots(self.state.cache)
        if int(self.lengths[going].max(initial=0)) + block > slots:
            self._grow(next(bucket for bucket in self._buckets if bucket > slots))
        windows = first(self.state.cache).windows
        if windows is not None and int((self.lengths - self._slid)[going].max(initial=0)) + block > windows.room:
            self._change(slide, self.state)
            self._slid = self.lengths.copy()
        limits = (np.int32(min(max_steps, NO_LIMIT)), np.int32(NO_LIMIT if stop_after is None else stop_after))
        self._unread = True
        self._change(compiled_chunk(self.engine), self.params, self.state, *limits)
        self._look()

    def _look(self) -> None:
        lengths, done, self.blocks = jax.device_get((self.state.lengths, self.state.done, self.state.counters.blocks))
        self.lengths, self.done = np.array(lengths), np.array(done)
        self._unread = False

    def _grow(self, slots: int) -> None:
        self._change(lambda state: slide(grow(state, slots)), self.state)
        self._slid = self.lengths.copy()

    def stop(self, rows: Iterable[int]) -> None:
        """End rows between two chunks: cancelled ones, or those with a stop string."""
        ended = np.zeros(self.rows, bool)
        ended[list(rows)] = True
        if ended.any():
            self.done |= ended
            finish = jnp.where(ended & (self.state.finish == UNFINISHED), STOP_STRING, self.state.finish)
            self.state = dataclasses.replace(self.state, done=jnp.asarray(self.done), finish=finish)

    def release(self, rows: Iterable[int]) -> None:
        """Free rows that are done."""
        self._taken.difference_update(rows)

    def take(self, row: int) -> DecodeState:
        """The host's part of the state of a row that is done, as arrays of one row. Frees the row."""
        seen = jax.tree.map(lambda x: x[row : row + 1], without_caches(self.state, self.engine.controller))
        self.release([row])
        return jax.device_get(seen)

    def run(self, batches: Iterable[Batch | None]) -> Iterator[tuple[int, DecodeState]]:
        """Results of requests, one a batch, served in the order of their arrival: (number of the request, state of its
        row), in the order in which they finish. None in place of a batch: no request before the next result. Raises
        `DataError` if there is no row at work that could give one."""
        waiting, number, of_row = iter(batches), 0, {}
        more = True
        while more or of_row:
            while more and self.free:
                batch = next(waiting, _END)
                if batch is None:
                    break
                more = batch is not _END
                if more:
                    (row,) = self.insert(batch)
                    of_row[row], number = number, number + 1
            if of_row:
                self.chunk(stop_after=1)
            elif more:
                raise DataError("scheduler: no request and no row at work; end the requests, or give one")
            for row in [row for row in of_row if self.done[row]]:
                yield of_row.pop(row), self.take(row)


def without_caches(state: DecodeState, controller: Controller | None) -> DecodeState:
    """The host's part of a state, with a controller's probes as the only part of its state. An outgrown cache can be
    freed although somebody holds on to this part."""
    probes = None if controller is None else controller.probes(state.controller)
    return dataclasses.replace(state, cache=None, drafter=None, sampling=None, controller=probes, counts=None)


@functools.partial(jax.jit, static_argnames="rows")
def _vacant(state: DecodeState, rows: int) -> DecodeState:
    """A state of ``rows`` rows in the shape of the given state's, all done."""
    state = of_first_row(state, rows)
    return dataclasses.replace(state, done=jnp.ones((rows,), bool))


@functools.partial(jax.jit, donate_argnames="state")
def _inserted(state: DecodeState, new: DecodeState, rows: Int[Array, " R"]) -> DecodeState:
    """The state with the rows of ``new`` in place of its ``rows``; rows out of range are dropped."""
    width = max(x.stop_ids.shape[1] for x in (state, new))
    state, new = (
        dataclasses.replace(
            x, stop_ids=jnp.pad(x.stop_ids, ((0, 0), (0, width - x.stop_ids.shape[1])), constant_values=-1)
        )
        for x in (state, new)
    )
    return insert(state, rows, new)
