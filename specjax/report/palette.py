"""Every colour of the reports, once: token origins (page and terminal), plot series, and the page itself.

Origins stay distinguishable under protanopia and deuteranopia, and each has a mark of its own that needs no colour.
Text colours have a contrast of at least 4.5 on their own background (WCAG AA).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Tone:
    """One colour for a light background and one for a dark background."""

    light: str
    dark: str


@dataclasses.dataclass(frozen=True)
class Origin:
    """Look of a token of one origin. ``rich_style``: on a terminal, with a mark that needs no colour, and a colour with
    a contrast of at least 4.5 on black and on white, one of the 256 that terminals share, so that nothing is rounded.
    ``brackets`` mark the token in plain text and on the page."""

    meaning: str
    tone: Tone
    rich_style: str
    brackets: tuple[str, str] = ("", "")


ORIGINS: Mapping[str, Origin] = {
    "prompt": Origin("what was given", Tone("#656d76", "#8d96a0"), "italic #767676", ("", "‖")),
    # Most of the output has this origin, so it has the terminal's own colour.
    "accepted": Origin("drafted and accepted", Tone("#0a55a8", "#6cb6ff"), "default"),
    "corrected": Origin(
        "the target's token in place of a rejected draft",
        Tone("#b84a00", "#ff9a57"),
        "bold underline #af5f5f",
        ("⟦", "⟧"),
    ),
    "bonus": Origin(
        "the target's token after a whole accepted block",
        Tone("#007a56", "#3ddcb0"),
        "reverse #00875f",
        ("⟪", "⟫"),
    ),
}

SERIES: Mapping[str, Tone] = {
    "draft_after": Tone("#1f6fd0", "#5aa9ff"),
    "draft_before": Tone("#c8600f", "#ff9d5c"),
    "ngram": Tone("#0e8a68", "#35d0a5"),
    "control": Tone("#8d4ba6", "#d59ae8"),
}

PAGE: Mapping[str, Tone] = {
    "surface": Tone("#ffffff", "#12161c"),
    "raised": Tone("#f5f7f9", "#1b212a"),
    "ink": Tone("#1f242b", "#e4e9ef"),
    "muted": Tone("#5b6570", "#9aa5b1"),
    "line": Tone("#d8dee5", "#323b47"),
    "bad": Tone("#c02626", "#ff7b72"),
}


def css_variables() -> dict[str, Tone]:
    """CSS variable name -> tone, for the page and the plots in it."""
    tones = {**PAGE, **SERIES, **{name: origin.tone for name, origin in ORIGINS.items()}}
    return {f"--{name.replace('_', '-')}": tone for name, tone in tones.items()}
