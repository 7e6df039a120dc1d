from __future__ import annotations

import os
import sys

import pytest

from specjax.errors import TrainingError
from specjax.runtime import lock
from tests import processes

HOLD = """
import sys, time
from specjax.runtime import lock
with lock.exclusive(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_run_is_refused_with_the_directory_and_the_holder(tmp_path):
    with lock.exclusive(tmp_path / "run"), pytest.raises(TrainingError) as error, lock.exclusive(tmp_path / "run"):
        pass
    assert str(tmp_path / "run") in str(error.value)
    assert str(os.getpid()) in str(error.value)


def test_a_refused_run_leaves_the_holders_id_in_place(tmp_path):
    with lock.exclusive(tmp_path):
        for _ in range(2):
            with pytest.raises(TrainingError, match=f"process {os.getpid()}"), lock.exclusive(tmp_path):
                pass


def test_the_lock_is_free_after_the_run_even_if_it_failed(tmp_path):
    with pytest.raises(KeyboardInterrupt), lock.exclusive(tmp_path):
        raise KeyboardInterrupt
    with lock.exclusive(tmp_path):
        pass


def test_a_kill_frees_the_lock(tmp_path):
    with processes.started([sys.executable, "-c", HOLD, str(tmp_path)]) as group:
        [holder] = group.processes
        group.wait_until(lambda: holder.ended or holder.so_far.stdout == "held\n")
        assert not holder.ended, holder.so_far.output
        with pytest.raises(TrainingError, match=f"process {holder.pid}"), lock.exclusive(tmp_path):
            pass
        holder.kill()
    with lock.exclusive(tmp_path):
        pass


def test_a_run_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(TrainingError, match="give another `out`"), lock.exclusive(tmp_path / "run"):
        pass
