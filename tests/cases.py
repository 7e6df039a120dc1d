"""Cases of a parametrised test that only `make proof` runs: others of their kind stay in `make test`."""

from __future__ import annotations

from typing import Any

import pytest


def in_proof(*values: Any, **options: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.proof, **options)
