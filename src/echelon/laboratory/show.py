"""``ec.show``: the view of an object, in the cell of a notebook or on a terminal."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import nn

from echelon.comm.world import World
from echelon.errors import ArgumentError
from echelon.page import Picture, TextTable, View, ViewPart, view_of
from echelon.process.notebook import in_notebook


def show(shown: Any) -> None:
    """Show who owns which bytes of which parameter, a schedule, what is sent, and memory.

    In a notebook it is shown as a cell shows the object itself, elsewhere as text. Nothing is
    communicated, so that one rank may call it alone.

    Args:
        shown: a model in ``DDP``, ``FSDP`` or ``Pipeline``, a ``Plan``, a
            ``StepRecord``, a ``Comparison``, a schedule, simulation, timeline,
            choice or measurement of ``ec.pipeline``, or any object with ``_repr_html_``.

    Raises:
        ArgumentError: there is nothing to see, as of a number, a plain module or a closed world.

    Example:
        >>> from echelon.plans.plans import Plan
        >>> show(Plan(dp=2, shard=2))  # doctest: +ELLIPSIS
        Plan dp=2,shard=2
        4 ranks · 4 parts of a batch
        ...
    """
    html = getattr(type(shown), "_repr_html_", None)
    if view_of.dispatch(type(shown)) is view_of.dispatch(object) and html is None:
        _refuse(shown)
    if in_notebook():
        from IPython.display import HTML, display

        display(HTML(shown._repr_html_()))  # type: ignore[no-untyped-call]
        return
    if view_of.dispatch(type(shown)) is view_of.dispatch(object):
        print(shown)
        return
    # Ranks of one process may each have their own output, so that the stream is asked for now.
    Console(file=sys.stdout, highlight=False, soft_wrap=True).print(rendered(view_of(shown)))


def _refuse(shown: object) -> None:
    if isinstance(shown, World):
        if not shown.is_open:
            raise ArgumentError(
                f"{shown!r} has been closed, and a world is not shown: show the models, inside of "
                "the function that ec.run calls, or those that it returns"
            )
        raise ArgumentError(
            f"{shown!r} says itself what there is to see of a world: print it, or show the models "
            "of its ranks"
        )
    if isinstance(shown, nn.Module):
        raise ArgumentError(
            f"this {type(shown).__name__} is a plain module, of which each rank has all bytes that "
            "it has: wrap it in ec.DDP, ec.FSDP or ec.Pipeline, or give it to ec.parallelize, and "
            "show what that returns"
        )
    view_of(shown)  # raises the general sentence


def rendered(view: View) -> RenderableType:
    """A view for a console of rich; its texts are printed as they are, without markup."""
    facts = " · ".join(f"{value} {label}" for value, label in view.facts)
    lines: list[RenderableType] = [Text(view.title, style="bold")]
    if facts:
        lines.append(Text(facts))
    return Group(*lines, *(_part(part) for part in view.parts))


def _part(part: ViewPart) -> RenderableType:
    head = Text(f"\n{part.title}", style="bold")
    lines: list[RenderableType] = [head]
    if part.about:
        lines.append(Text(part.about, style="dim"))
    return Group(*lines, Padding(_content(part.content), (0, 0, 0, 2), expand=False))


def _content(content: TextTable | Picture | str) -> RenderableType:
    if isinstance(content, Picture):
        return Text(content.text, no_wrap=True, overflow="ignore")
    if isinstance(content, str):
        return Text(content)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column, head in enumerate(content.heads):
        table.add_column(Text(head), justify="left" if column == 0 else "right")
    for row in content.rows:
        table.add_row(*map(Text, row))
    return table
