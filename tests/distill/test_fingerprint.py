from __future__ import annotations

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.distill import fingerprint
from specjax.errors import TrainingError

MADE_FROM = {"stage": {"steps": 12, "loss": "forward_kl", "ema": None}, "seed": 3, "rows": "ab" * 32}


@pytest.fixture
def claimed(tmp_path):
    fingerprint.claim(tmp_path / "stage", MADE_FROM)
    return tmp_path / "stage"


def test_a_record_with_any_byte_flipped_is_known_and_mended(claimed, caplog):
    file = claimed / fingerprint.FILE
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        fingerprint.claim(claimed, MADE_FROM)
        assert file.read_bytes() == whole or json.loads(file.read_bytes()) == json.loads(whole)
    assert "fingerprint.json: damaged; it is of these settings" in caplog.text


def test_a_damaged_record_of_other_settings_is_refused_as_damaged_and_left_as_it_is(claimed):
    file = claimed / fingerprint.FILE
    file.write_bytes(file.read_bytes().replace(b'"seed": 3', b'"seed": 5'))
    damaged = file.read_bytes()
    with pytest.raises(TrainingError, match=r"damaged, and not known .* put it back from a copy.*move .* elsewhere"):
        fingerprint.claim(claimed, {**MADE_FROM, "seed": 4})
    assert file.read_bytes() == damaged


def test_a_record_of_an_earlier_version_is_taken_and_given_a_digest(claimed, caplog):
    file = claimed / fingerprint.FILE
    old = {"stage": {"steps": 12, "loss": "forward_kl"}, "seed": 3, "rows": "ab" * 32}
    file.write_text(json.dumps(old))
    fingerprint.claim(claimed, MADE_FROM)
    assert not caplog.messages
    file.write_bytes(file.read_bytes().replace(b'"seed": 3', b'"seed": 5'))
    with caplog.at_level(logging.WARNING):
        fingerprint.claim(claimed, MADE_FROM)
    assert "damaged" in caplog.text


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
