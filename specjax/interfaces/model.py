"""Models as everything else sees them: a pure function of weights, its outputs, and a model with weights and tokenizer.

Dims: B rows, T tokens fed, R of the T, D hidden, V vocabulary, G key-value heads, C size of a head.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

Params = Any
"""A pytree of weights. Always a traced argument, never closed over: closed-over weights become constants."""


@dataclasses.dataclass(frozen=True)
class Reads:
    """The parts of the target's forward pass that a drafter reads."""

    hidden_layers: tuple[int, ...] = ()
    """Layers whose incoming residual stream is read. Layer 0 receives the embedded tokens; the number of layers stands
    for the output of the last one, before the final norm."""
    kv_layers: tuple[int, ...] = ()
    """Layers whose keys and values are read as attention reads them, after q/k-norm and rotary."""

    def __bool__(self) -> bool:
        return bool(self.hidden_layers or self.kv_layers)


NOTHING = Reads()
"""`Reads` of a drafter that reads committed tokens alone."""


@flax.struct.dataclass
class Output:
    """The result of a model's forward pass."""

    logits: Float[Array, "B R V"]
    """Logits of the next token after each of the R tokens asked for (default: all tokens fed)."""
    hidden: tuple[Float[Array, "B T D"], ...] = ()
    """Residual streams of the layers in `Reads.hidden_layers`, in its order."""
    cache: Any = None
    """The cache with the fed block written into it; None without one."""
    keys_values: tuple[tuple[Array, Array], ...] = ()
    """Keys and values ``[B, T, G, C]`` of the tokens fed, for the layers in `Reads.kv_layers`, in its order."""
    final: Float[Array, "B T D"] | None = None
    """Input of the head, after the final norm."""


@flax.struct.dataclass
class Documents:
    """Rows of several documents: a token sees itself and those before it in its own document."""

    segments: Int[Array, "B T"]
    """The document that each token belongs to."""

    @property
    def mask(self) -> Bool[Array, "B T T"]:
        """The attention mask: the tokens that each one sees, an entry a pair."""
        size = self.segments.shape[1]
        return (self.segments[:, :, None] == self.segments[:, None]) & jnp.tril(jnp.ones((size, size), bool))[None]


class Model(abc.ABC):
    """A decoder model as a pure function of its parameters; static and hashable. A fed block is contiguous in
    ``slots``, row by row."""

    config: Any
    """Settings of the architecture."""
    dtype: str = "float32"
    """Type that it computes in."""
    cache_dtype: str | None = None
    """Type of the cached keys and values; None: ``dtype``."""
    mesh: Any = None
    """Devices that its weights are spread over; None: they are on one."""
    vocabulary: Any = None
    """Ids that it proposes as a draft, a `DraftVocabulary`; None: all."""
    takes_documents: ClassVar[bool] = False
    """True if the attention mask of rows of several documents is given as `Documents`."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Number of tokens that each layer's attention sees, the newest among them; None: all. Empty: no layer has a
        window."""
        return ()

    @property
    def dynamic_limit(self) -> int | None:
        """Longest row that is rotated by the frequencies of short rows; None: all rows have the same frequencies."""
        return None

    def widest(self) -> int:
        """Numbers of the widest array of a layer, for each token of a prompt; 0: not known."""
        return 0

    def narrowed(self, params: Params, ids: Int[np.ndarray, " W"]) -> Params | None:
        """``params`` with which `head` makes the logits of ``ids`` alone; None: it cannot."""
        return None

    @abc.abstractmethod
    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        slots: Int[Array, "B T"] | None = None,
        cache: Any = None,
        mask: Bool[Array, "B T T"] | Documents | None = None,
        reads: Reads = NOTHING,
        rows: Int[Array, "B R"] | None = None,
    ) -> Output:
        """Logits after each token fed, or after those with the indices ``rows``. ``positions`` are those of rotary or
        learned embeddings, ``slots`` those of the cache (None: its first ones, or there is no cache), ``mask`` the
        tokens of the block that each one sees (None: those before it and itself). Without a cache, a model that has
        ``takes_documents`` takes rows of several documents as `Documents`."""

    @abc.abstractmethod
    def init_cache(self, batch: int, num_slots: int, dtype: DTypeLike = ...) -> Any:
        """An empty cache with room for ``num_slots`` tokens a row."""


class TargetInfo:
    """Facts about a target that reading a stored draft needs; a `Target` has them too."""

    config: Any
    """Settings of the architecture."""
    dtype: Any
    """Type that the target computes in, and that the draft's weights are cast to."""

    def __init__(self, config: Any, dtype: Any):
        self.config, self.dtype = config, dtype


class Target(TargetInfo, abc.ABC):
    """A model with its weights and its tokenizer: the target of a decoder or of a training job.
    `specjax.LoadedModel` is the one that is loaded from disk."""

    spec: Model
    """The static, hashable half: a function of its parameters."""
    params: Params
    tokenizer: Any
    """A Hugging Face tokenizer; None: prompts are token ids, and there is no text."""
    eos_ids: tuple[int, ...]
    """Token ids that end a generation."""
    name: str
    """Name for messages and model cards."""
    family: str
    """Hugging Face model type that it is saved as."""
    source: str | None
    """Directory or hub id that it was loaded from; None: it was made in this program."""
    mesh: Any
    """Devices that its weights are spread over; None: they are on one."""
    vocab_size: int
    """Number of token ids that the embedding has rows for."""

    @abc.abstractmethod
    def layout(self) -> Any:
        """The spec and the weights as decoding reads them (`specjax.models.decode_layout.DecodeLayout`)."""

    @abc.abstractmethod
    def free_originals(self) -> None:
        """Free the weights that only training reads."""

    @abc.abstractmethod
    def logits(self, tokens: Int[Array | np.ndarray, "B T"]) -> Float[Array, "B T V"]:
        """float32 logits of the token after each position, without a cache."""
