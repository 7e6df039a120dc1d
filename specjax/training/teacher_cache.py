"""Cache of the frozen target's output for a stage's rows: computed once, stored on disk, read back by row number.

A cache is a directory of numbered `.npy` shards of equally many rows. ``record[row, t]`` is the record of one position
(`RecordFormat`). Each shard has its SHA-256 and its sums beside it (`specjax.runtime.artifact`). `fingerprint.json`
says what the cache was made from. `provenance.json` follows once the cache is whole: it says what the cache holds and
what it costs in accuracy. If there are several processes, all compute, and the first one writes.

`Logits` stores log p of the k best tokens and their ids, the probability of all other tokens together, and log p and
ids of a few of those, drawn from p. `specjax.training.kept_streams.Streams` stores what a draft reads of the target's
forward pass.

Cached logits lose accuracy twice: alpha is only known to lie in [A, A + min(tail of p, tail of q)], A the overlap of
the k tokens; and log p is rounded to float16. Every figure that training makes of alpha is therefore off by at most
``alpha_error`` in the mean: the mean tail of p plus the mean total variation of the rounding. The tokens drawn from the
tail make it right on average.

Dims: B rows, T predicted positions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import jax
import numpy as np
from jaxtyping import Array, Int

from specjax.data.rows import Batches, Rows, RowsWithMore, take
from specjax.errors import ConfigError, TrainingError
from specjax.interfaces import Batch, Params, Target, TopKLogits
from specjax.models.vocabulary import TokenRows
from specjax.runtime import artifact, fingerprint
from specjax.runtime.distributed import on_main_process, whole
from specjax.runtime.log import note
from specjax.runtime.progress import StepProgress
from specjax.training.chunked_loss import Teacher, mapped
from specjax.training.distributions import top_k_logits
from specjax.training.teacher import target_output

SHARD_BYTES = 2**25
"""Approximate size of a shard in bytes: the work that a kill or a damaged file costs."""
TAIL_TOKENS = 12
"""Number of tokens drawn from the tail of a position."""
_log = logging.getLogger(__name__)


def record_dtype(k: int, vocab_size: int) -> np.dtype:
    """Dtype of the record of one position: 4 bytes for each of k + `TAIL_TOKENS` logits with its id, and 4 for the
    tail's mass. With a vocabulary of 65,537 ids or more a logit takes 5 bytes, three of them for its id."""
    id_type, id_shape = ("<u2", ()) if vocab_size <= 2**16 else ("u1", (3,))
    fields = []
    for name, count in (("best", k), ("tail", TAIL_TOKENS)):
        fields += [(f"{name}_log_probs", "<f2", (count,)), (f"{name}_ids", id_type, (count, *id_shape))]
    return np.dtype([*fields, ("tail_mass", "<f4")])


def to_records(teacher: TopKLogits, vocab_size: int) -> np.ndarray:
    """Records of the target's logits, over the axes before k; numpy in, numpy out."""
    log_probs = teacher.values - teacher.logsumexp[..., None]
    records = np.empty(log_probs.shape[:-1], record_dtype(log_probs.shape[-1], vocab_size))
    pairs = {"best": (teacher.values, teacher.ids), "tail": (teacher.tail_values, teacher.tail_ids)}
    for name, (values, ids) in pairs.items():
        stored = values - teacher.logsumexp[..., None]
        # A log p below float16's range becomes -inf: its probability is 0 in any case.
        records[f"{name}_log_probs"] = np.where(stored < np.finfo(np.float16).min, -np.inf, stored)
        ids = ids.astype("<u4")
        records[f"{name}_ids"] = ids if vocab_size <= 2**16 else ids[..., None].view("u1")[..., :3]
    records["tail_mass"] = np.clip(1.0 - np.exp(log_probs).sum(-1), 0.0, None)
    return records


def from_records(records: np.ndarray) -> TopKLogits:
    """Logits of stored records; numpy in, numpy out. ``values`` are the stored log p; ``logsumexp`` makes up for their
    rounding, so that the mass of the tail is the stored one."""
    values = records["best_log_probs"].astype(np.float32)
    logsumexp = np.log(np.exp(values).sum(-1)) - np.log1p(-records["tail_mass"])
    arrays: dict[str, Any] = {
        "values": values,
        "ids": _ids(records["best_ids"]),
        "logsumexp": logsumexp.astype(np.float32),
        "tail_values": records["tail_log_probs"].astype(np.float32),
        "tail_ids": _ids(records["tail_ids"]),
    }
    return TopKLogits(**arrays)


def _ids(stored: np.ndarray) -> np.ndarray:
    if stored.dtype == np.uint8:
        stored = np.pad(stored, [(0, 0)] * (stored.ndim - 1) + [(0, 1)]).view("<u4")[..., 0]
    return stored.astype(np.int32)


class RecordFormat(Protocol):
    """Format of what a cache stores of a position. ``less``: advice on how to store less, for an error message."""

    less: ClassVar[str]

    def record(self, target: Target) -> np.dtype:
        """Dtype of the record of one position."""
        ...

    def made_from(self, target: Target) -> dict[str, Any]:
        """Settings that records depend on, beside target and rows; among them ``shape``, the shape of a position's
        values. Raises `ConfigError` for a target that cannot give such records."""
        ...

    def make(self, target: Target, batch: Batch, numbers: Int[np.ndarray, " B"], real: int) -> tuple[np.ndarray, Any]:
        """Records of the first ``real`` rows of a batch, and sums over their positions. ``numbers``: the rows'."""
        ...

    def onto(self, row: Batch, records: np.ndarray) -> Batch:
        """The row with its records added."""
        ...

    def figures(self, shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Figures of a whole cache, from the sums of its shards."""
        ...

    @staticmethod
    def summary(found: Mapping[str, Any]) -> str:
        """Figures of a whole cache in words."""
        ...


@dataclasses.dataclass(frozen=True)
class Logits:
    """Format of the ``k`` best of ``vocab_size`` logits, see the head of this file."""

    k: int
    vocab_size: int
    less: ClassVar[str] = "less with a lower teacher_top_k"

    @classmethod
    def of(cls, k: int, target: Target, rows: Rows) -> Logits:
        """Format of the ``k`` best of ``target``'s logits."""
        run = functools.partial(target_output, target.spec)
        return cls(k, jax.eval_shape(run, target.params, take(rows, [0])).logits.shape[-1])

    def record(self, target: Target) -> np.dtype:
        """Dtype of the record of one position, see `record_dtype`."""
        return record_dtype(self.k, self.vocab_size)

    def made_from(self, target: Target) -> dict[str, Any]:
        tokens = TokenRows.of(target)
        most = self.vocab_size if tokens is None else self.vocab_size - len(tokens.unused)
        if self.k > most:
            raise ConfigError(f"teacher_top_k={self.k} exceeds the target's {most} tokens; lower it")
        padding = fingerprint.digest(np.asarray(tokens.unused if tokens else ()))
        return {"padding": padding, "k": self.k, "tail_tokens": TAIL_TOKENS, "shape": [self.vocab_size]}

    def make(self, target: Target, batch: Batch, numbers: Int[np.ndarray, " B"], real: int) -> tuple[np.ndarray, Any]:
        best = jax.device_get(whole(_best(target.spec, TokenRows.of(target), target.params, batch, numbers, self.k)))
        best = jax.tree.map(lambda x: x[:real], best)
        records = to_records(best, self.vocab_size)
        counts = batch.weight[:real] > 0
        tail = records["tail_mass"][counts].astype(np.float64)
        rounding = _rounding(best, from_records(records))[counts].sum()
        return records, {"tail": tail.sum(), "tail_max": tail.max(initial=0.0), "rounding": rounding}

    def onto(self, row: Batch, records: np.ndarray) -> Batch:
        return dataclasses.replace(row, teacher=from_records(records))

    def figures(self, shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        positions = sum(shard["positions"] for shard in shards)
        mean = {n: sum(shard[n] for shard in shards) / max(positions, 1) for n in ("tail", "rounding")}
        return {
            "full_bytes_per_token": 4 * self.vocab_size,
            "tail_mean": mean["tail"],
            "tail_max": max(shard["tail_max"] for shard in shards),
            "rounding_mean": mean["rounding"],
            "alpha_error": mean["tail"] + mean["rounding"],
        }

    @staticmethod
    def summary(found: Mapping[str, Any]) -> str:
        return (
            f"{found['k']} of {found['shape'][-1]:,} logits, {found['bytes_per_token']} bytes a token (all in float32: "
            f"{found['full_bytes_per_token']:,}); mean tail {found['tail_mean']:.2g}, alpha off by at most "
            f"{found['alpha_error']:.2g}"
        )


@dataclasses.dataclass(frozen=True)
class CachedRows(RowsWithMore):
    """Rows with the target's records beside each, in `format`. ``numbers``: numbers of the rows that have
    records, in order; ``digests``: SHA-256 of each shard."""

    numbers: Int[np.ndarray, " rows"]
    directory: Path
    rows_per_shard: int
    digests: tuple[str, ...]
    format: RecordFormat

    def __getitem__(self, index: int) -> Batch:
        """One row with its records. Raises `KeyError` for a row that has none."""
        place = int(np.searchsorted(self.numbers, index))
        if place == len(self.numbers) or self.numbers[place] != index:
            raise KeyError(f"{self.directory}: holds nothing of row {index}")
        number, offset = divmod(place, self.rows_per_shard)
        shard = _open(self.directory / _name(number), self.digests[number])
        return self.format.onto(self.rows[index], np.asarray(shard[offset]))


def numbers_of(batches: Batches, steps: int) -> Int[np.ndarray, " rows"]:
    """Numbers of the rows that the first ``steps`` batches hold, in order."""
    size = len(batches.indices(0))
    if steps * size >= len(batches.rows):  # a whole epoch
        return np.arange(len(batches.rows))
    return np.unique(np.concatenate([batches.indices(step) for step in range(steps)]))


@functools.lru_cache(maxsize=256)  # each memory map holds its file open
def _open(file: Path, digest: str) -> np.ndarray:
    return np.load(file, mmap_mode="r")


@dataclasses.dataclass(frozen=True, eq=False)
class TeacherCache:
    """Cache of the target's records, in `format`, for the ``numbers`` of the rows (in order). Missing ones
    are computed, ``batch_size`` rows at a time; ``progress`` counts rows. A cache of more than ``most_bytes`` is
    refused."""

    target: Target
    rows: Rows
    numbers: Int[np.ndarray, " rows"]
    format: RecordFormat
    batch_size: int
    progress: StepProgress | None = None
    most_bytes: float = float("inf")

    @functools.cached_property
    def made_from(self) -> dict[str, Any]:
        """All that the cache is made from, as its directory is claimed for."""
        own = self.format.made_from(self.target)
        target_params, target_config = fingerprint.of_model(self.target)
        return {
            "target_params": target_params,
            "target_config": target_config,
            "rows": fingerprint.digest((np.frombuffer(self.rows.digest.encode(), np.uint8), self.numbers)),
            **own,
            "shape": [len(self.numbers), self.rows.length, *own["shape"]],
            "rows_per_shard": max(1, SHARD_BYTES // (self.rows.length * self.format.record(self.target).itemsize)),
        }

    def shared(self, root: Path) -> CachedRows:
        """The rows of `at` a directory of ``root`` named by the digest of what it is made from, so that other runs
        find it. If two runs come at once, one makes it and the other waits."""
        directory = root / fingerprint.of_json(self.made_from)[:16]
        with contextlib.ExitStack() as held:
            on_main_process(lambda: held.enter_context(artifact.in_turn(root / f".{directory.name}.lock")))
            return self.at(directory)

    def at(self, directory: Path) -> CachedRows:
        """The rows with their records in ``directory``. A note tells the size of those to compute first.

        Every stored shard is checked against its SHA-256; a damaged one is named in a warning and made again. Raises
        `ConfigError` if the cache would take more than ``most_bytes``, or the target cannot give such records;
        `TrainingError` if the directory belongs to another target, other rows or another format, or cannot be written.
        """
        made_from, record = self.made_from, self.format.record(self.target)
        per_shard, size = made_from["rows_per_shard"], len(self.numbers) * self.rows.length * record.itemsize
        if size > self.most_bytes and not on_main_process(lambda: (directory / artifact.PROVENANCE).exists()):
            raise ConfigError(
                f"teacher=cached: {directory} would take {size / 1e9:,.1f} GB, {record.itemsize:,} bytes a token, and "
                f"teacher_gb is {self.most_bytes / 1e9:g}; raise it, train on fewer rows, or set teacher=online"
            )
        on_main_process(lambda: artifact.claim(directory, made_from))
        starts = range(0, len(self.numbers), per_shard)
        on_main_process(lambda: self._refuse_full_disk(directory, starts, size))
        shards = []
        try:
            for number, start in enumerate(starts):
                file = directory / _name(number)
                found = on_main_process(functools.partial(artifact.record_of, file))
                if found is None:
                    if number == 0:
                        note(f"{directory}: {size / 1e9:.3g} GB, {self._seconds():.3g} s beside compilation")
                    found = self._make(file, start)
                self._tell(min(start + per_shard, len(self.numbers)))
                shards.append(found)
        except TrainingError as error:
            raise TrainingError(f"{error}; all of it takes {size:,} bytes, {self.format.less}") from None
        figures = {
            "dtype": str(record.descr),
            "bytes_per_token": record.itemsize,
            "positions": int(sum(shard["positions"] for shard in shards)),
            **self.format.figures(shards),
        }
        figures["told"] = self.format.summary(made_from | figures)
        on_main_process(lambda: artifact.write_provenance(directory, figures))
        _log.info("%s", summary(directory))
        digests = tuple(shard["sha256"] for shard in shards)
        return CachedRows(self.rows, self.numbers, directory, per_shard, digests, self.format)

    def _refuse_full_disk(self, directory: Path, starts: Sequence[int], size: int) -> None:
        """Raise `DataError` if the disk lacks room for the shards that are not there, of ``size`` bytes in all."""
        missing = sum(not (directory / _name(number)).exists() for number in range(len(starts)))
        remedy = "set distill.teacher_path to another disk, or distill.teacher=online"
        artifact.refuse_full_disk(directory, size * missing / max(1, len(starts)), "the target's output", remedy)

    def _make(self, file: Path, start: int) -> dict[str, Any]:
        """Write the shard that begins with the ``start``-th number, whole or not at all, and return its record."""
        made, sums = [], {"positions": 0.0}
        for numbers, real in self._batches(start):
            batch = take(self.rows, numbers)
            records, found = self.format.make(self.target, batch, numbers, real)
            made.append(records)
            self._tell(start + sum(map(len, made)))
            sums["positions"] += float(np.count_nonzero(batch.weight[:real] > 0))
            for name, value in found.items():
                add = max if name.endswith("_max") else sum
                sums[name] = float(add((sums.get(name, 0.0), value)))
        content = io.BytesIO()
        np.save(content, np.concatenate(made))
        return on_main_process(lambda: artifact.write(file, content.getvalue(), sums))

    def _seconds(self) -> float:
        """Estimated seconds to make the whole cache, from one batch, which runs once before, uncounted, to compile."""
        first, real = next(self._batches(0))
        batch = take(self.rows, first)
        self.format.make(self.target, batch, first, real)
        began = time.perf_counter()
        self.format.make(self.target, batch, first, real)
        return (time.perf_counter() - began) * -(-len(self.numbers) // len(first))

    def _batches(self, start: int) -> Iterator[tuple[np.ndarray, int]]:
        """Pairs (row numbers, how many of them are new) of the shard that begins with the ``start``-th number. The last
        batch is filled up, so that one shape is compiled."""
        per_shard = self.made_from["rows_per_shard"]
        indices, size = self.numbers[start : start + per_shard], min(self.batch_size, per_shard)
        for begin in range(0, len(indices), size):
            chosen = indices[begin : begin + size].astype(np.int32)
            yield np.pad(chosen, (0, size - len(chosen)), mode="edge"), len(chosen)

    def _tell(self, rows: int) -> None:
        if self.progress is not None:
            self.progress(rows, {})


def summary(directory: Path) -> str:
    """One line on a whole cache: bytes a token, and what is lost."""
    return f"{directory}: {artifact.read_provenance(directory).get('told', 'of an older version')}"


def _name(number: int) -> str:
    return f"{number:06d}.npy"


@functools.partial(jax.jit, static_argnums=(0, 1, 5))
def _best(
    spec: Any, tokens: TokenRows | None, params: Params, batch: Batch, numbers: Int[Array, " B"], k: int
) -> TopKLogits:
    """The ``k`` best logits of each position, and tokens drawn from its tail. The draw depends on the row's number
    alone, so that a shard made again is the same."""
    teacher = Teacher.of(spec, params, target_output(spec, params, batch))
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(0)))(numbers)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (batch.tokens.shape[1],), np.float32))(keys)

    def best(some: Any) -> TopKLogits:
        logits = teacher.logits(some[0]).logits
        logits = logits if tokens is None else tokens.over(logits)
        return top_k_logits(logits, k, some[1], TAIL_TOKENS)

    return mapped(best, (teacher.values, uniform), teacher.chunk)


def _rounding(exact: TopKLogits, stored: TopKLogits) -> np.ndarray:
    """Total variation between two distributions over the same tokens, one value a position."""
    p, q = (
        np.exp((distribution.values - distribution.logsumexp[..., None]).astype(np.float64))
        for distribution in (exact, stored)
    )
    return 0.5 * np.abs(p - q).sum(-1)
