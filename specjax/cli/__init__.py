"""The command line of specjax."""

from specjax.cli.commands import app, main
from specjax.cli.entry import run_main, user_errors

__all__ = ["app", "main", "run_main", "user_errors"]
