"""Controllers of measured costs that keep to the costs they are given."""

from __future__ import annotations

from typing import Any

from specjax.controllers.adaptive import Adaptive
from specjax.interfaces import Controller
from specjax.testing.inhabitants import Chain


def of_batch(**settings: Any) -> Adaptive:
    """One length for the batch."""
    return Adaptive(corrects=False, **settings)


def of_rows(**settings: Any) -> Adaptive:
    """A length for each row."""
    return Adaptive(corrects=False, per="row", **settings)


def of_total(total: int, **settings: Any) -> Adaptive:
    """A total for the batch."""
    return Adaptive(corrects=False, total=total, **settings)


def bound(controller: Controller, k: int) -> Controller:
    """The controller for chains of ``k`` tokens."""
    return controller.bind(Chain(k))
