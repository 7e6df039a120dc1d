"""The `specjax` application: how a function becomes a command, and the options that `SamplingOptions` gives."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from specjax.cli.entry import RESUMES, Debug, sigterm_like_ctrl_c, user_errors
from specjax.decode.options import NUMBERS, SamplingOptions, meanings

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class _Command(TyperCommand):
    """Command that names the value that an option refuses; typer's own message leaves it out."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            value = _value_of(getattr(error.param, "opts", ()), given)
            if value is not None and value not in error.message:
                error.message = f"{value!r}: {error.message}"
            raise


def _value_of(options: Sequence[str], args: Sequence[str]) -> str | None:
    """The last value given for one of ``options``, None if there is none."""
    found = None
    for name, following in itertools.zip_longest(args, args[1:]):
        if name in options:
            found = following
        elif name.partition("=")[0] in options:
            found = name.partition("=")[2]
    return found


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"specjax {version('specjax')}")
        raise typer.Exit


@app.callback()
def _specjax(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding in JAX: distill a draft, decode with it, and prove that nothing is lost."""


def command(
    name: str | None = None, resumes: bool = False, stops: bool = False
) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Register a function as a command that also takes ``--debug``, with `user_errors` around it; it returns its exit
    status. ``resumes``: the same command goes on after Ctrl-C. ``stops``: SIGTERM raises `Stopped` as well."""

    def register(function: Callable[..., int | None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*arguments: Any, debug: bool = False, **options: Any) -> None:
            interrupted = RESUMES if resumes else "interrupted"
            with user_errors(debug, interrupted), sigterm_like_ctrl_c() if stops else contextlib.nullcontext():
                status = function(*arguments, **options)
            if status:
                raise SystemExit(status)

        given = inspect.signature(function, eval_str=True).parameters.values()
        _set_parameters(run, [*given, _parameter("debug", Debug, False)])
        app.command(name, cls=_Command)(run)
        return run

    return register


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _set_parameters(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> None:
    """Make ``parameters`` those that typer finds, each given by its name."""
    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    function.__dict__["__signature__"] = inspect.Signature(named)


OPTION_NAMES = {"banned_tokens": "ban"}
"""Sampling parameter -> name of its option, if that is another."""
_NOT_TYPED = ("allowed_tokens", "stop_token_ids")
"""Sampling parameters without an option."""
_KINDS: dict[Any, tuple[Any, str | None]] = {
    float: (float, None),
    int: (int, None),
    Mapping: (list[str] | None, "ID=VALUE"),
    Sequence: (list[int] | None, "ID"),
}
"""Type of a sampling parameter -> type and metavar of its option; a list is given element by element."""


def _sampling_options() -> Iterator[inspect.Parameter]:
    """The option of each sampling parameter, made of `SamplingOptions`."""
    explained = meanings()
    for name, hint in typing.get_type_hints(SamplingOptions).items():
        if name not in _NOT_TYPED:
            for_all_rows = typing.get_args(hint)[0]
            kind, metavar = _KINDS[typing.get_origin(for_all_rows) or for_all_rows]
            help = explained[name] if metavar is None else f"{explained[name].removesuffix('.')}; may be repeated."
            option = typer.Option(help=help, metavar=metavar, min=0 if name == "temperature" else None)
            default = NUMBERS[name].neutral if name in NUMBERS else None
            yield _parameter(OPTION_NAMES.get(name, name), Annotated[kind, option], default)


def with_sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the option of each sampling parameter in place of ``**sampling``, after max_new_tokens."""
    parameters = [*inspect.signature(function, eval_str=True).parameters.values()][:-1]
    at = [parameter.name for parameter in parameters].index("max_new_tokens") + 1
    _set_parameters(function, [*parameters[:at], *_sampling_options(), *parameters[at:]])
    return function
