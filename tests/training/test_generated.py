"""The target's own text as training data: the same bits however often it was interrupted, and never mixed up."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax import registry
from specjax.data import shards
from specjax.data.readers import BadRecordPolicy
from specjax.data.rows import ConcatenatedRows
from specjax.decode.decoder import Decoder
from specjax.decode.request import derive_seeds
from specjax.drafters.draft_model import DraftModel
from specjax.errors import ConfigError, DataError, TrainingError
from specjax.models.config import LayerKind
from specjax.models.rotary import Rope
from specjax.models.transformer import Model
from specjax.runtime import artifact
from specjax.training.sources import generated
from specjax.training.sources.continuations import Prompts, Sampled, prompts_of_file, prompts_of_text
from specjax.training.sources.generated import Generated, make
from specjax.training.sources.on_policy import Mixed, OnPolicy
from specjax.training.sources.text import DraftHandle, SourceContext
from tests.training.toys import Interrupt

SETTINGS = Generated(sequences=7, shard_size=3, prompt_tokens=3, new_tokens=5, batch_size=2, k=2)
PROMPTS = Prompts(np.arange(5, 35, dtype=np.int32), np.array([[0, 3], [3, 6], [10, 13], [20, 22], [24, 28]]))
SEED = 11


@pytest.fixture(scope="module")
def models(tiny_target, tiny_draft):
    def drafter(params, k):
        return DraftModel(dataclasses.replace(tiny_draft, params=params), k)

    return dataclasses.replace(tiny_target, eos_ids=(3,)), DraftHandle(tiny_draft.params, drafter)


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    """(directory, sequences) made without an interruption."""
    directory = tmp_path_factory.mktemp("generated") / "data"
    return directory, made(directory, models)


def made(directory, models, settings: Any = SETTINGS, prompts: Any = PROMPTS, seed: int = SEED, progress: Any = None):
    target, draft = models
    return make(directory, settings, target, draft, prompts, seed, progress)


def contents(directory) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != ".lock"}


def copied(directory, to):
    to.mkdir()
    for name, content in contents(directory).items():
        (to / name).write_bytes(content)
    return to


def test_without_proposals_the_draft_is_not_asked(models, tmp_path):
    for name, (target, draft), k in (("alone", (models[0], None), 2), ("k0", models, 0)):
        made(tmp_path / name, (target, draft), dataclasses.replace(SETTINGS, sequences=2, k=k))
    assert contents(tmp_path / "k0") == contents(tmp_path / "alone")
    assert json.loads((tmp_path / "k0" / "provenance.json").read_text())["block_efficiency"] == 1


def test_every_sequence_is_what_the_target_says_after_its_prompt_from_its_own_seed(whole, models):
    sequences = whole[1]
    assert len(sequences) == 7
    pieces = np.split(sequences.tokens, sequences.ends[:-1])
    seeds = [seed for shard, n in zip(derive_seeds(SEED, 3), (3, 3, 1), strict=True) for seed in derive_seeds(shard, n)]
    numbered = PROMPTS.shuffled(SEED)
    assert [piece[:n].tolist() for piece, n in zip(pieces, sequences.prompts, strict=True)] == [
        numbered(i) for i in range(7)
    ]
    assert {tuple(numbered(i)) for i in range(5)} == {tuple(PROMPTS[i]) for i in range(5)}
    # In other company than it was made in.
    decoder = Decoder(models[0], drafter=models[1].drafter(models[1].params, 2), verifier="block")
    pair = [6, 1]
    chosen = [numbered(i) for i in pair]
    again = decoder.generate(chosen, max_new_tokens=5, temperature=1.0, seed=[seeds[i] for i in pair])
    assert again.tokens == [pieces[i][sequences.prompts[i] :].tolist() for i in pair]


def test_an_interrupted_directory_is_finished_to_the_same_bits_without_making_a_shard_twice(whole, models, tmp_path):
    def interrupt(done, record):
        if done == 6:
            raise Interrupt

    with pytest.raises(Interrupt):
        made(tmp_path / "data", models, progress=interrupt)
    kept = {name: (tmp_path / "data" / name).stat().st_mtime_ns for name in contents(tmp_path / "data")}
    assert sorted(name for name in kept if name.endswith(shards.SUFFIX)) == [
        f"shard-0000{i}.safetensors" for i in (0, 1)
    ]
    made(tmp_path / "data", models)
    assert contents(tmp_path / "data") == contents(whole[0])
    assert all((tmp_path / "data" / name).stat().st_mtime_ns == time for name, time in kept.items())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "changed since it was written"),
        (lambda file: file.unlink(), "missing, though it has a record"),
        (lambda file: file.with_suffix(".json").write_text("{"), "its record is damaged"),
        (lambda file: file.with_suffix(".json").unlink(), None),
    ],
)
def test_a_damaged_shard_is_named_and_made_again(damage, message, whole, models, tmp_path, caplog):
    directory = copied(whole[0], tmp_path / "data")
    damage(directory / "shard-00002.safetensors")
    with caplog.at_level(logging.WARNING):
        made(directory, models)
    assert contents(directory) == contents(whole[0])
    assert [f"shard-00002.safetensors: {message}" in text for text in caplog.messages] == ([True] if message else [])


def test_a_directory_of_another_provenance_is_refused_with_the_fields_that_differ(whole, models, tiny_draft):
    other = dataclasses.replace(SETTINGS, temperature=0.5, new_tokens=6)
    with pytest.raises(TrainingError, match=r"sampling\.new_tokens \(5 then, 6 now\), sampling\.temperature"):
        made(whole[0], models, other)
    with pytest.raises(TrainingError, match=r"other settings: seed \(11 then, 12 now\)"):
        made(whole[0], models, seed=12)
    with pytest.raises(TrainingError, match=r"changed since it was made: the target's weights"):
        made(whole[0], (tiny_draft, None))
    rotated = dataclasses.replace(models[0].config, layers=(LayerKind(rope=Rope(theta=500.0)),))
    with pytest.raises(TrainingError, match="changed since it was made: the target's config"):
        made(whole[0], (dataclasses.replace(models[0], spec=Model(rotated)), None))
    with pytest.raises(TrainingError, match="changed since it was made: the prompts"):
        made(whole[0], models, prompts=Prompts(PROMPTS.tokens, PROMPTS.spans[1:]))


def test_what_was_made_with_one_draft_is_read_with_another(whole, models):
    again = make(whole[0], dataclasses.replace(SETTINGS, k=3, batch_size=4), models[0], None, PROMPTS, SEED)
    np.testing.assert_array_equal(again.tokens, whole[1].tokens)


def test_the_provenance_says_who_made_the_data_and_how_fast(whole):
    made = json.loads((whole[0] / "provenance.json").read_text())
    emitted = len(whole[1].tokens) - whole[1].prompts.sum()
    assert made["emitted"] == emitted == sum(shard["emitted"] for shard in made["shards"])
    assert made["block_efficiency"] == emitted / made["blocks"] >= 1
    assert [shard["sequences"] for shard in made["shards"]] == [3, 3, 1]
    assert {shard["verifier"] for shard in made["shards"]} == {"block"}
    assert len({shard["sha256"] for shard in made["shards"]}) == 3
    assert made["sampling"]["temperature"] == 1.0


def test_a_target_that_lies_on_several_processes_takes_what_one_process_made(models, tmp_path, monkeypatch):
    monkeypatch.setattr(generated.fingerprint, "digest", lambda tree: "the same")
    spread = dataclasses.replace(models[0], params={"embedding": types.SimpleNamespace(is_fully_addressable=False)})
    with pytest.raises(ConfigError, match="the target lies on several; make it first with `specjax generate-data`"):
        make(tmp_path / "data", SETTINGS, spread, models[1], PROMPTS, SEED)
    whole = make(tmp_path / "data", SETTINGS, models[0], models[1], PROMPTS, SEED)
    found = make(tmp_path / "data", SETTINGS, spread, models[1], PROMPTS, SEED)
    np.testing.assert_array_equal(found.tokens, whole.tokens)


def test_a_verifier_that_changes_the_targets_distribution_is_refused(models, tmp_path):
    lossy = dataclasses.replace(SETTINGS, verifier="typical")
    with pytest.raises(ConfigError, match=r"data\.verifier: 'typical' changes the target's distribution"):
        made(tmp_path / "data", models, lossy)
    assert not (tmp_path / "data").exists()


def test_a_full_disk_leaves_nothing_half_written(whole, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact.os, "fsync", full)
    with pytest.raises(TrainingError, match=r"cannot be written \(no space left on device\)"):
        artifact.write(tmp_path / "shard-00000.safetensors", shards.to_bytes(whole[1]), {})
    assert list(tmp_path.iterdir()) == []


def text_rows(length: int = 10, prompt: np.ndarray | None = None) -> ConcatenatedRows:
    """Documents of 5, 1 and 35 tokens."""
    return ConcatenatedRows(np.arange(41, dtype=np.int32), np.array([0, 5, 6]), length, prompt)


def test_rows_of_generated_text_predict_what_the_target_said(whole, models, tmp_path):
    settings = dataclasses.replace(SETTINGS, path=str(whole[0]))
    target, draft = models
    context = SourceContext("stage", tmp_path / "data", text_rows(), target, draft, 0.0, SEED)
    judged = dataclasses.replace(context, needs_labels=False)
    # Of another text: the directory is not of these prompts.
    with pytest.raises(TrainingError, match="changed since it was made: the prompts"):
        settings.rows(context)
    own = dataclasses.replace(SETTINGS, sequences=2, shard_size=2)
    rows = own.rows(context)
    predicted = np.concatenate([rows[i].labels[rows[i].weight > 0] for i in range(len(rows))])
    sequences = made(tmp_path / "data", models, own, prompts_of_text(text_rows(), own))
    pieces = np.split(sequences.tokens, sequences.ends[:-1])
    assert predicted.tolist() == [t for piece, n in zip(pieces, sequences.prompts, strict=True) for t in piece[n:]]
    rows = own.rows(judged)
    predicted = np.concatenate([rows[i].labels[rows[i].weight > 0] for i in range(len(rows))])
    assert predicted.tolist() == [t for piece in pieces for t in piece[1:]]
    with pytest.raises(ConfigError, match=r"stage: prompt_tokens=3 and new_tokens=8 exceed data\.seq_len=10"):
        dataclasses.replace(SETTINGS, new_tokens=8).rows(context)


@pytest.mark.parametrize(
    ("loss", "given", "expected"),
    [
        ("forward_kl", None, 1.0),
        ({"kind": "adaspec", "reference": "there"}, None, 1.0),
        ({"kind": "sum", "of": ["forward_kl", "lk_alpha"]}, None, 1.0),
        ("cross_entropy", None, 0.25),
        ({"kind": "sum", "of": ["forward_kl", {"kind": "cross_entropy", "weight": 0.1}]}, None, 0.25),
        ("forward_kl", 0.5, 0.5),
        ("cross_entropy", 0.5, 0.5),
    ],
)
def test_a_prompt_counts_where_the_target_judges_it_and_no_text_is_taken_for_right(loss, given, expected):
    """0.25 is what the run says of prompts in its text."""
    needs = registry.build(registry.LOSSES, loss, "loss").needs_labels
    context = SourceContext("stage", Path("unused"), text_rows(), None, None, 0.25, SEED, needs_labels=needs)
    rows = OnPolicy(prompt_tokens=3, new_tokens=5, prompt_weight=given).rows(context)
    assert isinstance(rows, Mixed)
    assert rows.prompt_weight == Generated(prompt_weight=given).weight_of_prompts(context) == expected


def test_prompts_of_text_begin_documents_and_stay_inside_them():
    prompts = prompts_of_text(text_rows(), Sampled(prompt_tokens=4, new_tokens=5))
    assert [prompts[i] for i in range(len(prompts))] == [
        [0, 1, 2, 3],
        [6, 7, 8, 9],
        [16, 17, 18, 19],
        [26, 27, 28, 29],
        # The last token closes the document.
        [36, 37, 38, 39],
    ]


def test_prompts_from_inside_a_document_open_as_a_text_does():
    opened = dataclasses.replace(text_rows(), opening=(99,))
    prompts = prompts_of_text(opened, Sampled(prompt_tokens=4, new_tokens=5))
    assert [prompts[i][:2] for i in range(len(prompts))] == [[0, 1], [6, 7], [99, 17], [99, 27], [99, 37]]
    assert prompts.digest != prompts_of_text(text_rows(), Sampled(prompt_tokens=4, new_tokens=5)).digest


def test_a_prompt_of_the_documents_own_is_taken_whole_or_not_at_all():
    mask = np.zeros(41, bool)
    mask[0:3] = mask[6:20] = True
    prompts = prompts_of_text(text_rows(prompt=mask), Sampled(prompt_tokens=2, new_tokens=5))
    assert [prompts[i] for i in range(len(prompts))] == [[0, 1, 2]]
    with pytest.raises(DataError, match="no prompt of the training text leaves room for new_tokens=8"):
        prompts_of_text(text_rows(prompt=mask), Sampled(prompt_tokens=2, new_tokens=8))


def test_prompts_come_from_a_file(tmp_path, tiny_tokenizer):
    file = tmp_path / "prompts.jsonl"
    texts = ["def add", "return first", "print"]
    records = [{"prompt": texts[0]}, {"text": texts[1]}, {"id": 3}, {"prompt": "x" * 100}, {"prompt": texts[2]}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    bad = BadRecordPolicy("skip")
    prompts = prompts_of_file(str(file), tiny_tokenizer, 20, bad)
    assert [tiny_tokenizer.decode(prompts[i]) for i in range(len(prompts))] == texts
    assert bad.counts == {"unusable prompts": 1, "prompts that do not fit": 1}
    with pytest.raises(DataError, match=r"prompts\.jsonl, line 3: no string under the key 'prompt'"):
        prompts_of_file(str(file), tiny_tokenizer, 20, BadRecordPolicy())
    file.write_text('{"messages": [{"role": "user"}]}\n')
    with pytest.raises(DataError, match=r"line 1: message 1: no string under the key 'content'"):
        prompts_of_file(str(file), tiny_tokenizer, 20, BadRecordPolicy())
    lines = tmp_path / "prompts.txt"
    lines.write_text("def add\n\nprint\n")
    assert len(prompts_of_file(str(lines), tiny_tokenizer, 20, BadRecordPolicy())) == 2
    with pytest.raises(DataError, match="is no file"):
        prompts_of_file(str(tmp_path / "none.jsonl"), tiny_tokenizer, 20, BadRecordPolicy())


def test_the_name_of_a_prompts_file_says_what_it_holds(tmp_path, tiny_tokenizer):
    """A list of records is no text with a prompt a line, and what is neither is not guessed."""
    records, found = [{"prompt": "one"}, {"text": "two"}], []
    for name, text in (
        ("a.json", json.dumps(records)),
        ("b.JSONL", "\n".join(map(json.dumps, records))),
        ("c.txt", "\ufeffone\ntwo\n"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        prompts = prompts_of_file(str(tmp_path / name), tiny_tokenizer, 99, BadRecordPolicy())
        found.append([prompts[i] for i in range(len(prompts))])
    assert found[0] == found[1] == found[2]
    for name in ("prompts.csv", "prompts", "prompts.parquet"):
        (tmp_path / name).write_text("one\ntwo\n")
        with pytest.raises(DataError, match=f"{name}.*give a"):
            prompts_of_file(str(tmp_path / name), tiny_tokenizer, 99, BadRecordPolicy())


def test_a_chat_of_a_prompts_file_may_give_its_tools_as_json(tmp_path, tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.name }}{% endfor %}{{ messages[0].content }}"
    file = tmp_path / "prompts.jsonl"
    asked = {"messages": [{"role": "user", "content": "def"}]}
    for tools in ([{"name": "add"}], '[{"name": "add"}]', "[]", None):
        file.write_text(json.dumps({**asked, "tools": tools}) + "\n")
        text = tokenizer.decode(prompts_of_file(str(file), tokenizer, 20, BadRecordPolicy())[0])
        assert text == ("def" if tools in ("[]", None) else "adddef")
