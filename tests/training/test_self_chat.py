"""Chats in which the target writes both sides: where its template is cut, what is dropped, and shards that are the same
however they were written."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from specjax.config import load_config
from specjax.config.self_chat import SelfChat
from specjax.data import corpus
from specjax.data import self_chat as text
from specjax.data.self_chat import NearDuplicates, Turns, fault_of, plan_of, share_repeated
from specjax.decode.decoder import Decoder
from specjax.errors import ConfigError, DataError, SpecjaxError, TrainingError
from specjax.jobs import inputs
from specjax.runtime import artifact
from specjax.testing.toys import prefix_model
from specjax.training.sources import self_chat
from specjax.training.sources.self_chat import ChatFiles
from tests.training.toys import Interrupt

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
SETTINGS = SelfChat(
    chats=24,
    openings=("def ",),
    question_tokens=24,
    answer_tokens=32,
    another_turn=0.8,
    turns=2,
    shard_size=8,
    rows=3,
    answer_temperatures=(0.0, 1.0),
    repeated=0.9,
)
LONGEST, SEED = 250, 7


def with_template(tokenizer, template=TEMPLATE):
    made = copy.deepcopy(tokenizer)
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def target(tiny_tokenizer):
    """A toy whose next token depends on all before it, and that often ends its turn."""
    tokenizer = with_template(tiny_tokenizer)
    made = prefix_model(0, vocab_size=len(tokenizer), eos_ids=(tokenizer.eos_token_id,))
    bias = made.params["bias"].at[tokenizer.eos_token_id].add(5.5)
    return dataclasses.replace(made, params={**made.params, "bias": bias}, tokenizer=tokenizer)


def files_in(directory, target, settings=SETTINGS, seed=SEED) -> ChatFiles:
    return ChatFiles(directory / "chats", settings, target, LONGEST, seed)


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory):
    """A data set that was written without an interruption."""
    files = files_in(tmp_path_factory.mktemp("whole"), target)
    assert self_chat.write(files) == []
    return files


def contents(files: ChatFiles) -> list[bytes]:
    return [files.file(shard).read_bytes() for shard in range(files.count)]


def records(files: ChatFiles) -> list[dict[str, Any]]:
    return [json.loads(line) for content in contents(files) for line in content.splitlines()]


# The template.


def test_a_template_is_cut_before_the_users_words_and_behind_them(tiny_tokenizer):
    tokenizer = with_template(tiny_tokenizer)
    turns = Turns.of(tokenizer)
    assert turns.ends == (tokenizer.eos_token_id,)
    decoded = tokenizer.decode(turns.before_question([]))
    assert decoded == f"{tokenizer.bos_token}[user]", "the space belongs to the first word"
    assert tokenizer.decode(turns.before_question([], "def f")) == f"{tokenizer.bos_token}[user] def f"
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    end, begin = tokenizer.eos_token, tokenizer.bos_token
    assert tokenizer.decode(turns.before_question(said)) == f"{begin}[user] a{end}\n[assistant] b{end}\n[user]"
    assert tokenizer.decode(turns.before_answer(said[:1])) == f"{begin}[user] a{end}\n[assistant] "


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (
            "{% for m in messages %}{% if m.role != 'user' %}{{ m.content }}{% endif %}{% endfor %}",
            "does not write what",
        ),
        ("{{ raise_exception('not today') }}", r"fails \(not today\)"),
        (None, "has no chat template"),
    ],
)
def test_a_template_without_a_users_turn_is_one_line(tiny_tokenizer, template, told):
    with pytest.raises(DataError, match=told) as refused:
        Turns.of(with_template(tiny_tokenizer, template))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("behind", "ends", "closing"),
    [("{{ eos_token }}\n", True, "<|endoftext|>"), ("\n", False, "[assistant]"), (" END\n", False, "END")],
)
def test_a_question_ends_with_a_special_token_or_where_the_template_goes_on(tiny_tokenizer, behind, ends, closing):
    turns = Turns.of(with_template(tiny_tokenizer, TEMPLATE.replace("{{ eos_token }}\n", behind)))
    assert (turns.ends, turns.closing) == ((tiny_tokenizer.eos_token_id,) if ends else (), closing)


def test_every_token_that_is_marked_as_special_counts(tiny_tokenizer):
    """Those without a name too, as the marks of turns in most chat models."""
    tokenizer = with_template(tiny_tokenizer, TEMPLATE.replace("{{ eos_token }}", "<|turn|>"))
    tokenizer.add_tokens([AddedToken("<|turn|>", special=True)])
    turn = tokenizer.convert_tokens_to_ids("<|turn|>")
    tokenizer._special_tokens_map.pop("additional_special_tokens", None)
    assert turn in text.special_ids(tokenizer)
    assert tokenizer.eos_token_id in text.special_ids(tokenizer)
    assert Turns.of(tokenizer).ends == (turn,)


def test_a_system_message_begins_every_chat(tiny_tokenizer):
    tokenizer = with_template(tiny_tokenizer)
    turns = Turns.of(tokenizer, "Be brief.")
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    assert tokenizer.decode(turns.before_question([])) == f"{begin}[system] Be brief.{end}\n[user]"
    asked = tokenizer.decode(turns.before_answer([{"role": "user", "content": "a"}]))
    assert asked == f"{begin}[system] Be brief.{end}\n[user] a{end}\n[assistant] "
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    with pytest.raises(DataError, match=r"fails \(no system\); leave data.self_chat.system out"):
        Turns.of(with_template(tiny_tokenizer, refusing), "Be brief.")


# The choices, and the filters.


def test_the_choices_of_a_chat_follow_from_seed_and_number():
    settings = SelfChat(opened=0.25, another_turn=0.5, turns=3, answer_temperatures=(0.0, 1.0))
    plans = [plan_of(settings, number, 1) for number in range(2_000)]
    assert plans == [plan_of(settings, number, 1) for number in range(2_000)]
    assert plans[0].seeds != plan_of(settings, 0, 2).seeds
    assert np.mean([bool(plan.opening) for plan in plans]) == pytest.approx(0.25, abs=0.03)
    assert np.mean([plan.temperature for plan in plans]) == pytest.approx(0.5, abs=0.04)
    turns = [plan.turns for plan in plans]
    assert [turns.count(n) / len(turns) for n in (1, 2, 3)] == pytest.approx([0.5, 0.25, 0.25], abs=0.04)
    seeds = [seed for plan in plans for seed in plan.seeds]
    assert len(set(seeds)) == len(seeds) == 2 * sum(turns)


def test_a_message_is_dropped_for_what_it_is():
    settings = SelfChat(repeated=0.5)
    tokens = [*range(100, 140)]
    assert fault_of(" \n", [5], (), settings) == text.EMPTY
    assert fault_of("x", [*tokens, 1], (0, 1), settings) == text.MARKED
    assert fault_of("x", tokens, (0, 1), settings) is None
    assert fault_of("x", tokens[:10] * 4, (), settings) == text.REPEATED
    assert fault_of("x", [*tokens, *tokens[:20]], (), settings) is None
    assert share_repeated([7] * 5) > 0.5
    assert share_repeated([]) == 0


def test_a_chat_close_to_an_earlier_one_is_a_near_duplicate():
    random = np.random.default_rng(0)
    one, other = random.integers(0, 500, (2, 400)).tolist()
    seen = NearDuplicates(0.5)
    assert not seen.has(one)
    assert not seen.has(other)
    assert seen.has([*one[:300], *random.integers(0, 500, 100).tolist()])
    assert not seen.has([*one[:100], *random.integers(0, 500, 300).tolist()])
    assert seen.has(one)


@pytest.mark.parametrize("length", [1, 3, 8, 9])
def test_short_chats_that_say_the_same_are_near_duplicates(length):
    seen = NearDuplicates(0.5)
    assert not seen.has([*range(length)])
    assert seen.has([*range(length)])
    assert not seen.has([*range(100, 100 + length)])


# Writing.


@dataclasses.dataclass
class Says:
    """A tokenizer's words as what a target says: `generate_each` of a decoder without a model."""

    tokenizer: Any
    said: Sequence[tuple[str, str]]
    """(text, finish reason) of each message in turn."""
    asked: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def generate_each(self, requests, rows, most_tokens):
        for number, request in enumerate(requests):
            if request is None:
                return
            self.asked.append(request)
            words, reason = self.said[number]
            tokens = self.tokenizer(words, add_special_tokens=False)["input_ids"]
            tokens = tokens if reason == "length" else [*tokens, self.tokenizer.eos_token_id]
            yield number, SimpleNamespace(tokens=[tokens], finish_reasons=[reason], has_failed=None)


def heard(target, directory, monkeypatch, said, **changes) -> tuple[list[dict[str, Any]], Says]:
    """(records of chats in which the target says so, what it was asked)."""
    says = Says(target.tokenizer, said)
    monkeypatch.setattr(self_chat, "Decoder", lambda target: says)
    monkeypatch.setattr(self_chat, "check_finite", lambda *_: None)
    own = {"chats": 1, "shard_size": 1, "turns": 1, "openings": (), "rows": 1, **changes}
    longest = own.pop("longest", LONGEST)
    files = ChatFiles(directory / "chats", dataclasses.replace(SETTINGS, **own), target, longest, SEED)
    self_chat.write(files)
    return records(files), says


def test_a_question_ends_where_the_template_goes_on_however_the_text_ends(target, tmp_path, monkeypatch):
    """A template without a token behind the user's words: the target may go on with an answer and end it."""
    template = TEMPLATE.replace(
        "{{ eos_token }}\n", "{% if m.role == 'user' %} [/ask]\n{% else %}{{ eos_token }}{% endif %}"
    )
    own = dataclasses.replace(target, tokenizer=with_template(target.tokenizer, template))
    assert (Turns.of(own.tokenizer).ends, Turns.of(own.tokenizer).closing) == ((), "[/ask]")
    expected = [{"role": "user", "content": "Who asks?"}, {"role": "assistant", "content": "Me."}]
    for number, reason in enumerate(("stop", "length")):
        said = [("Who asks? [/ask]\n[assistant] It is me", reason), ("Me.", "stop")]
        found, _ = heard(own, tmp_path / str(number), monkeypatch, said)
        assert found == [{"messages": expected, "number": 0}]


def test_a_system_message_stands_in_every_record(target, tmp_path, monkeypatch):
    found, says = heard(target, tmp_path, monkeypatch, [("Who?", "stop"), ("Me.", "stop")], system="Be brief.")
    roles = [message["role"] for message in found[0]["messages"]]
    assert roles == ["system", "user", "assistant"]
    for request in says.asked:
        assert "[system] Be brief." in target.tokenizer.decode(request["prompt"])


def test_a_question_that_leaves_no_room_for_an_answer_is_cut(target, tmp_path, monkeypatch):
    """Text may have more tokens than the target wrote, and the template goes on behind it."""
    question, behind = " ".join(map(str, range(30))), " behind" * 20
    own = with_template(target.tokenizer, TEMPLATE.replace("{% if add", behind + "{% if add"))
    own = dataclasses.replace(target, tokenizer=own)
    prompt = len(Turns.of(own.tokenizer).before_answer([{"role": "user", "content": question.strip()}]))
    said = [(question, "stop"), ("Me.", "stop")]
    found, says = heard(own, tmp_path / "room", monkeypatch, said, longest=prompt + 1)
    assert len(found) == 1
    assert says.asked[1]["max_new_tokens"] == 1
    monkeypatch.setattr(self_chat, "_LEAST_KEPT", 0.0)
    found, says = heard(own, tmp_path / "none", monkeypatch, said, longest=prompt)
    assert (found, len(says.asked)) == ([], 1)
    facts = json.loads((tmp_path / "none" / "chats" / "chats-00000.json").read_text())
    assert facts["dropped"] == {text.CUT: 1}


def test_a_message_is_what_the_target_says_after_the_chat_so_far(target, whole):
    """Asked alone, with the seed of its place, the target says the same."""
    turns, decoder, tokenizer = Turns.of(target.tokenizer), Decoder(target), target.tokenizer
    found = records(whole)
    assert {len(record["messages"]) for record in found} == {2, 4}
    for record in found:
        plan, messages = plan_of(SETTINGS, record["number"], SEED), record["messages"]
        for place, message in enumerate(messages):
            asks, so_far = place % 2 == 0, messages[:place]
            opening = plan.opening if place == 0 else ""
            prompt = turns.before_question(so_far, opening) if asks else turns.before_answer(so_far)
            result = decoder.generate(
                [prompt],
                max_new_tokens=24 if asks else 32,
                seed=[plan.seeds[place]],
                temperature=SETTINGS.question_temperature if asks else plan.temperature,
            )
            cut = result.finish_reasons == ["length"]
            said = tokenizer.decode(result.tokens[0] if cut else result.tokens[0][:-1])
            assert message == {
                "role": "user" if asks else "assistant",
                "content": (opening + said).strip() if asks else said,
            }
            assert cut == (place == len(messages) - 1 and record.get("cut", False))


def test_what_was_dropped_is_told(whole):
    self_chat.read(whole)
    facts = json.loads((whole.directory / "provenance.json").read_text())
    assert facts["chats"] == 24
    assert facts["kept"] + sum(facts["dropped"].values()) == 24
    assert text.CUT in facts["dropped"]
    assert facts["kept"] == len(records(whole)) - facts["dropped"].get(text.SIMILAR, 0)
    assert text.summary(facts).startswith(f"{facts['kept']} of 24 chats kept (")


def test_rows_shares_and_interruptions_change_no_chat(target, whole, tmp_path):
    settings = dataclasses.replace(SETTINGS, rows=2)
    shared = files_in(tmp_path / "shared", target, settings)
    assert self_chat.write(shared, (1, 2)) == [0, 2]
    with pytest.raises(DataError, match=r"chats-00000.jsonl: missing; write it first"):
        self_chat.read(shared)
    assert self_chat.write(shared, (0, 2)) == []
    assert contents(shared) == contents(whole)

    def interrupt(count, figures):
        assert figures["tokens_per_s"] > 0
        if count == 15:
            raise Interrupt

    killed = files_in(tmp_path / "killed", target, dataclasses.replace(SETTINGS, rows=None))
    with pytest.raises(Interrupt):
        self_chat.write(killed, progress=interrupt)
    left = killed.missing(range(3))
    assert left
    kept = killed.file(next(iter({0, 1, 2} - {*left}))) if len(left) < 3 else None
    stamp = kept and kept.stat().st_mtime_ns
    counts: list[int] = []
    self_chat.write(killed, progress=lambda count, figures: counts.append(count))
    assert counts == [*range(24 - 8 * len(left) + 1, 25)], "of those that were there too"
    assert contents(killed) == contents(whole)
    assert kept is None or kept.stat().st_mtime_ns == stamp


def test_a_data_set_grows_and_refuses_what_is_of_other_settings(target, whole, tmp_path):
    grown = files_in(tmp_path, target, dataclasses.replace(SETTINGS, chats=32, similar=0.9))
    shutil.copytree(whole.directory, grown.directory)
    assert self_chat.write(grown) == []
    assert contents(grown)[:3] == contents(whole)
    self_chat.read(grown)
    told = (grown.directory / "provenance.json").read_text()
    assert len(self_chat.read(files_in(tmp_path, target))[0]) < len(self_chat.read(grown)[0])
    assert (grown.directory / "provenance.json").read_text() == told, "of all shards, not of those that a run takes"
    other = files_in(tmp_path, target, dataclasses.replace(SETTINGS, answer_tokens=17))
    with pytest.raises(TrainingError, match=r"self_chat\.answer_tokens \(32 then, 17 now\)"):
        self_chat.write(other)
    foreign = files_in(tmp_path / "foreign", target, seed=SEED + 1)
    self_chat.write(foreign, (0, 3))
    for file in (grown.file(1), grown.file(1).with_suffix(".json")):
        shutil.copy(file, foreign.directory / file.name)
    with pytest.raises(TrainingError, match=r"chats-00001.jsonl: was made with other settings"):
        self_chat.write(foreign)


def test_chats_that_are_there_are_read_while_another_process_adds_to_them(target, whole, tmp_path):
    files = files_in(tmp_path, target)
    shutil.copytree(whole.directory, files.directory)
    with artifact.exclusive(files.directory / ".share-0-of-1"):
        assert self_chat.write(files) == []
        more = files_in(tmp_path, target, dataclasses.replace(SETTINGS, chats=32))
        with pytest.raises(SpecjaxError, match="in use by another run"):
            self_chat.write(more)


def test_a_target_that_only_repeats_itself_is_refused(target, tmp_path):
    word = target.tokenizer("a")["input_ids"][-1]
    again = target.params["bias"].at[word].add(100.0)
    again = dataclasses.replace(target, params={**target.params, "bias": again})
    files = files_in(tmp_path, again)
    self_chat.write(files)
    with pytest.raises(
        DataError, match=r"chats: 0 of 24 chats kept \(24 repeated dropped\).* but repeat itself or break"
    ):
        self_chat.read(files)
    many = dataclasses.replace(SETTINGS, chats=400, shard_size=64, rows=16)
    files = files_in(tmp_path / "many", again, many)
    with pytest.raises(DataError, match=r"0 of 64 chats kept \(64 repeated dropped\)"):
        self_chat.write(files)


def test_a_target_that_writes_one_chat_again_and_again_is_refused(target, whole, tmp_path):
    files = files_in(tmp_path, target)
    shutil.copytree(whole.directory, files.directory)
    line = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "%s"}]}\n'
    said = " ".join(map(str, range(99))).encode()
    for shard in range(3):
        facts = whole.record(shard)
        content = b"".join(line % (said + b" %d" % (10 * shard + i)) for i in range(8))
        artifact.write(files.file(shard), content, {**facts, "kept": 8, "dropped": {}})
    with pytest.raises(DataError, match=r"1 of 24 chats kept \(23 near-duplicates dropped\)"):
        self_chat.read(files)


def test_too_little_room_is_told_before_anything_is_written(target, tmp_path, monkeypatch):
    full = shutil.disk_usage(tmp_path)._replace(free=1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(DataError, match=r"chats: 0\.0 MB are wanted .* 0\.0 MB are free on its disk; free some"):
        self_chat.write(files_in(tmp_path, target))
    monkeypatch.undo()
    short = ChatFiles(tmp_path / "short", SETTINGS, target, 24, SEED)
    with pytest.raises(DataError, match=r"data\.seq_len: a chat of 24 tokens has no room .*; set it to \d+ or more"):
        self_chat.write(short)


# Reading.


def test_nothing_is_predicted_behind_an_answer_that_breaks_off(tiny_tokenizer):
    tokenizer = with_template(tiny_tokenizer)
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b c "})
    document = corpus.Document("x", json.dumps(messages), messages=messages)
    end = tokenizer.eos_token
    (whole,), (cut,) = (
        corpus.rendered([made], tokenizer, ends=[end]) for made in (document, dataclasses.replace(document, cut=True))
    )
    assert whole.text == f"{tokenizer.bos_token}[user] a{end}\n[assistant] b c {end}\n"
    assert cut.text == f"{tokenizer.bos_token}[user] a{end}\n[assistant] b c"
    assert [part.is_prompt for part in cut.parts] == [True, False]


def test_documents_of_ones_own_make_the_share_that_is_asked_for(capsys):
    chats = [corpus.Document(str(i), "x" * 100 + str(i)) for i in range(10)]
    own = [corpus.Document(f"own{i}", f"{i:03} " * 25) for i in range(40)]
    found = inputs._mixed(chats, own, 0.25)
    assert len(found) == 4
    assert {document.name for document in found} < {document.name for document in own}
    assert "4 of 40 documents: 28% of the text, 25% asked for" in capsys.readouterr().err
    assert len(inputs._mixed(chats, own[:2], 0.5)) == 2
    assert "2 of 2 documents, which are all: 17% of the text, 50% asked for" in capsys.readouterr().err
    assert inputs._mixed(chats, [], 0.5) == []


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("data: {seq_len: 64}", "no path: give a file"),
        ("data: {kind: self_chat}\ntarget: {architecture: {}, steps: 1}", "target from scratch, which has learned no"),
        ("data: {kind: self_chat, self_chat: {answer_temperatures: []}}", "answer_temperatures"),
        ("data: {kind: self_chat, self_chat: {opened: 2}}", "opened"),
    ],
)
def test_a_config_that_cannot_be_is_one_line(tmp_path: Path, section, told):
    file = tmp_path / "run.yaml"
    file.write_text(section + ("" if "target" in section else "\ntarget: {path: somewhere}") + "\n")
    with pytest.raises(ConfigError, match=told):
        load_config(file)


def test_a_share_is_a_part_of_a_number_of_parts():
    from specjax.cli.commands import _share

    assert (_share(None), _share("1/1"), _share("2/8")) == ((0, 1), (0, 1), (1, 8))
    for wrong in ("0/8", "9/8", "2", "a/b", "1/0"):
        with pytest.raises(SpecjaxError, match=r"give the part and the number of parts"):
            _share(wrong)
