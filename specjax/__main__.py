"""`python -m specjax`: the `specjax` command."""

from specjax.cli import main

main()
