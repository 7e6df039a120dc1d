"""Entry points: errors of the user in one line with exit status 2, signals, and the command line of a script."""

from __future__ import annotations

import contextlib
import errno
import io
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from specjax.errors import SpecjaxError, Stopped
from specjax.runtime import memory

USER_ERROR, INTERRUPTED, TERMINATED = 2, 130, 143
RESUMES = "interrupted; the same command resumes"
# Errors of a wrong path, wherever it is opened first, and of a full or read-only disk, wherever it is written.
_PATH_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="a.b=v", help="Overrides of single fields.")]


@contextlib.contextmanager
def user_errors(debug: bool = False, interrupted: str = "interrupted") -> Iterator[None]:
    """Turn errors of the user into messages on stderr and an exit status. A `SpecjaxError`, a path that cannot be
    opened or a full disk gives `error: ...`, one line for each problem, and status 2; Ctrl-C gives ``interrupted`` and
    130; SIGTERM gives its message and 143. Any other error is a defect of specjax and keeps its traceback. Characters
    that the terminal's encoding lacks are printed as escapes: a model may write any, and its text must not be lost for
    one."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    except (SpecjaxError, OSError) as error:
        mendable = isinstance(error, (SpecjaxError, *_PATH_ERRORS)) or error.errno in _DISK_ERRORS
        if not mendable:
            raise
        if debug:
            traceback.print_exc()
        else:
            for line in _message(error).splitlines():
                print(f"error: {line}", file=sys.stderr)
        raise SystemExit(USER_ERROR) from None
    except Stopped as stopped:
        print(f"\n{stopped}", file=sys.stderr)
        raise SystemExit(TERMINATED) from None
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def run_main(
    main: Callable[[Path, list[str]], int | None],
    description: str | None,
    interrupted: str = RESUMES,
    argv: Sequence[str] | None = None,
) -> None:
    """Run a script with the command line `CONFIG [a.b=v]... [--debug]`: call ``main(config path, overrides)`` and exit
    with the status that it returns, 0 for None."""

    def command(config: ConfigPath, overrides: Overrides = None, debug: Debug = False) -> None:
        with user_errors(debug, interrupted), sigterm_like_ctrl_c():
            status = main(config, overrides or [])
        raise SystemExit(status or 0)

    memory.one_heap()
    script = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    script.command(help=description)(command)
    script(args=argv)


@contextlib.contextmanager
def sigterm_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM raise `Stopped`, so that half-written files are removed as after Ctrl-C. The training loop listens
    itself and saves first."""
    if threading.current_thread() is not threading.main_thread():  # only that one may listen
        yield
        return

    def stop(number, frame) -> None:
        raise Stopped("stopped by SIGTERM; what is finished is kept, the same command goes on")

    before = signal.signal(signal.SIGTERM, stop) or signal.SIG_DFL
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or 'cannot be opened').lower()}"
    if isinstance(error, OSError):
        return f"{(error.strerror or str(error)).lower()}; make room, then run the same command again"
    return str(error)
