from __future__ import annotations

import json
import os
import sys

import pytest

from specjax.errors import TrainingError
from specjax.runtime import artifact, fingerprint
from tests import processes

MADE_FROM = {"stage": {"steps": 12, "loss": "forward_kl", "ema": None}, "seed": 3, "rows": "ab" * 32}
HOLD = """
import sys, time
from specjax.runtime import artifact
with artifact.exclusive(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def claimed(tmp_path):
    artifact.claim(tmp_path / "stage", MADE_FROM)
    return tmp_path / "stage"


@pytest.fixture
def records(claimed):
    first, second = sorted(claimed.iterdir(), reverse=True)
    assert first.name == artifact.FILE
    assert first.read_bytes() == second.read_bytes()
    return first, second


def test_a_record_with_any_byte_flipped_is_known_and_mended(claimed, records, caplog):
    whole = records[0].read_bytes()
    for record in records:
        for place in range(len(whole)):
            record.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            artifact.claim(claimed, MADE_FROM)
            assert [r.read_bytes() for r in records] == [whole, whole]
    assert "fingerprint.json: damaged or gone; written again" in caplog.text


@pytest.mark.parametrize("left", [None, b"", b"{", b'{"stage": {"steps": 12,'])
@pytest.mark.parametrize("which", [0, 1])
def test_a_record_that_is_cut_empty_or_gone_costs_nothing(claimed, records, which, left):
    whole = records[0].read_bytes()
    records[which].unlink() if left is None else records[which].write_bytes(left)
    assert artifact.made_from(claimed) == MADE_FROM
    with pytest.raises(TrainingError, match=r"seed \(3 then, 4 now\)"):
        artifact.claim(claimed, {**MADE_FROM, "seed": 4})
    artifact.claim(claimed, MADE_FROM)
    assert [r.read_bytes() for r in records] == [whole, whole]


def test_records_that_are_both_damaged_are_refused_and_left_as_they_are(claimed, records):
    for record in records:
        record.write_bytes(record.read_bytes().replace(b'"seed": 3', b'"seed": 5'))
    damaged = [r.read_bytes() for r in records]
    with pytest.raises(TrainingError, match=r"damaged, and not known .* put it back from a copy.*move .* elsewhere"):
        artifact.claim(claimed, MADE_FROM)
    assert [r.read_bytes() for r in records] == damaged


def test_a_record_of_an_earlier_version_is_taken_and_given_a_digest(claimed, records, caplog):
    first, second = records
    first.write_text(json.dumps({"stage": {"steps": 12, "loss": "forward_kl"}, "seed": 3, "rows": "ab" * 32}))
    second.unlink()
    artifact.claim(claimed, MADE_FROM)
    assert not caplog.messages
    assert json.loads(first.read_bytes())["sha256"]
    assert first.read_bytes() == second.read_bytes()


def test_a_record_that_knows_no_config_of_its_target_is_of_any_and_then_of_that(claimed):
    artifact.claim(claimed, {**MADE_FROM, "target_config": "ab"})
    with pytest.raises(TrainingError, match="changed since it was made: the target's config"):
        artifact.claim(claimed, {**MADE_FROM, "target_config": "cd"})


def test_a_field_changes_where_it_may_and_the_record_has_the_new_value(claimed):
    more = {**MADE_FROM, "stage": {**MADE_FROM["stage"], "steps": 20}}
    rise = {"stage.steps": lambda was, now: None if now > was else "it can only rise"}
    with pytest.raises(TrainingError, match=r"other settings: stage\.steps \(12 then, 20 now\); .*give another"):
        artifact.claim(claimed, more)
    artifact.claim(claimed, more, rise, keep=True)
    assert artifact.made_from(claimed) == MADE_FROM
    artifact.claim(claimed, more, rise)
    assert artifact.made_from(claimed) == more
    with pytest.raises(TrainingError, match=r"stage\.steps \(20 then, 12 now\); it can only rise; .*give another"):
        artifact.claim(claimed, MADE_FROM, rise)


def test_files_have_the_form_that_runs_begun_before_have_on_disk(tmp_path):
    """To the byte: such runs go on, and two versions name a shared directory alike."""
    inputs = {"seed": 3, "stage": {"loss": "forward_kl", "ema": None, "rate": 1e-3}, "of": ["\u00e9", [1, 2]]}
    claim = (
        '{\n "of": [\n  "\\u00e9",\n  [\n   1,\n   2\n  ]\n ],\n "seed": 3,\n "sha256": '
        '"9850715ed8aec3633da1c51ea3de127da123f155c48cd2b3d5d80c48d48d3fbc",\n "stage": {\n  "ema": null,\n  "loss": '
        '"forward_kl",\n  "rate": 0.001\n }\n}\n'
    )
    record = (
        '{\n "2": 1.5,\n "b": {\n  "c": [\n   true,\n   null\n  ]\n },\n "sha256": '
        '"d490fc0bf1ce4dc2371e972e40e150bc93a08a40ea9f08fb047e4d88766346ec"\n}\n'
    )
    beside = '{\n "rows": 3,\n "sha256": "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"\n}\n'
    artifact.claim(tmp_path / "stage", inputs)
    artifact.write_record(tmp_path / "record.json", {2: 1.5, "b": {"c": [True, None]}})
    artifact.write(tmp_path / "a.npy", b"content", {"rows": 3})
    written = {file.relative_to(tmp_path).as_posix(): file.read_text() for file in tmp_path.rglob("*.json")}
    both = {"stage/fingerprint.json": claim, "stage/.fingerprint.json": claim}
    assert written == {**both, "record.json": record, "a.json": beside}
    assert artifact.read_record(tmp_path / "record.json", "lost") == {"2": 1.5, "b": {"c": [True, None]}}
    assert fingerprint.of_json({"made_from": ["ab", 3]}).startswith("6e8a404171309d18")


def test_a_file_counts_while_it_is_what_its_record_says(tmp_path):
    file = tmp_path / "made" / "000000.npy"
    assert artifact.record_of(file) is None
    record = artifact.write(file, b"content", {"rows": 3})
    assert artifact.record_of(file) == record
    assert record["rows"] == 3
    file.write_bytes(b"Content")
    assert artifact.record_of(file) is None
    artifact.write(file, b"content", {"rows": 3})
    assert artifact.record_of(file) == record
    artifact.remove(file)
    assert list(file.parent.iterdir()) == []


def test_a_file_that_was_killed_before_its_record_does_not_count(tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(artifact, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        artifact.write(tmp_path / "a.npy", b"content", {})
    assert (tmp_path / "a.npy").read_bytes() == b"content"
    assert artifact.record_of(tmp_path / "a.npy") is None


def test_a_second_run_is_refused_with_the_directory_and_the_holder(tmp_path):
    with (
        artifact.exclusive(tmp_path / "run"),
        pytest.raises(TrainingError) as error,
        artifact.exclusive(tmp_path / "run"),
    ):
        pass
    assert str(tmp_path / "run") in str(error.value)
    assert str(os.getpid()) in str(error.value)


def test_a_refused_run_leaves_the_holders_id_in_place(tmp_path):
    with artifact.exclusive(tmp_path):
        for _ in range(2):
            with pytest.raises(TrainingError, match=f"process {os.getpid()}"), artifact.exclusive(tmp_path):
                pass


def test_the_lock_is_free_after_the_run_even_if_it_failed(tmp_path):
    with pytest.raises(KeyboardInterrupt), artifact.exclusive(tmp_path):
        raise KeyboardInterrupt
    with artifact.exclusive(tmp_path):
        pass


def test_a_kill_frees_the_lock(tmp_path):
    with processes.started([sys.executable, "-c", HOLD, str(tmp_path)]) as group:
        [holder] = group.processes
        group.wait_until(lambda: holder.ended or holder.so_far.stdout == "held\n")
        assert not holder.ended, holder.so_far.output
        with pytest.raises(TrainingError, match=f"process {holder.pid}"), artifact.exclusive(tmp_path):
            pass
        holder.kill()
    with artifact.exclusive(tmp_path):
        pass


def test_a_run_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(TrainingError, match="give another `out`"), artifact.exclusive(tmp_path / "run"):
        pass
