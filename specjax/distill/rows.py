"""Documents in, rows of tokens to train and to measure on out, and batches of rows in an order that can be resumed.

A row is ``length + 1`` consecutive tokens of the concatenated documents, each closed by end-of-sequence; rows overlap by
one token. Attention and positions stay inside a document, and no document is asked to predict the next one's start.

Dims: N rows, B rows of a batch, T predicted positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import grain
import jax
import numpy as np
from jaxtyping import Int

from specjax.distill import fingerprint
from specjax.distill.corpus import Document
from specjax.errors import DataError
from specjax.types import Batch


class Rows(Protocol):
    """Rows of T positions by number; the same number is the same row in every process and after every restart."""

    @property
    def length(self) -> int:
        """T."""
        ...

    @property
    def digest(self) -> str:
        """Names the content of all rows."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch:
        """One row, of numpy arrays without a batch axis."""
        ...


@dataclasses.dataclass(frozen=True)
class Packed:
    """``stream``: the concatenated documents; ``starts``: where each begins; ``length``: T."""

    stream: Int[np.ndarray, " tokens"]
    starts: Int[np.ndarray, " documents"]
    length: int

    def __post_init__(self) -> None:
        if not len(self):
            raise DataError(
                f"the corpus has {len(self.stream)} tokens, too few for one window of {self.length + 1}; use more text"
            )

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.length

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = index * self.length
        tokens = self.stream[begin : begin + self.length + 1]
        places = np.arange(begin, begin + self.length + 1)
        document = np.searchsorted(self.starts, places, side="right") - 1
        positions = places - np.maximum(self.starts[document], begin)
        return Batch(
            tokens=tokens[:-1],
            following=tokens[1:],
            weight=(document[1:] == document[:-1]).astype(np.float32),
            positions=positions[:-1].astype(np.int32),
            segments=(document - document[0])[:-1].astype(np.int32),
        )

    @property
    def digest(self) -> str:
        return fingerprint.digest((self.stream, self.starts, np.asarray(self.length)))


def pack(tokenizer: Any, documents: Sequence[Document], eos_id: int, length: int) -> Packed:
    """Ordered by content hash, so names do not matter."""
    ordered = sorted(documents, key=lambda d: d.digest)
    encoded = tokenizer([d.text for d in ordered], add_special_tokens=False)["input_ids"]
    sizes = np.asarray([len(ids) + 1 for ids in encoded], np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)[:-1]])
    parts = [token for ids in encoded for token in (*ids, eos_id)]
    return Packed(np.asarray(parts, np.int32), starts, length)


def take(rows: Rows, indices: Sequence[int] | np.ndarray) -> Batch:
    """The rows numbered ``indices`` as one batch of numpy arrays."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(rows[int(i)] for i in indices))


def spread(rows: Rows, positions: int) -> Batch:
    """As many rows as hold ``positions`` predicted tokens, evenly spread; else all."""
    count = min(len(rows), -(-positions // rows.length))
    return take(rows, np.arange(count) * len(rows) // count)


class Batches:
    """Endless and reshuffled every epoch. Batch i is a function of (seed, i): the step is the cursor, and resuming
    needs nothing else."""

    def __init__(self, rows: Rows, batch_size: int, seed: int):
        if len(rows) < batch_size:
            raise DataError(
                f"the corpus has {len(rows)} windows of {rows.length} tokens, too few for one batch of "
                f"{batch_size}; use more text, a smaller batch_size or a smaller seq_len"
            )
        self.rows = rows
        self._order = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat().batch(batch_size)

    def indices(self, step: int) -> Int[np.ndarray, " B"]:
        """Numbers of the rows of batch ``step``."""
        return self._order[step]

    def __getitem__(self, step: int) -> Batch:
        return take(self.rows, self.indices(step))
