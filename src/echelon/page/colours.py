"""The colours of drawings, by meaning, on a light and on a dark ground.

A colour means one thing on all figures of a page, and no colour means a rank: a rank is a row.
"""

from __future__ import annotations

from typing import NamedTuple


class Shade(NamedTuple):
    """A colour on the light and on the dark ground of a page."""

    light: str
    dark: str


MEANINGS = {
    # curves over the run
    "curve": Shade("#3d4f63", "#c6d1dd"),
    "second": Shade("#e03131", "#ff8787"),
    # what a rank does; as in the drawings of schedules
    "forward": Shade("#3f73ad", "#6ea3d8"),
    "backward": Shade("#cf6a24", "#ee935a"),
    "inputs": Shade("#d9a51f", "#f0c454"),
    "weights": Shade("#5c9650", "#7cc47c"),
    "optimizer": Shade("#0b7285", "#3bc9db"),
    "data": Shade("#c2429c", "#f08cd2"),
    "saving": Shade("#7a1f3d", "#c9617f"),
    "other": Shade("#66717d", "#8895a3"),
    "idle": Shade("#d5dbe2", "#3a4550"),
    # what memory and messages are for; communication is also what a rank waits in
    "parameters": Shade("#6741c9", "#8b6cf0"),
    "gathered": Shade("#b29cf2", "#cdbcff"),
    "gradients": Shade("#8b9a34", "#a9b84a"),
    "state": Shade("#94643a", "#b58456"),
    "communication": Shade("#e48f9f", "#f2a3b1"),
    "buffers": Shade("#124a3f", "#3f7f72"),
}


def colour(meaning: str) -> str:
    """The colour of a meaning, in CSS.

    Example:
        >>> colour("forward")
        'var(--forward)'
    """
    assert meaning in MEANINGS, meaning
    return f"var(--{meaning})"


def colour_style() -> str:
    """The style sheet that defines all colours."""
    light, dark = (
        " ".join(f"--{meaning}: {shade[i]};" for meaning, shade in MEANINGS.items())
        for i in range(2)
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
