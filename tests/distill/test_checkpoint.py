from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.distill import checkpoint
from specjax.distill.checkpoint import Checkpoints
from tests.distill.toys import assert_same


def state(value: float):
    params = {"layers": {0: {"kernel": jnp.full((3, 4), value)}, 1: {"kernel": jnp.full((3, 4), -value)}}}
    return {"params": params, "opt": optax.adam(1e-3).init(params)}


@pytest.fixture
def saved(tmp_path):
    """A directory that holds steps 5 and 10."""
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 5, 10):
            checkpoints.save(step, state(step))
    return tmp_path


def restore(directory):
    with Checkpoints(directory) as checkpoints:
        return checkpoints.restore_latest(state(0))


def test_the_newest_state_comes_back_bit_for_bit_and_only_two_are_kept(saved):
    restored = restore(saved)
    assert restored.step == 10
    assert_same(restored.state, state(10))
    assert jax.tree.structure(restored.state) == jax.tree.structure(state(0))
    assert sorted(int(d.name) for d in saved.iterdir() if d.is_dir()) == [5, 10]


def test_an_empty_directory_restores_nothing(tmp_path):
    assert restore(tmp_path) is None


def weights_file(step_directory):
    return max((f for f in step_directory.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def flip_a_bit(directory):
    file = weights_file(directory)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_short(directory):
    file = weights_file(directory)
    file.write_bytes(file.read_bytes()[:-1])


def remove_a_file(directory):
    weights_file(directory).unlink()


def remove_the_manifest(directory):
    (directory / checkpoint.MANIFEST).unlink()


def truncate_the_manifest(directory):
    (directory / checkpoint.MANIFEST).write_text('{"')


@pytest.mark.parametrize("damage", [flip_a_bit, cut_short, remove_a_file, remove_the_manifest, truncate_the_manifest])
def test_a_damaged_newest_step_is_named_and_the_one_before_restored(damage, saved, caplog):
    damage(saved / "10")
    with caplog.at_level(logging.WARNING, logger=checkpoint.__name__):
        restored = restore(saved)
    assert restored.step == 5
    assert_same(restored.state, state(5))
    assert str(saved / "10") in caplog.text


def test_a_damaged_step_can_be_saved_again(saved):
    flip_a_bit(saved / "10")
    with Checkpoints(saved) as checkpoints:
        checkpoints.restore_latest(state(0))
        checkpoints.save(10, state(11))
    restored = restore(saved)
    assert restored.step == 10
    np.testing.assert_array_equal(restored.state["params"]["layers"][0]["kernel"], 11)


def test_nothing_is_restored_if_every_step_is_damaged(saved):
    for step in ("5", "10"):
        flip_a_bit(saved / step)
    assert restore(saved) is None
