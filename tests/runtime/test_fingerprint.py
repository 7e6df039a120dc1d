from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import TrainingError
from specjax.runtime import fingerprint

MADE_FROM = {"stage": {"steps": 12, "loss": "forward_kl", "ema": None}, "seed": 3, "rows": "ab" * 32}


@pytest.fixture
def claimed(tmp_path):
    fingerprint.claim(tmp_path / "stage", MADE_FROM)
    return tmp_path / "stage"


@pytest.fixture
def records(claimed):
    first, second = sorted(claimed.iterdir(), reverse=True)
    assert first.name == fingerprint.FILE
    assert first.read_bytes() == second.read_bytes()
    return first, second


def test_a_record_with_any_byte_flipped_is_known_and_mended(claimed, records, caplog):
    whole = records[0].read_bytes()
    for record in records:
        for place in range(len(whole)):
            record.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            fingerprint.claim(claimed, MADE_FROM)
            assert [r.read_bytes() for r in records] == [whole, whole]
    assert "fingerprint.json: damaged or gone; written again" in caplog.text


@pytest.mark.parametrize("left", [None, b"", b"{", b'{"stage": {"steps": 12,'])
@pytest.mark.parametrize("which", [0, 1])
def test_a_record_that_is_cut_empty_or_gone_costs_nothing(claimed, records, which, left):
    whole = records[0].read_bytes()
    records[which].unlink() if left is None else records[which].write_bytes(left)
    assert fingerprint.made_from(claimed) == MADE_FROM
    with pytest.raises(TrainingError, match=r"seed \(3 then, 4 now\)"):
        fingerprint.claim(claimed, {**MADE_FROM, "seed": 4})
    fingerprint.claim(claimed, MADE_FROM)
    assert [r.read_bytes() for r in records] == [whole, whole]


def test_records_that_are_both_damaged_are_refused_and_left_as_they_are(claimed, records):
    for record in records:
        record.write_bytes(record.read_bytes().replace(b'"seed": 3', b'"seed": 5'))
    damaged = [r.read_bytes() for r in records]
    with pytest.raises(TrainingError, match=r"damaged, and not known .* put it back from a copy.*move .* elsewhere"):
        fingerprint.claim(claimed, MADE_FROM)
    assert [r.read_bytes() for r in records] == damaged


def test_a_record_of_an_earlier_version_is_taken_and_given_a_digest(claimed, records, caplog):
    first, second = records
    first.write_text(json.dumps({"stage": {"steps": 12, "loss": "forward_kl"}, "seed": 3, "rows": "ab" * 32}))
    second.unlink()
    fingerprint.claim(claimed, MADE_FROM)
    assert not caplog.messages
    assert json.loads(first.read_bytes())["sha256"]
    assert first.read_bytes() == second.read_bytes()


def test_a_record_that_knows_no_config_of_its_target_is_of_any_and_then_of_that(claimed):
    fingerprint.claim(claimed, {**MADE_FROM, "target_config": "ab"})
    with pytest.raises(TrainingError, match="changed since it was made: the target's config"):
        fingerprint.claim(claimed, {**MADE_FROM, "target_config": "cd"})


def test_a_field_changes_where_it_may_and_the_record_has_the_new_value(claimed):
    more = {**MADE_FROM, "stage": {**MADE_FROM["stage"], "steps": 20}}
    rise = {"stage.steps": lambda was, now: None if now > was else "it can only rise"}
    with pytest.raises(TrainingError, match=r"other settings: stage\.steps \(12 then, 20 now\); .*give another"):
        fingerprint.claim(claimed, more)
    fingerprint.claim(claimed, more, rise, keep=True)
    assert fingerprint.made_from(claimed) == MADE_FROM
    fingerprint.claim(claimed, more, rise)
    assert fingerprint.made_from(claimed) == more
    with pytest.raises(TrainingError, match=r"stage\.steps \(20 then, 12 now\); it can only rise; .*give another"):
        fingerprint.claim(claimed, MADE_FROM, rise)


def test_arrays_that_cannot_change_are_read_once_and_others_every_time(monkeypatch):
    read, real = [], fingerprint._digest
    monkeypatch.setattr(fingerprint, "_digest", lambda tree: (read.append(1), real(tree))[1])
    params = {"a": jnp.arange(3.0), "b": jnp.ones(2)}
    first = fingerprint.digest(params)
    assert fingerprint.digest(dict(params)) == first
    assert len(read) == 1
    assert fingerprint.digest({"a": params["b"], "b": params["a"]}) != first
    assert fingerprint.digest({"a": params["a"], "c": params["b"]}) != first
    assert fingerprint.digest(jax.tree.map(lambda x: x + 0, params)) == first
    changing = {"a": np.arange(3.0)}
    before = fingerprint.digest(changing)
    changing["a"][0] = 5
    assert fingerprint.digest(changing) != before
