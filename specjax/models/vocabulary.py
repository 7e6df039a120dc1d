"""Rows of a model's embedding that are tokens, the ids that a draft proposes, and the check that a token id means the
same in two models.

Checkpoints of one family pad their embeddings differently (151,936 rows against 152,064), though they have the same
tokenizer. Rows that no token has hold arbitrary weights: they are never proposed, never emitted, and do not count when
two models are compared. A fine-tune often adds a token or two: a draft works without them (`known_to`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.errors import ModelError
from specjax.interfaces import Model, Output, Params, Target
from specjax.models.files import read_json

if TYPE_CHECKING:
    from specjax.models.hf import LoadedModel

_REMEDY = "use a draft of the same tokenizer, or distill one for this target with `specjax train`"
_log = logging.getLogger(__name__)
_NONE = np.zeros(0, np.int64)
_SHOWN = 3
NEVER = -1e30
"""Logit of a token with probability 0: finite, because a loss would subtract -inf from -inf."""
_FILE = "draft_vocabulary.json"
_found: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


class DraftVocabulary:
    """A draft vocabulary: the ids, ascending, that a draft can propose of a vocabulary of ``size``. Static and
    hashable."""

    def __init__(self, ids: Any, size: int):
        found = np.asarray(ids)
        if found.ndim != 1 or not len(found) or found.min() < 0 or found.max() >= size:
            raise ValueError(f"ids of 0 .. {size - 1} are to be named")
        if (np.diff(found) <= 0).any():
            raise ValueError("the ids do not ascend")
        self.ids, self.size = found.astype(np.int32), size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DraftVocabulary) and self.size == other.size and np.array_equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash((self.size, self.ids.tobytes()))

    def __repr__(self) -> str:
        return f"DraftVocabulary({len(self.ids)} of {self.size})"

    @property
    def digest(self) -> str:
        """Text that tells the vocabulary from others in a run's fingerprint, with the class's name there."""
        return f"Kept({len(self.ids)} of {self.size}) {hashlib.sha256(self.ids.tobytes()).hexdigest()}"

    @property
    def mask(self) -> Bool[np.ndarray, " V"]:
        return np.isin(np.arange(self.size), self.ids)

    def over_all(self, logits: Float[Array, "*B W"]) -> Float[Array, "*B V"]:
        """Logits over the whole vocabulary; ids outside the draft vocabulary are never drawn."""
        everything = jnp.full((*logits.shape[:-1], self.size), NEVER, logits.dtype)
        return everything.at[..., self.ids].set(logits)

    @classmethod
    def read(cls, directory: Path, model: Any) -> DraftVocabulary | None:
        """The draft vocabulary of ``model``, which is stored in ``directory``; None: it proposes all ids. Raises
        `ModelError`."""
        file = directory / _FILE
        if not file.exists():
            return None
        size = model.config.vocab_size
        try:
            return cls(read_json(file)["ids"], size)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{file}: holds no ascending ids of 0 .. {size - 1} ({error}); distill it again") from None

    def write(self, directory: Path) -> None:
        """Write the file that `read` reads."""
        (directory / _FILE).write_text(json.dumps({"ids": self.ids.tolist()}) + "\n")


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Range of the decoded distributions: ``size`` ids, of which the ``unused`` ones are padding."""

    size: int
    unused: tuple[int, ...]

    @classmethod
    def of(cls, target: Target | None) -> TokenRows | None:
        """Rows of the target; None without a tokenizer, which alone tells padding from tokens."""
        if target is None or target.tokenizer is None:
            return None
        size = target.config.vocab_size
        return _once(target.tokenizer, ("rows", size), lambda: cls(size, tuple(unused_ids(target).tolist())))

    def over(self, logits: Float[Array, "*B W"]) -> Float[Array, "*B V"]:
        """``logits`` with padding at `NEVER`, and with the target's number of rows if a draft has another one."""
        batch = [(0, 0)] * (logits.ndim - 1)
        logits = jnp.pad(logits[..., : self.size], [*batch, (0, max(self.size - logits.shape[-1], 0))])
        if not self.unused:
            return logits
        is_token = np.isin(np.arange(self.size), self.unused, invert=True).reshape([1] * len(batch) + [-1])
        return jnp.where(is_token, logits, jnp.asarray(NEVER, logits.dtype))


def unused_ids(model: Any) -> np.ndarray:
    """Ascending ids ``[U]`` of the rows of ``model`` that no token of its tokenizer has; none without a tokenizer."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return _NONE
    rows = model.config.vocab_size
    return _once(tokenizer, rows, lambda: np.setdiff1d(np.arange(rows), list(_tokens(tokenizer))))


def check_same_vocabulary(target: Target, draft: LoadedModel) -> None:
    """Raises `ModelError` with the first differing entries unless every token id of the target means the same in the
    draft, or can be taught to it. The tokenizers must have the same content (tokens and added tokens with their ids,
    merges, normaliser, pre-tokenizer), whatever their names; each may lack added tokens of the other. The draft's
    embedding must hold all of the target's tokens. If a model has no tokenizer, padding cannot be told from tokens, and
    sizes must be equal."""
    _check_rows(draft, max([-1, *_shared(target, draft), *unknown_ids(target, draft)]))


def unknown_ids(target: Target, draft: LoadedModel) -> tuple[int, ...]:
    """Ascending ids of the target's tokens that the draft's tokenizer lacks; only added tokens can be among them.
    Raises `ModelError` as `check_same_vocabulary` does, but needs no embeddings for these tokens."""
    shared = _shared(target, draft)
    _check_rows(draft, max(shared, default=-1))
    known = set(shared)
    return () if target.tokenizer is None else tuple(i for i in _ids(target) if i not in known)


def _shared(target: Target, draft: LoadedModel) -> list[int]:
    """Ascending ids of the tokens that both models have, once the rest of their tokenizers has been compared."""
    rows, draft_rows = target.config.vocab_size, draft.config.vocab_size
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours is None or theirs is None:
        if rows != draft_rows:
            which = " and ".join(name for name, t in (("target", ours), ("draft", theirs)) if t is None)
            raise ModelError(
                f"the draft's vocabulary has {draft_rows} tokens, the target's {rows}, and which of them are padding "
                f"only a tokenizer tells: the {which} has none; {_REMEDY}"
            )
        return [] if ours is None else _ids(target)
    if ours is theirs or _digest(ours) == _digest(theirs):
        return _ids(target)
    _once(ours, _digest(theirs), lambda: _compare(_content(ours), _content(theirs)))
    return sorted({*_ids(target)} & {*_tokens(theirs)})


def _ids(model: Any) -> list[int]:
    """Ascending ids of the tokens that have a row in the embedding."""
    return sorted(id_ for id_ in _tokens(model.tokenizer) if id_ < model.config.vocab_size)


def _check_rows(draft: LoadedModel, last: int) -> None:
    if last >= draft.config.vocab_size:
        raise ModelError(
            f"the draft has embeddings for {draft.config.vocab_size} tokens, and the last token of the target has id "
            f"{last}; resize the draft's embeddings to {last + 1} rows and train them, or {_REMEDY}"
        )


@dataclasses.dataclass(frozen=True)
class KnownTokens(Model):
    """A model that does not know some tokens: it reads ``instead`` in their place, and never proposes them."""

    model: Any
    unknown: tuple[int, ...]
    instead: int

    @property
    def config(self) -> Any:
        return self.model.config

    def init_cache(self, *args: Any, **options: Any) -> Any:
        return self.model.init_cache(*args, **options)

    def __call__(self, params: Params, tokens: Int[Array, "B T"], *args: Any, **options: Any) -> Output:
        # One entry more, which stands for all larger ids.
        unknown = jnp.asarray(self._are_unknown(max(self.unknown) + 2))
        tokens = jnp.where(jnp.take(unknown, tokens, mode="clip"), self.instead, tokens)
        out = self.model(params, tokens, *args, **options)
        never = jnp.asarray(self._are_unknown(out.logits.shape[-1]))[None, None]
        logits = jnp.where(never, jnp.asarray(-jnp.inf, out.logits.dtype), out.logits)
        return dataclasses.replace(out, logits=logits)

    def _are_unknown(self, size: int) -> np.ndarray:
        return np.isin(np.arange(size), self.unknown)


def known_to(draft: LoadedModel, target: Target, spec: Model) -> Model:
    """``spec``, the draft's, changed to follow ``target``: a token that the draft's tokenizer lacks is never proposed,
    and is read as the end of a text. Raises `ModelError` as `unknown_ids` does."""
    unknown = unknown_ids(target, draft)
    if not unknown:
        return spec
    known = [id_ for id_ in (*draft.eos_ids, *_ids(draft)) if id_ not in unknown]
    return KnownTokens(spec, unknown, known[0])


def _tokens(tokenizer: Any) -> dict[int, str]:
    """id -> token, added tokens included."""
    added = {id_: str(token) for id_, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    return {id_: token for token, id_ in tokenizer.get_vocab().items()} | added


def _content(tokenizer: Any) -> dict[str, Any]:
    """Parts that two tokenizers must share, in the order in which differences are reported. Left out: how special
    tokens are put around a text, padding, truncation, decoding, names. A tokenizer that does not run on the tokenizers
    library has its tokens alone."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    content: dict[str, Any] = {
        "tokens": _tokens(tokenizer),
        "added tokens": {id_: str(token) for id_, token in added.items()},
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return content
    stored = json.loads(backend.to_str())
    model = stored["model"]
    # A unigram model has scores in place of merges.
    vocabulary = model.pop("vocab")
    content["merges"] = model.pop("merges", None) or (vocabulary if isinstance(vocabulary, list) else [])
    if not model.get("unk_token"):
        model.pop("fuse_unk", None)
    return content | {"model": model, **{name: stored[name] for name in ("normalizer", "pre_tokenizer")}}


_STEPS = ("model", "normalizer", "pre_tokenizer")
_WITHOUT_EFFECT = ("trim_offsets",)
"""Settings that change no token id."""


def _effective(part: Any) -> Any:
    """A step of a tokenizer without settings that have no effect. A null, empty or false setting counts as left out, a
    sequence of one step as that step, and a sequence of none as no step."""
    if not isinstance(part, Mapping):
        return part or None
    found = {name: _effective(value) for name, value in part.items() if name not in _WITHOUT_EFFECT}
    if found.get("type") == "Sequence":
        (key,) = found.keys() - {"type"}
        steps = [step for step in map(_effective, found[key] or ()) if step]
        # A sequence in a sequence stands for its steps.
        steps = [inner for step in steps for inner in (step[key] if step.get("type") == "Sequence" else [step])]
        return steps[0] if len(steps) == 1 else {"type": "Sequence", key: steps} if steps else None
    return {name: value for name, value in found.items() if value}


def _digest(tokenizer: Any) -> bytes:
    """Digest of a tokenizer's `_content`, which is too large to store."""

    def make():
        parts = _content(tokenizer).items()
        text = json.dumps(
            [(name, _effective(part) if name in _STEPS else part) for name, part in parts], sort_keys=True
        )
        return hashlib.sha256(text.encode()).digest()

    return _once(tokenizer, "digest", make)


def _once(tokenizer: Any, key: Any, make: Callable[[], Any]) -> Any:
    """Result of ``make()``, stored for each tokenizer and made again when tokens were added to it: every generation
    asks."""
    known = _found.setdefault(tokenizer, {})
    key = key, len(tokenizer) if hasattr(tokenizer, "__len__") else None
    if key not in known:
        known[key] = make()
    return known[key]


def _compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raises `ModelError` for parts that differ, and warns of added tokens that only one of the tokenizers has. (One of
    them may run on another library, and lack parts.)"""
    alone = {"target": _added_alone(ours, theirs), "draft": _added_alone(theirs, ours)}
    for part in (name for name in ours if name in theirs):
        a, b = _by_place(ours[part]), _by_place(theirs[part])
        places = [place for place in {**a, **b} if a.get(place) != b.get(place)]
        if part in _STEPS:
            same = _effective(ours[part]) == _effective(theirs[part])
            places = [] if same else [p for p in places if _effective(a.get(p)) != _effective(b.get(p))]
        if part in ("tokens", "added tokens"):
            places = [place for place in places if not any(place in tokens for tokens in alone.values())]
        if places:
            places = sorted(places)
            shown = ", ".join(f"{place}: {_word(a.get(place))} and {_word(b.get(place))}" for place in places[:_SHOWN])
            raise ModelError(
                f"the tokenizers of target and draft differ in {len(places)} entries of {part!r} "
                f"(target and draft: {shown}); {_REMEDY}"
            )
    told = [f"only the {name} has {_words(tokens)}" for name, tokens in alone.items() if tokens]
    if told:
        _log.warning("the tokenizers differ in added tokens, which are never drafted: %s", "; ".join(told))


def _added_alone(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[int, str]:
    """Added tokens of which the other tokenizer has neither the id nor the content."""
    contents = set(theirs["tokens"].values())
    added = ours["added tokens"].items()
    return {id_: token for id_, token in added if id_ not in theirs["tokens"] and token not in contents}


def _words(tokens: Mapping[int, str]) -> str:
    shown = ", ".join(f"{id_}: {_word(token)}" for id_, token in list(tokens.items())[:_SHOWN])
    return shown if len(tokens) <= _SHOWN else f"{shown} and {len(tokens) - _SHOWN} more"


def _by_place(part: Any) -> dict[Any, Any]:
    """Entries of a list by their index, settings by their name, a single value under the empty name."""
    if isinstance(part, Mapping):
        return dict(part)
    return dict(enumerate(part)) if isinstance(part, Sequence) and not isinstance(part, str) else {"": part}


def _word(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
