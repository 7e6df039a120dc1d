"""Cache of what a draft reads of its target's forward pass, for a stage's rows (`specjax.training.teacher_cache`): the
streams that it names, and behind them the input of the target's head, which gives the whole distribution instead of its
best logits; with them the logsumexp of all logits, for a draft that compares few. They are cached in the target's
dtype: training equals training online, and nothing is lost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.config import Stage
from specjax.interfaces import Batch, Params, Reads, Target
from specjax.models import kernels
from specjax.models.vocabulary import TokenRows
from specjax.runtime.distributed import whole
from specjax.training.chunked_loss import Teacher
from specjax.training.teacher import target_output


@dataclasses.dataclass(frozen=True)
class Streams:
    """Cache format of the streams ``reads.hidden_layers`` and the head's input. See
    `specjax.training.teacher_cache.RecordFormat`."""

    reads: Reads
    dtype: str
    matmul_dtype: str | None = None
    less: ClassVar[str] = "less of fewer streams or rows"

    @classmethod
    def of(cls, reads: Reads, target: Target, stage: Stage) -> Streams:
        return cls(reads, str(target.dtype), stage.matmul_dtype)

    def record(self, target: Target) -> np.dtype:
        """Dtype of the record of one position, with numbers as integers of their width: numpy has no name for bfloat16
        on disk."""
        shape = len(self.reads.hidden_layers) + 1, target.config.hidden_size
        return np.dtype([("streams", f"<u{jnp.dtype(self.dtype).itemsize}", shape), ("logsumexp", "<f4")])

    def made_from(self, target: Target) -> dict[str, Any]:
        count, size = len(self.reads.hidden_layers) + 1, target.config.hidden_size
        streams = {"streams": list(self.reads.hidden_layers), "dtype_of_streams": self.dtype, "shape": [count, size]}
        rounded = {} if self.matmul_dtype is None else {"matmul_dtype": self.matmul_dtype}
        return {**streams, "logsumexp": True, **rounded}

    def make(self, target: Target, batch: Batch, numbers: Int[np.ndarray, " B"], real: int) -> tuple[np.ndarray, Any]:
        made = _streams(target.spec, target.params, batch, self, TokenRows.of(target))
        found, logsumexp = jax.device_get(whole(made))
        records = np.empty(found.shape[:2], self.record(target))[:real]
        records["streams"] = found[:real].view(records["streams"].dtype)
        records["logsumexp"] = logsumexp[:real]
        return records, {}

    def onto(self, row: Batch, records: np.ndarray) -> Batch:
        streams = np.ascontiguousarray(records["streams"]).view(jnp.dtype(self.dtype))
        logsumexp: Any = np.ascontiguousarray(records["logsumexp"])
        return dataclasses.replace(row, streams=tuple(np.moveaxis(streams, 1, 0)), logsumexp=logsumexp)

    def figures(self, shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {}

    @staticmethod
    def summary(found: Mapping[str, Any]) -> str:
        count, dtype, size = found["shape"][-2], found["dtype_of_streams"], found["bytes_per_token"]
        return f"{count} hidden states in {dtype}, {size:,} bytes a token; nothing is lost"


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _streams(spec: Any, params: Params, batch: Batch, kept: Streams, rows: TokenRows | None) -> tuple[Array, Array]:
    """The streams and the head's input, ``[B, T, S, D]``, and the logsumexp of the logits, ``[B, T]``."""
    with kernels.operands_in(kept.matmul_dtype):
        out = target_output(spec, params, batch, kept.reads)
        assert out.final is not None
        streams = jnp.stack([x.astype(kept.dtype) for x in (*out.hidden, out.final)], axis=2)
        return streams, Teacher.of(spec, params, out).logsumexp(rows)
