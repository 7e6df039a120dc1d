"""Text of a generation, whole and as it comes: events of any size join to it, for every kind of tokenizer."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import jax.numpy as jnp
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specjax.decode.decoder import Decoder
from specjax.decode.result import Piece, pieces_of
from specjax.decode.text import Detokenizer, RowText
from specjax.testing.toys import ToyModel, prefix_model

LINES = [
    "naïve €5 🙂! don't , . do not",
    "yes “quoted” — no",
    "日本語と中文",
    "שלום مرحبا привет",
    "a  b   c\n\n\td",
    "👩‍👩‍👧 é e\u0301 ﷽",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def fast(model: Any, decoder: Any) -> PreTrainedTokenizerFast:
    """With an end-of-sequence token, another special one and an added token that is text."""
    backend = model if isinstance(model, Tokenizer) else Tokenizer(model)
    if decoder is not None:
        backend.decoder = decoder
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    added: Any = [AddedToken("<|turn|>", special=True), AddedToken("[new word]", special=False)]
    made.add_tokens(added)
    return made


def byte_level() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(LINES * 3, trainer)
    return fast(backend, decoders.ByteLevel())


def byte_fallback(*steps: Any) -> PreTrainedTokenizerFast:
    pieces = ["<unk>", *BYTES, "▁", "a", "▁yes", "é", "日", "▁▁", "\ufffd", "<0x"]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    return fast(model, decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), *steps]))


def words(*pieces: str) -> models.WordPiece:
    return models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0])


UNIGRAM = [("<unk>", 0.0), *((piece, -1.0) for piece in ("▁", "▁a", "b▁c", "日", "🙂", "\ufffd", "▁▁"))]
KINDS = {
    "byte level": byte_level,
    "byte fallback, as Llama": lambda: byte_fallback(decoders.Fuse(), decoders.Strip(" ", 1, 0)),
    "byte fallback, as Gemma": lambda: byte_fallback(decoders.Fuse()),
    "unigram": lambda: fast(models.Unigram(UNIGRAM, 0, False), decoders.Metaspace()),
    "pieces of words": lambda: fast(words("[U]", "do", "##n", "'", "##t", ".", ",", "n't"), decoders.WordPiece()),
    "ends of words": lambda: fast(words("<u>", "a</w>", "b", "c</w>", "</w>"), decoders.BPEDecoder()),
    "no decoder": lambda: fast(words("<u>", "a", "b"), None),
    "stripped": lambda: fast(
        words("<u>", " ", "a ", " b", "  "), decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)])
    ),
    "rewrites across tokens": lambda: fast(
        words("<u>", " n", "'t", "a", " "),
        decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex(" n't| a"), "x")]),
    ),
}


class Slow:
    """Not of the tokenizers library: bytes, of which 0 is a special token, stripped at both ends."""

    all_special_ids = (0,)

    def __len__(self) -> int:
        return 256

    def __call__(self, text):
        return {"input_ids": list(text.encode())}

    def get_vocab(self):
        return {chr(i): i for i in range(256)}

    def decode(self, ids, skip_special_tokens=False, **_):
        shown = bytes(i for i in ids if i or not skip_special_tokens)
        return shown.decode("utf-8", errors="replace").strip(" ")


@pytest.fixture(scope="module", params=[*KINDS, "slow"])
def tokenizer(request) -> Any:
    return Slow() if request.param == "slow" else KINDS[request.param]()


def rows(tokenizer: Any, rng: random.Random, count: int) -> list[list[int]]:
    """Any ids, and those of any text."""
    found = []
    for i in range(count):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 25))]
        if i % 2:
            characters = [chr(rng.choice([rng.randrange(32, 127), rng.randrange(0xA0, 0xD800)])) for _ in range(12)]
            ids = tokenizer("".join(characters) + rng.choice(LINES))["input_ids"] or ids
        if i % 3 == 0:
            ids = [id_ for id_ in ids for _ in range(rng.choice([1, 1, 1, 6]))]
        found.append(ids)
    return found


def splits(rng: random.Random, ids: list[int]) -> list[list[int]]:
    ends = sorted({*rng.sample(range(len(ids) + 1), rng.randrange(len(ids))), len(ids)})
    return [ids[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def handed_out(row: RowText, events: list[list[int]]) -> tuple[list[str], int]:
    """The text of each event, and how many tokens were handed out, as a stream does it."""
    texts = []
    for i, tokens in enumerate(events):
        row.feed(tokens, i + 1 == len(events))
        texts.append("".join(row.release()[1]))
        if row.cut is not None:
            break
    return texts, row.tokens


@pytest.mark.parametrize("skip", [True, False], ids=["without special tokens", "with them"])
def test_events_of_any_size_join_to_the_text(tokenizer, skip):
    rng, detokenize = random.Random(0), Detokenizer(tokenizer, skip)
    for ids in rows(tokenizer, rng, 300):
        whole = detokenize(ids)
        texts, count = handed_out(RowText(detokenize), splits(rng, ids))
        assert "".join(texts) == whole
        assert count == len(ids)
        shares = detokenize.shares(ids)
        assert (len(shares), "".join(shares)) == (len(ids), whole)


def test_a_stop_string_ends_the_text_where_it_does_whatever_the_events(tokenizer):
    rng, detokenize = random.Random(1), Detokenizer(tokenizer)
    found = 0
    for ids in rows(tokenizer, rng, 200):
        whole, shares = detokenize(ids), detokenize.shares(ids)
        at = rng.randrange(len(whole) + 1)
        stop = whole[at : at + rng.randrange(1, 6)] or "never"
        texts, count = handed_out(RowText(detokenize, (stop, "never there")), splits(rng, ids))
        start = whole.find(stop)
        if start < 0:
            assert ("".join(texts), count) == (whole, len(ids))
            continue
        found += 1
        assert "".join(texts) == whole[:start]
        assert stop in "".join(shares[:count])
        assert stop not in "".join(shares[: count - 1])
    assert found > 20


def test_text_that_may_begin_a_stop_string_waits(tokenizer):
    detokenize = Detokenizer(Slow())
    row = RowText(detokenize, ("abc",))
    row.feed(list(b"xxab"), False)
    assert (row.tokens, row.release()) == (4, (0, ["x", "x", ""]))
    row.feed(list(b"d"), False)
    assert row.release() == (2, ["a", "b", "d"])
    row.feed(list(b"ab"), True)
    assert row.release() == (5, ["a", "b"])


class Counting:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self.tokens = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, ids, **options):
        self.tokens += len(ids)
        return self._tokenizer.decode(ids, **options)


@pytest.mark.parametrize("stops", [(), ("never there",)], ids=["", "stop string"])
@pytest.mark.parametrize("what", ["any", "one byte", "a special token", "an incomplete character"])
def test_work_is_linear_in_the_tokens(tokenizer, what, stops):
    detokenize = Detokenizer(tokenizer)
    count, rng = 2_000, random.Random(2)
    ids = [rng.randrange(len(tokenizer)) for _ in range(count)]
    if what != "any":
        unit = {"one byte": [200 % len(tokenizer)], "a special token": [tokenizer.all_special_ids[0]]}
        ids = (unit.get(what) or tokenizer("🙂")["input_ids"][:1] or [1]) * count
    counted = Counting(tokenizer)
    row = RowText(Detokenizer(counted), stops)
    texts, _ = handed_out(row, [ids[i : i + 4] for i in range(0, count, 4)])
    assert "".join(texts) == detokenize(ids)
    # Where a decoder rewrites across tokens: by some hundred readings of the whole.
    assert counted.tokens <= (20 if detokenize.is_local else 100) * count


def test_work_is_linear_for_every_token_of_a_row_of_one(tokenizer):
    """Also of tokens that have no text alone: a space of which a decoder strips the first, a piece without a letter."""
    detokenize = Detokenizer(tokenizer)
    if not detokenize.is_local:
        pytest.skip("waits for the end of the row")
    count = 400
    for token in range(len(tokenizer)):
        for ids in ([token] * count, [1, *[token] * count], [token, 1] * (count // 2)):
            counted = Counting(tokenizer)
            texts, _ = handed_out(RowText(Detokenizer(counted)), [ids])
            assert "".join(texts) == detokenize(ids)
            assert counted.tokens <= 30 * count, (token, ids[:3])


def test_a_split_character_belongs_to_the_token_that_completes_it():
    detokenize = Detokenizer(Slow())
    assert detokenize.shares("é🙂".encode()) == ["", "é", "", "", "", "🙂"]
    llama = KINDS["byte fallback, as Llama"]()
    ids: Any = llama.convert_tokens_to_ids(["a", "<0xC3>", "<0xA9>", "<0x0A>", "a"])
    assert Detokenizer(llama).shares(ids) == ["a", "", "é", "\n", "a"]
    assert pieces_of(["a", "", "é", "\n", ""], ["bonus", "bonus", "accepted", "accepted", "bonus"]) == [
        Piece("a", "bonus"),
        Piece("é\n", "accepted"),
    ]


# --- through the decoder ---------------------------------------------------------------------------------------------

TEXT = "yes “quoted” 日本 🙂 no<|end|>"


def scripted(ids: list[int]) -> Any:
    def processor(logits, context):
        at = jnp.minimum(context.lengths - context.prompt_lengths, len(ids) - 1)
        wanted = jnp.asarray(ids, jnp.int32)[at][:, None]
        return jnp.where(jnp.arange(logits.shape[1], dtype=jnp.int32)[None] == wanted, 0.0, -jnp.inf)

    return processor


def spoken(tokenizer: Any) -> tuple[ToyModel, dict[str, Any]]:
    """A target that says `TEXT`, and the arguments with which it does."""
    ids = tokenizer(TEXT)["input_ids"]
    model = prefix_model(0, vocab_size=len(tokenizer), eos_ids=(tokenizer.eos_token_id,))
    target = ToyModel(model.spec, model.params, model.eos_ids, tokenizer)
    return target, {"max_new_tokens": len(ids), "logits_processor": scripted(ids)}


@pytest.fixture(scope="module")
def said():
    target, options = spoken(byte_level())
    return Decoder(target), options


def test_a_stream_joins_to_the_text_of_generate(said):
    decoder, options = said
    result = decoder.generate([[1]], **options)
    assert result.text == [TEXT.removesuffix("<|end|>")]
    for size in (1, 3):
        events = list(decoder.stream([1], steps_per_event=size, **options))
        assert "".join(event.text for event in events) == result.text[0]
        assert [token for event in events for token in event.tokens] == result.tokens[0]
        assert all("".join(piece.text for piece in event.pieces) == event.text for event in events)
    assert "".join(piece.text for piece in result.pieces()) == result.text[0]


def test_special_tokens_are_text_where_asked_for_and_stop_strings_see_them_there(said):
    decoder, options = said
    assert decoder.generate([[1]], skip_special_tokens=False, **options).text == [TEXT]
    shown = decoder.stream([1], skip_special_tokens=False, **options)
    assert "".join(event.text for event in shown) == TEXT
    assert decoder.generate([[1]], stop_strings="end", **options).text == [TEXT.removesuffix("<|end|>")]
    kept = decoder.generate([[1]], stop_strings="end", skip_special_tokens=False, **options)
    assert kept.text == [TEXT.removesuffix("end|>")]


@pytest.mark.parametrize("stop", ["<|end|>", "no<|end|>", " 🙂 no<|end|>", ["never", "<|end|>"]])
def test_a_stop_string_with_a_special_token_is_found_though_it_is_not_in_the_text(said, stop):
    decoder, options = said
    written = TEXT * 2
    ids = decoder.target.tokenizer(written)["input_ids"]
    options = {**options, "max_new_tokens": len(ids), "logits_processor": scripted(ids), "ignore_eos": True}
    result = decoder.generate([[1]], stop_strings=stop, **options)
    (text,) = (s for s in ([stop] if isinstance(stop, str) else stop) if "<|end|>" in s)
    assert result.text == [TEXT[: TEXT.index(text)]]
    assert result.tokens == [ids[: len(ids) // 2]]
    assert result.finish_reasons == ["stop_string"]
    events = list(decoder.stream([1], stop_strings=stop, **options))
    assert "".join(event.text for event in events) == result.text[0]
    assert [token for event in events for token in event.tokens] == result.tokens[0]


def test_a_result_pins_no_decoder(said):
    _, options = said
    target, _ = spoken(byte_level())
    decoder = Decoder(target)
    result, weak = decoder.generate([[1]], **options), weakref.ref(decoder)
    del decoder
    gc.collect()
    assert weak() is None
    assert result.pieces()
