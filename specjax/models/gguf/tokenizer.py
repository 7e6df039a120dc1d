"""The tokenizer of a GGUF file, as one of the package tokenizers. The file names how text is split before the merges
(``tokenizer.ggml.pre``); a name that is not known is refused, since another split gives other tokens without a word.

Splits are those of the models' own tokenizer.json.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from specjax.errors import ModelError
from specjax.models.files import import_transformers
from specjax.models.gguf.header import Header

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_OF_CASED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(end: str, digits: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_UPPER}*{_LOWER}+{end}|{start}{_UPPER}+{_LOWER}*{end}|{digits}|{_REST_OF_CASED}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"


@dataclasses.dataclass(frozen=True)
class Split:
    """Rule by which a byte-level tokenizer splits text. ``patterns``: one after the other. ``whole``: a piece that is a
    token is taken whole, whatever the merges say. ``bos``: texts begin with the beginning-of-sequence token if the file
    does not say. ``nfc``: text is normalised first."""

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    nfc: bool = False


_OF_LLAMA3 = Split((_LLAMA3,), whole=True, bos=True)
_OF_QWEN2 = Split((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), nfc=True)
SPLITS = {
    "gpt-2": Split((_GPT2,)),
    "smollm": Split((r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Split((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _OF_QWEN2),
    "tekken": Split((_cased("", r"\p{N}"),), whole=True, bos=True),
    "gpt-4o": Split((_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),)),
}
"""``tokenizer.ggml.pre`` -> the rule by which text is split."""
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that are found in a text as a whole; the first ones are special."""
_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>"),
    *("<EOT>", "<|return|>", "<|end_of_turn|>", "<end_of_utterance>"),
}
"""Special tokens that end a turn, whatever the file names as its end of sequence."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Settings of the tokenizer in the header."""

    header: Header

    def get(self, name: str, default: Any = None) -> Any:
        return self.header.values.get(f"tokenizer.{name}", default)

    @functools.cached_property
    def tokens(self) -> list[str]:
        """All tokens. Those of several spaces are spelled as the merges spell them."""
        found = self.get("ggml.tokens", [])
        if self.get("ggml.model") != "llama":
            return found
        return ["▁" * len(token) if " " in token and not token.strip(" ") else token for token in found]

    def token(self, name: str) -> str | None:
        """The token that the file names as ``bos``, ``eos``, ``unknown`` or ``padding``."""
        number = self.get(f"ggml.{name}_token_id")
        return self.tokens[number] if number is not None and number < len(self.tokens) else None

    @functools.cached_property
    def types(self) -> list[int]:
        """Type of each token. What ends a turn is special; files of Gemma call it user-defined."""
        pairs = zip(self.tokens, self.get("ggml.token_type", []), strict=False)
        return [_CONTROL if kind == _USER_DEFINED and token in _ENDS else kind for token, kind in pairs]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: those that the file names, and the special ones that chats end their turns with."""
        named = [self.get(f"ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        found = [i for i, kind in enumerate(self.types) if kind == _CONTROL and self.tokens[i] in _ENDS]
        return tuple(dict.fromkeys([token for token in named if token is not None] + found))


def tokenizer_of(header: Header) -> Any:
    """A Hugging Face tokenizer; None if the file has none. Raises `ModelError` for one that cannot be built."""
    vocabulary = Vocabulary(header)
    kind = vocabulary.get("ggml.model")
    if not vocabulary.tokens:
        return None
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{header.file}: tokenizer.ggml.model={kind!r} is not read; known are gpt2 and llama")
    try:
        backend = _byte_level(vocabulary) if kind == "gpt2" else _sentencepiece(vocabulary)
        backend.add_special_tokens(_added(vocabulary, _CONTROL))
        backend.add_tokens(_added(vocabulary, _USER_DEFINED))
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{header.file}: its tokenizer cannot be built ({reason}); convert the model again") from None
    if backend.get_vocab_size() != len(vocabulary.tokens):
        raise ModelError(
            f"{header.file}: the tokenizer has {backend.get_vocab_size()} tokens, the file {len(vocabulary.tokens)}"
        )
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: vocabulary.token(theirs) for name, theirs in names.items()}
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=vocabulary.get("chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token is not None},
    )


def _added(vocabulary: Vocabulary, kind: int) -> list[Any]:
    import tokenizers

    special = kind == _CONTROL
    return [
        tokenizers.AddedToken(token, special=special, normalized=False)
        for token, its in zip(vocabulary.tokens, vocabulary.types, strict=False)
        if its == kind
    ]


def _begins(backend: Any, vocabulary: Vocabulary, unless_said: bool) -> None:
    """Make every text begin with the beginning-of-sequence token, and end with the other one, if the file asks for
    it."""
    import tokenizers

    bos = vocabulary.token("bos") if vocabulary.get("ggml.add_bos_token", unless_said) else None
    eos = vocabulary.token("eos") if vocabulary.get("ggml.add_eos_token", False) else None
    around = [f"{bos}:0" if bos else None, "$A:0", f"{eos}:0" if eos else None]
    ids = {token: vocabulary.tokens.index(token) for token in (bos, eos) if token}
    if ids:
        template = [part for part in around if part]
        second = [part.replace(":0", ":1").replace("$A", "$B") for part in template]
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=" ".join(template), pair=" ".join([*template, *second]), special_tokens=list(ids.items())
        )


def _byte_level(vocabulary: Vocabulary) -> Any:
    """Byte-level BPE, as GPT-2's."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    name = vocabulary.get("ggml.pre")
    if name not in SPLITS:
        remedy = "convert the model again" if name is None else f"known are {', '.join(SPLITS)}"
        raise ModelError(f"{vocabulary.header.file}: tokenizer.ggml.pre={name!r} is not read; {remedy}")
    split = SPLITS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.get("ggml.merges", [])]
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in split.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    _begins(backend, vocabulary, split.bos)
    return backend


def _sentencepiece(vocabulary: Vocabulary) -> Any:
    """SentencePiece's BPE: spaces are part of the words, and what is not in the vocabulary is written in bytes."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    model = models.BPE(
        vocab=vocab,
        merges=_merges(vocabulary, vocab),
        unk_token=vocabulary.token("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    space = normalizers.Replace(" ", "▁")
    prefix = vocabulary.get("ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    _begins(backend, vocabulary, True)
    return backend


def _merges(vocabulary: Vocabulary, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens that make a token, the best first. SentencePiece knows no merges, but scores of what they make.
    The scores of a Gemma do not say which is better, the order of its tokens does."""
    given = vocabulary.get("ggml.merges")
    if given:
        return [tuple(merge.split(" ", 1)) for merge in given]
    scores = vocabulary.get("ggml.scores") or []
    if vocabulary.header.values.get("general.architecture", "").startswith("gemma"):
        scores = [-i for i in range(len(vocabulary.tokens))]
    found = []
    for token, number in vocab.items():
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        found += [(-scores[number], -len(a), a, b) for a, b in pairs if a in vocab and b in vocab]
    return [(a, b) for *_, a, b in sorted(found)]
