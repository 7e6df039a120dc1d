from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.errors import TrainingError
from specjax.runtime import checkpoint
from specjax.runtime.checkpoint import Checkpoints
from tests import processes
from tests.training.toys import assert_same

ROOT = Path(__file__).parents[2]


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


def save(checkpoints, step, state):
    """The last save of a run."""
    with checkpoints:
        checkpoints.save(step, state)


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


@pytest.mark.parametrize("damage", [flip_a_bit, cut_short, remove_a_file, truncate_the_manifest])
def test_a_damaged_newest_step_is_named_and_the_one_before_restored(damage, saved, caplog):
    damage(saved / "10")
    with caplog.at_level(logging.WARNING, logger=checkpoint.__name__):
        restored = restore(saved)
    assert restored.step == 5
    assert_same(restored.state, state(5))
    assert str(saved / "10") in caplog.text


def test_a_step_without_its_manifest_is_not_restored(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (5, 10):
            checkpoints.save(step, state(step))
    remove_the_manifest(tmp_path / "10")
    assert restore(tmp_path).step == 5


def contents(directory):
    return {file.relative_to(directory): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def misname_a_key(directory):
    """Which orbax reads of every step before anything else."""
    file = directory / "_CHECKPOINT_METADATA"
    file.write_text(file.read_text().replace("item_handlers", "item_hAndlers"))


DAMAGES = [misname_a_key, flip_a_bit, cut_short, remove_a_file, truncate_the_manifest, remove_the_manifest]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_set_aside_as_it_is_and_never_deleted(damage, saved, caplog):
    damage(saved / "10")
    before = contents(saved / "10")
    assert restore(saved).step == 5
    assert contents(saved / "10.damaged") == before
    assert f"{saved / '10'}: checkpoint skipped and set aside as 10.damaged: " in caplog.text
    assert not (saved / "10").exists()


def test_every_damaged_step_is_kept_though_one_of_its_name_was_set_aside_before(tmp_path):
    for _ in range(3):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.restore_latest(state(0))
            checkpoints.save(10, state(10))
            checkpoints.wait()
            found = checkpoints.set_aside
        flip_a_bit(tmp_path / "10")
    assert found == ["10.damaged", "10.damaged-2"]


def test_a_step_whose_manifest_was_never_written_is_half_written_and_makes_room(saved, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_seal", lambda self, step: self._manager.wait_until_finished())
        save(Checkpoints(saved), 15, state(15))
    assert (saved / "15").exists()
    assert restore(saved).step == 10
    assert f"{saved / '15'}: checkpoint skipped and removed: half-written" in caplog.text
    assert sorted(d.name for d in saved.iterdir() if d.is_dir()) == ["10"]


def test_the_newest_step_that_was_whole_is_known_though_all_are_gone(saved):
    for step in ("5", "10"):
        flip_a_bit(saved / step)
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.restore_latest(state(0)) is None
        assert (checkpoints.saved, checkpoints.set_aside) == (10, ["10.damaged", "5.damaged"])


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


def test_a_save_goes_on_while_the_next_step_reuses_its_buffers(tmp_path):
    state = {"weights": jnp.arange(2.0**20)}
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: -x, state), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        for _ in range(5):
            state = jax.block_until_ready(overwrite(state))
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore_latest(state)
    np.testing.assert_array_equal(restored.state["weights"], np.arange(2.0**20, dtype=np.float32))


def test_a_step_counts_as_whole_from_its_manifest_on(tmp_path, monkeypatch):
    may_write, real = threading.Event(), checkpoint.write_json
    monkeypatch.setattr(checkpoint, "write_json", lambda *args: (may_write.wait(2), real(*args)))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(1))
        assert checkpoints.latest is None
        may_write.set()
        checkpoints.wait()
        assert checkpoints.latest == 1


def test_what_is_not_logged_yet_comes_back_too(tmp_path):
    pending = [{"loss": float(np.float32(0.1)), "sound": True}, {"loss": float("nan"), "sound": False}]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(1), pending)
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore_latest(state(0))
    np.testing.assert_equal(restored.pending, pending)


def test_a_spread_state_comes_back_spread(tmp_path):
    mesh = jax.make_mesh((4,), ("fsdp",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    weights = jax.device_put(jnp.arange(8.0), spread)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"weights": weights})
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore_latest({"weights": jax.device_put(jnp.zeros(8), spread)})
    assert restored.state["weights"].sharding == spread
    np.testing.assert_array_equal(restored.state["weights"], np.arange(8.0))


def test_a_state_of_another_shape_is_refused_in_one_line(saved):
    with Checkpoints(saved) as checkpoints, pytest.raises(TrainingError, match="no state of this stage") as error:
        checkpoints.restore_latest({"other": jnp.zeros(3)})
    assert "\n" not in str(error.value)


def fill(directory):
    with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(1024)):
            pass


@pytest.fixture
def small_disk(tmp_path):
    """A file system of half a megabyte."""
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(tmp_path)]
    if processes.run(command).returncode:
        pytest.skip("needs the right to mount a file system")
    yield tmp_path
    assert processes.run(["umount", "-l", str(tmp_path)]).returncode == 0


def test_a_full_disk_is_one_clear_error_and_the_step_before_stays_whole(small_disk, caplog):
    weights = {"weights": jax.random.normal(jax.random.key(0), (128, 128))}
    checkpoints = Checkpoints(small_disk / "checkpoints")
    checkpoints.save(1, weights)
    checkpoints.wait()
    fill(small_disk)
    with pytest.raises(TrainingError, match=r"step 2 cannot be written.*that of step 1 is whole.*make room") as error:
        save(checkpoints, 2, weights)
    assert "No space left on device" in str(error.value)
    assert "\n" not in str(error.value)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    (small_disk / "filler").unlink()
    with Checkpoints(small_disk / "checkpoints") as checkpoints:
        restored = checkpoints.restore_latest(weights)
        assert restored.step == 1
        assert_same(restored.state, weights)
        checkpoints.save(2, weights)
        checkpoints.wait()
        assert checkpoints.latest == 2


SAVE_OF_MANY_ARRAYS = """
import sys
from pathlib import Path
import jax
from specjax.cli import user_errors
from specjax.runtime.checkpoint import Checkpoints
state = {str(i): jax.random.normal(jax.random.key(i), (64, 64)) for i in range(60)}
with user_errors(), Checkpoints(Path(sys.argv[1]) / "checkpoints") as checkpoints:
    checkpoints.save(1, state)
"""


def test_a_full_disk_says_one_line_and_nothing_else(small_disk):
    command = [sys.executable, "-c", SAVE_OF_MANY_ARRAYS, str(small_disk)]
    done = processes.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "step 1 cannot be written" in line


def test_a_disk_that_is_full_when_the_manifest_is_due_leaves_a_half_written_step(saved, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_json", full)
        with pytest.raises(TrainingError, match="step 15 cannot be written"):
            save(Checkpoints(saved), 15, state(15))
    assert restore(saved).step == 10
