"""Rows with bars: lengths side by side, or spans of time, as HTML that fits any width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from echelon.page.colours import colour
from echelon.page.ticks import number_text, ticks


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A piece of a row.

    Attributes:
        start: where it begins, in the unit of the axis.
        end: where it ends.
        meaning: of its colour.
        text: in it where there is room; may be empty.
        tip: what is shown under the pointer.
    """

    start: float
    end: float
    meaning: str
    text: str = ""
    tip: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of bars.

    Attributes:
        name: on its left.
        bars: in order; they do not overlap.
        total: on its right; may be empty.
        group: the title of the rows that follow, from this one on; may be empty.
    """

    name: str
    bars: Sequence[Bar]
    total: str = ""
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class BarRows:
    """Rows of bars over one axis that begins at 0.

    Attributes:
        rows: from top to bottom.
        legend: the names of the colours, by meaning; may be empty.
        axis: the name of the axis, with its unit; empty for rows without one.
        end: of the axis, if it is longer than all rows.
    """

    rows: Sequence[Row]
    legend: Mapping[str, str]
    axis: str = ""
    end: float = 0.0

    def html(self) -> str:
        """The rows as a part of a page with ``CHART_STYLE``."""
        most = max([self.end, *(bar.end for row in self.rows for bar in row.bars)]) or 1.0
        items = "".join(
            f'<li><i class="box" style="--c:{colour(meaning)}"></i>{escape(name)}</li>'
            for meaning, name in self.legend.items()
        )
        legend = f'<ul class="legend">{items}</ul>' if items else ""
        rows = "".join(_row(row, most) for row in self.rows)
        axis = ""
        if self.axis:
            labels = "".join(
                f'<span style="left:{100 * x / most:.2f}%">{number_text(x)}</span>'
                for x in ticks(0.0, most, most=9)
            )
            axis = (
                f'<div class="name"></div><div class="xs">{labels}</div><div></div>'
                f'<div class="axis">{escape(self.axis)}</div>'
            )
        return f'<div class="rows">{legend}<div class="lanes">{rows}{axis}</div></div>'


def _row(row: Row, most: float) -> str:
    group = f'<div class="group">{escape(row.group)}</div>' if row.group else ""
    bars = "".join(_bar(bar, most) for bar in row.bars if bar.end > bar.start)
    name = escape(row.name).replace("_", "_<wbr>")
    return (
        f'{group}<div class="name">{name}</div>'
        f'<div class="track">{bars}</div><div class="total">{escape(row.total)}</div>'
    )


def _bar(bar: Bar, most: float) -> str:
    place = f"left:{100 * bar.start / most:.2f}%;width:{100 * (bar.end - bar.start) / most:.2f}%"
    text = f"<b>{escape(bar.text)}</b>" if bar.text else ""
    tip = f' title="{escape(bar.tip)}"' if bar.tip else ""
    return f'<i class="{bar.meaning}" style="{place}"{tip}>{text}</i>'
