"""Chats as rows and as prompts: the tokens of the chat template on the whole, of which the answers are predicted."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from specjax.data import chat_template as chat
from specjax.data import corpus
from specjax.data.corpus import BadRecordPolicy
from specjax.data.prompts import cut_prompts
from specjax.data.rows import encode_parts, pack
from specjax.training.sources.continuations import Sampled, prompts_of_file, prompts_of_text

CHAT = [
    {"role": "user", "content": "add one and two"},
    {"role": "assistant", "content": "one and two add to three"},
    {"role": "user", "content": "and one more"},
    {"role": "assistant", "content": "four"},
]
TEMPLATES = {
    # Llama 2, Mistral: the answer begins behind a space, and ends with the text's own end.
    "inst": "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
    # TinyLlama, Phi 3: a line for each role, and a line end behind the end of each turn.
    "lines": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
}


def of_kind(kind: str, template: str) -> Any:
    """A tokenizer as sentencepiece has them, which puts a space before a text: by its normalizer, or its words; or one
    of bytes, which does not."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    texts = [m["content"] for m in CHAT] + ["<|user|>\n<|assistant|>\n[INST] [/INST]"]
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = template
    return fast


def chats_of(directory, tokenizer, *records) -> list[corpus.Document]:
    file = directory / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": record}) for record in records))
    return corpus.rendered(corpus.read_documents(str(file)), tokenizer, ends=["</s>"])


@pytest.mark.parametrize("kind", ["words", "normalizer", "bytes"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_rows_are_the_tokens_of_the_template_on_the_whole(kind, template, tmp_path):
    tokenizer = of_kind(kind, TEMPLATES[template])
    (document,) = chats_of(tmp_path, tokenizer, CHAT)
    whole = chat.render(tokenizer, CHAT, tokenize=True, asks=False)
    rows = pack(tokenizer, [document], tokenizer.eos_token_id, 4)
    assert rows.stream.tolist() == whole
    assert rows.prompt is not None
    predicted = tokenizer.convert_ids_to_tokens(rows.stream[~rows.prompt].tolist())
    text = "".join(predicted).replace("\u2581", " ").replace("\u0120", " ")
    assert text.replace(" ", "") == "oneandtwoaddtothree</s>four</s>"
    assert tokenizer.eos_token_id in rows.stream[~rows.prompt]


@pytest.mark.parametrize("kind", ["words", "normalizer", "bytes"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_held_out_prompt_is_what_decoding_a_chat_begins_with(kind, template, tmp_path):
    tokenizer = of_kind(kind, TEMPLATES[template])
    documents = chats_of(tmp_path, tokenizer, CHAT)
    found = {tuple(prompt.tokens) for prompt in cut_prompts(documents, tokenizer, 200, 4)}
    assert found == {tuple(chat.render(tokenizer, CHAT[:end], tokenize=True)) for end in (1, 3)}


def test_what_stands_behind_the_end_of_a_turn_is_not_predicted(tmp_path):
    """Decoding ends there: a line end that is always right would only flatter."""
    tokenizer = of_kind("bytes", TEMPLATES["lines"])
    (document,) = chats_of(tmp_path, tokenizer, CHAT)
    assert [part.text for part in document.parts if not part.is_prompt] == ["one and two add to three</s>", "four</s>"]
    assert document.parts[-1] == corpus.Part("\n", True)
    assert "".join(part.text for part in document.parts) == document.text


def test_a_tokenizer_that_does_not_say_where_its_tokens_lie_gives_the_same_parts(tmp_path):
    tokenizer = of_kind("words", TEMPLATES["inst"])
    (document,) = chats_of(tmp_path, tokenizer, CHAT)

    class Slow:
        is_fast = False

        def __call__(self, texts, add_special_tokens, return_offsets_mapping=False):
            assert not return_offsets_mapping
            return tokenizer(texts, add_special_tokens=add_special_tokens)

    slow, fast = (next(encode_parts(which, [document])) for which in (Slow(), tokenizer))
    assert len(slow) == len(fast)
    for a, b in zip(slow, fast, strict=True):
        np.testing.assert_array_equal(a, b)


# R1 and its distills: the thought is opened for the answer to come, and cut off an answer that is there.
THINKING = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>{{ m.content }}</s>{% else %}"
    "<|assistant|>{{ m.content.split('</think>')[-1] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


@pytest.mark.parametrize("kind", ["words", "normalizer", "bytes"])
@pytest.mark.parametrize("answer", ["four", "<think>two and two</think>four", "<th"])
def test_a_template_that_opens_a_thought_only_for_the_answer_to_come(kind, answer, tmp_path):
    tokenizer = of_kind(kind, THINKING)
    messages = [*CHAT[:3], {**CHAT[3], "content": answer}]
    (document,) = chats_of(tmp_path, tokenizer, messages)
    rows = pack(tokenizer, [document], tokenizer.eos_token_id, 4)
    assert rows.stream.tolist() == chat.render(tokenizer, messages, tokenize=True, asks=False)
    answers = [part.text for part in document.parts if not part.is_prompt]
    assert answers == ["one and two add to three</s>", f"{answer.split('</think>')[-1]}</s>"]
    asked = [chat.render(tokenizer, messages[:end], tokenize=True) for end in (1, 3)]
    assert asked[0] != rows.stream[: len(asked[0])].tolist()
    assert sorted(p.tokens for p in cut_prompts([document], tokenizer, 200, 4)) == sorted(asked)
    # What target-generated and on-policy data continue is what decoding begins with, too.
    long = pack(tokenizer, [document], tokenizer.eos_token_id, len(rows.stream) - 1)
    prompts = prompts_of_text(long, Sampled(new_tokens=2))
    assert [prompts[i] for i in range(len(prompts))] == [asked[0]]


def test_a_template_that_changes_what_precedes_an_answer_is_refused(tmp_path):
    counting = "{{ messages | length }}{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    with pytest.raises(ValueError, match="what precedes message 2 changes when the message is there"):
        chats_of(tmp_path, of_kind("bytes", counting), CHAT)


@pytest.mark.parametrize("template", [*TEMPLATES, "thinking"])
@pytest.mark.parametrize("form", ["messages", "conversations", "instruction", "prompt"])
def test_a_whole_chat_as_a_prompt_asks_for_its_last_answer_again(template, form, tmp_path):
    tokenizer = of_kind("bytes", {**TEMPLATES, "thinking": THINKING}[template])
    said = [message["content"] for message in CHAT]
    records = {
        "messages": {"messages": CHAT},
        "conversations": {"conversations": [{"from": m["role"], "value": m["content"]} for m in CHAT]},
        "instruction": {"instruction": said[2], "output": said[3], "history": [said[:2]]},
        "prompt": {"prompt": CHAT[:3], "completion": CHAT[3:]},
    }
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(records[form]))
    prompts = prompts_of_file(str(file), tokenizer, 400, BadRecordPolicy())
    assert prompts[0] == chat.render(tokenizer, CHAT[:3], tokenize=True)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": CHAT[1:2]}, "no message of the role 'user', so there is nothing to answer"),
        ({"messages": CHAT, "prompt": "one"}, "both 'messages' and 'prompt', which may be different prompts"),
        ({"prompt": "one", "text": "two"}, "both 'prompt' and 'text'"),
        (
            {"prompt": "one", "system": "be brief"},
            "'system' changes what a prompt means, and is not read beside 'prompt'",
        ),
        ({"messages": CHAT, "images": ["a.png"]}, "'images' changes what a prompt means"),
        ({"messages": CHAT, "tools": [{"name": "add"}]}, "it does not write 'tools'"),
    ],
)
def test_a_prompt_that_may_mean_several_things_is_refused(record, message, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message):
        prompts_of_file(str(file), of_kind("bytes", TEMPLATES["lines"]), 400, BadRecordPolicy())
