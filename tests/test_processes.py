"""A process that hangs fails its test, with what it said, and is gone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import processes

HANG = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(f"child={child.pid}", flush=True)
time.sleep(600)
"""


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # Dead, but not yet collected by whoever took it over.
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_a_process_that_hangs_is_killed_with_its_children_and_its_output_told():
    with pytest.raises(TimeoutError, match=r"killed after 5 s; process 0: child=\d+") as error:
        processes.run([sys.executable, "-c", HANG], timeout=5.0)
    child = int(str(error.value).rpartition("child=")[2])
    processes.Group([], 30.0).wait_until(lambda: not runs(child))


def test_what_is_left_when_a_test_fails_is_killed():
    seen = []

    def failing() -> None:
        with processes.started([sys.executable, "-c", HANG]) as group:
            seen.extend(group.processes)
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert [process.ended for process in seen] == [True]


def test_output_and_return_code_are_those_of_the_process():
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    assert processes.run([sys.executable, "-c", code]) == processes.Finished(3, "out\n", "err\n")
