"""What ``ec.show`` says about an object, as data: the same for a notebook and for a terminal.

The room of a class registers a function with ``view_of`` and gives the class
``_repr_html_ = html_of``. So the writers of HTML and of text know no class of another room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

from echelon.errors import ArgumentError

SHOWN = (
    "a model in ec.DDP, ec.FSDP or ec.Pipeline, an ec.Plan, a schedule, simulation, timeline or "
    "measurement of ec.pipeline, an ec.StepRecord, a Comparison, or an object with _repr_html_()"
)


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table of texts.

    Attributes:
        heads: the texts of the first row.
        rows: the other rows.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing in both forms.

    Attributes:
        svg: an ``<svg>`` whose texts are escaped.
        text: for a terminal, in a font of one width.
    """

    svg: str
    text: str


@dataclass(frozen=True, kw_only=True)
class ViewPart:
    """A part of a view.

    Attributes:
        title: a few words.
        about: a sentence; may be empty.
        content: a table, a picture, or plain text.
    """

    title: str
    about: str = ""
    content: TextTable | Picture | str


@dataclass(frozen=True, kw_only=True)
class View:
    """What there is to see of an object. Its texts are plain: the writers escape them.

    Attributes:
        title: what the object is.
        facts: the most important numbers, each with its label.
        parts: in reading order.
    """

    title: str
    facts: Sequence[tuple[str, str]] = ()
    parts: Sequence[ViewPart] = ()


@singledispatch
def view_of(shown: object) -> View:
    """The view of an object whose class has registered one.

    Raises:
        ArgumentError: no class of it has.
    """
    raise ArgumentError(f"this is {shown!r:.80}, a {type(shown).__name__}; show {SHOWN}")


def bytes_text(nbytes: float) -> str:
    """``nbytes`` as a text with a unit.

    Example:
        >>> [bytes_text(nbytes) for nbytes in (0, 2048, 3 * 2**20, 5 * 2**30)]
        ['0 B', '2.0 KiB', '3.0 MiB', '5.0 GiB']
    """
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.1f} {unit}"
    return f"{nbytes:.0f} B"
