"""JAX's persistent cache of compiled programs, in the user's own cache directory. Commands turn it on, never an import.
They also tell that they compile, and for how long."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import jax

from specjax import backend
from specjax.runtime.progress import wait_for

SWITCH = "SPECJAX_COMPILE_CACHE"
_MOST_BYTES = 2 * 10**9
_SECONDS_WORTH_SAYING = 1.0


def keep_programs(wanted: bool = True) -> Path | None:
    """Load programs that were compiled before, and store those compiled now. Call it before anything is compiled.

    Returns the cache's directory; None if it is not ``wanted``, `SPECJAX_COMPILE_CACHE=0` is set, the directory cannot
    be used, or JAX was given one already (`JAX_COMPILATION_CACHE_DIR`), which stays in use. Beyond 2 GB, the programs
    unused for longest are removed. Whoever can write there can run code as the user, so the directory is private.
    """
    given = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if not wanted or os.environ.get(SWITCH) == "0" or given is not None:
        return None
    try:
        directory = user_cache() / "specjax" / f"programs-{machine()}"
        make_room(directory, _MOST_BYTES)
    except (OSError, RuntimeError):  # no home, or a read-only one: programs are compiled again
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # Store all programs: the many small ones of a start take seconds together.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return directory


@contextlib.contextmanager
def programs_kept(wanted: bool = True) -> Iterator[None]:
    """`keep_programs` around a command. The open bar, else stderr, tells of a program that compiles for longer than a
    second. At the end stderr tells how many programs were compiled, and their seconds."""
    directory, told = keep_programs(wanted), _Told()
    _listening.append(told)
    try:
        yield
    finally:
        _listening.remove(told)
        told.finished()
        if told.seconds >= _SECONDS_WORTH_SAYING:
            cached = f", {told.cached} of them from the cache" if told.cached else ""
            kept = f"; kept for the next start in {directory}" if directory and told.cached < told.programs else ""
            plural = "program" if told.programs == 1 else "programs"
            print(f"compiled {told.programs} {plural} in {told.seconds:.1f} s{cached}{kept}", file=sys.stderr)


@dataclasses.dataclass(eq=False)
class CompileCount:
    """Number of programs handed to the backend compiler, those from the cache among them, and seconds spent there."""

    programs: int = 0
    cached: int = 0
    seconds: float = 0.0

    def begun(self) -> None:
        """Called before a program is compiled."""

    def ended(self, seconds: float) -> None:
        """Called when a program is compiled."""
        self.programs, self.seconds = self.programs + 1, self.seconds + seconds


@contextlib.contextmanager
def count_compiles() -> Iterator[CompileCount]:
    """Count every program compiled inside the ``with`` statement, stray eager operations included."""
    count = CompileCount()
    _listening.append(count)
    try:
        yield count
    finally:
        _listening.remove(count)


class _Told(CompileCount):
    """Counts programs, and tells the user of a long compilation."""

    def __init__(self) -> None:
        super().__init__()
        self._timer: threading.Timer | None = None
        self._said = self._on_bar = False

    def begun(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(_SECONDS_WORTH_SAYING, self._say)
            self._timer.daemon = True
            self._timer.start()

    def ended(self, seconds: float) -> None:
        super().ended(seconds)
        self.finished()

    def finished(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if self._on_bar:
            self._on_bar = wait_for(None) and False

    def _say(self) -> None:
        self._on_bar = wait_for("compiling")
        if not self._on_bar and not self._said:
            tuned = ", and timing products on the GPU, which takes minutes the first time"
            print(f"compiling{tuned if jax.default_backend() == 'gpu' else ''} ...", file=sys.stderr, flush=True)
            self._said = True


_listening: list[CompileCount] = []


def _on_duration(event: str, duration_secs: float, **_: str | int | float) -> None:
    for told in _listening:
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            told.begun()  # the backend's compilation follows
        elif event == "/jax/core/compile/backend_compile_duration":
            told.ended(duration_secs)


def _on_event(event: str, **_: str | int | float) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        for told in _listening:
            told.cached += 1


jax.monitoring.register_event_duration_secs_listener(_on_duration)
jax.monitoring.register_event_listener(_on_event)


def user_cache() -> Path:
    """Directory for the caches of this user's programs."""
    default = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or default)


def machine() -> str:
    """Digest of the kind of processor. Different machines may share a home, and XLA compiles programs for CPU for one
    kind of processor."""
    features = platform.machine() + backend.processor_features()
    return hashlib.sha256(features.encode()).hexdigest()[:8]


def make_room(directory: Path, most_bytes: int) -> None:
    """Create ``directory``, private to the user, and remove its files unused for longest beyond ``most_bytes``. Small
    directories, in which XLA keeps what it found about products on a GPU, stay."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = []
    for file in filter(Path.is_file, directory.iterdir()):
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            files.append((file.stat().st_atime, file.stat().st_size, file))
    total = 0
    for _, size, file in sorted(files, reverse=True):
        total += size
        if total > most_bytes:
            file.unlink(missing_ok=True)
