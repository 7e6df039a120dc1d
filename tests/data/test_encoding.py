"""How a text opens and closes: once, as its tokenizer opens texts, wherever it is tokenized."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from specjax.data import encoding
from specjax.data.corpus import BadRecordPolicy, Document, Part
from specjax.data.prompts import cut_prompts
from specjax.data.rows import pack
from specjax.decode.request import _encode
from specjax.training.sources.continuations import prompts_of_file

WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "c": 5}
BOS, EOS, A, B, C = 1, 2, 3, 4, 5


def adding(pattern: str, bos: str = "<s>") -> Any:
    """A tokenizer of words whose post-processor makes ``pattern`` of a text ``$A``."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(token, WORDS[token]) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=special)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token="</s>", unk_token="<unk>"
    )


# By pattern: what stands before a text. The third has one token for both ends, as GPT-2's has.
PATTERNS = {"$A": [], "<s> $A": [BOS], "<s> $A </s>": [BOS], "</s> $A": [EOS], "</s> $A </s>": [EOS], "$A </s>": []}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_prompt_is_opened_once_and_never_closed_wherever_it_is_tokenized(pattern, tmp_path):
    tokenizer, before = adding(pattern), PATTERNS[pattern]
    brought = tokenizer.decode(before)
    texts = {"a b": [*before, A, B], f"{brought}a b": [*before, A, B], "": before}
    for text, ids in texts.items():
        assert encoding.encode(tokenizer, text) == ids

    class Target:
        config = type("Config", (), {"vocab_size": 6})()

    Target.tokenizer = tokenizer
    assert _encode(Target, f"{brought}a b", 0, []) == [*before, A, B]
    for name, line in (("p.txt", f"{brought}a b"), ("p.jsonl", json.dumps({"prompt": "a b"}))):
        (tmp_path / name).write_text(line)
        assert prompts_of_file(str(tmp_path / name), tokenizer, 9, BadRecordPolicy())[0] == [*before, A, B]
    for text in ("a b c", f"{brought}a b c"):
        own = Document("0", text, parts=(Part(text[:-2], True), Part("c", False)))
        (prompt,) = cut_prompts([own], tokenizer, 9, 1)
        assert prompt.tokens == [*before, A, B]
    (prompt,) = cut_prompts([Document("0", "a b c")], tokenizer, 2, 1, places=[0])
    assert prompt.tokens == [*before, A, B][:2]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("closes", ["", "</s>"])
def test_a_document_is_opened_and_closed_once_also_where_its_text_does_so(pattern, closes):
    tokenizer, before = adding(pattern), PATTERNS[pattern]
    for brought in ("", tokenizer.decode(before)):
        text = f"{brought}a b c{closes}"
        rows = pack(tokenizer, [Document("0", text)], EOS, 2)
        assert rows.stream.tolist() == [*before, A, B, C, EOS]
        assert rows.opening == tuple(before)
        parts = (Part(f"{brought}a", True), Part(f"b c{closes}", False))
        rows = pack(tokenizer, [Document("0", text, parts=parts)], EOS, 2)
        assert rows.stream.tolist() == [*before, A, B, C, EOS]
        assert rows.prompt is not None
        assert rows.prompt.tolist() == [*[True] * len(before), True, False, False, False]


def test_a_tokenizer_that_opens_with_its_unknown_token_is_told_from_the_text():
    tokenizer = adding("<s> $A", bos="<unk>")
    tokenizer.backend_tokenizer.model = models.WordLevel({"<s>": 1, "</s>": 2, "b": 3}, unk_token="<s>")
    assert encoding.added(tokenizer) == ([1], [])
