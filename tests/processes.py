"""Processes that a test starts: none keeps it waiting for ever, and none outlives it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
TIMEOUT = 600.0
"""Seconds until what is still running is killed, and the test fails."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """A process that has ended; ``returncode`` is negative for one that a signal ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class Process:
    """A process in a session of its own, whose output goes to files: it never waits for a reader, and is killed with
    its children."""

    def __init__(self, command: Sequence[str], out: IO[bytes], err: IO[bytes], **options: Any):
        self._files = out, err
        self._command = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True, **options)

    @property
    def pid(self) -> int:
        return self._command.pid

    @property
    def ended(self) -> bool:
        return self._command.poll() is not None

    def terminate(self) -> None:
        self._command.terminate()

    def kill(self) -> None:
        """It and what it started; nothing if nothing is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._command.wait()

    @property
    def so_far(self) -> Finished:
        """What it has said; the return code of one that runs is that of a kill."""
        found = []
        for file in self._files:
            found.append(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace"))
        code = self._command.poll()
        return Finished(-signal.SIGKILL if code is None else code, *found)


class Group:
    """Processes that run side by side until a common time. Raises `TimeoutError` with what all of them said."""

    def __init__(self, processes: Sequence[Process], timeout: float):
        self.processes, self._timeout = processes, timeout
        self._end = time.monotonic() + timeout

    def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if time.monotonic() > self._end:
                for process in self.processes:
                    process.kill()
                said = "\n".join(f"process {i}: {p.so_far.output[-4000:]}" for i, p in enumerate(self.processes))
                raise TimeoutError(f"killed after {self._timeout:g} s; {said}")
            time.sleep(0.02)

    def finish(self) -> list[Finished]:
        self.wait_until(lambda: all(process.ended for process in self.processes))
        return [process.so_far for process in self.processes]


@contextlib.contextmanager
def started(
    *commands: Sequence[str],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> Iterator[Group]:
    """All of ``commands`` at once, killed when the block ends."""
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            files = (stack.enter_context(tempfile.TemporaryFile()) for _ in ("out", "err"))
            processes.append(Process(command, *files, cwd=cwd, env=env))
            stack.callback(processes[-1].kill)
        yield Group(processes, timeout)


def run(
    command: Sequence[str],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> Finished:
    """One process to its end. Raises `TimeoutError` with what it said if that takes longer than ``timeout`` seconds."""
    with started(command, cwd=cwd, env=env, timeout=timeout) as group:
        return group.finish()[0]


def of_two_devices(*commands: list[str]) -> contextlib.AbstractContextManager[Group]:
    """Processes of this interpreter, of two devices each."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=2")
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    return started(*([sys.executable, *command] for command in commands), cwd=ROOT, env=environment)


def in_processes(*commands: list[str]) -> None:
    """All at once, each to a good end."""
    with of_two_devices(*commands) as group:
        for process in group.finish():
            assert process.returncode == 0, process.output[-4000:]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])
