"""Performance bars: bounds that a measurement must reach, and whether it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pairs import Samples
from report import markdown_table
from rich.table import Table

__all__ = ["Bar", "Kind", "Outcome", "bar_table", "judge"]


class Kind(Enum):
    """What the bound of a bar means."""

    FASTER = "the peer takes at least this many times as long"
    WITHIN = "it takes at most this many times as long as the peer"
    SECONDS = "it takes at most this many seconds"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One performance bar.

    Attributes:
        task: a description of what is measured.
        name: the variant that is judged.
        kind: what ``bound`` means.
        bound: a ratio, or seconds.
        peer: the variant it is compared with; empty for seconds.
    """

    task: str
    name: str
    kind: Kind
    bound: float
    peer: str = ""

    def __str__(self) -> str:
        if self.kind is Kind.FASTER:
            return f"≥ {self.bound:g}× faster than {self.peer}"
        if self.kind is Kind.WITHIN:
            return f"≤ {self.bound:g}× the time of {self.peer}"
        return f"≤ {self.bound * 1e3:g} ms"


@dataclass(frozen=True)
class Outcome:
    """A bar and the measured value."""

    task: str
    variant: str
    bar: str
    measured: float
    unit: str
    reached: bool


def judge(bar: Bar, samples: Samples) -> list[Outcome]:
    """Whether ``bar`` is reached; empty where a variant was not measured."""
    if bar.kind is Kind.SECONDS:
        value, unit = samples.median_s(bar.name) * 1e3, "ms"
        reached = value <= bar.bound * 1e3
    elif bar.peer not in samples.seconds or bar.name not in samples.seconds:
        return []
    elif bar.kind is Kind.FASTER:
        value, unit = samples.ratio(bar.peer, bar.name), "×"
        reached = value >= bar.bound
    else:
        value, unit = samples.ratio(bar.name, bar.peer), "×"
        reached = value <= bar.bound
    return [Outcome(bar.task, bar.name, str(bar), value, unit, reached)]


def bar_table(outcomes: Sequence[Outcome]) -> Table:
    """A row for each bar."""
    columns = ("what", "variant", "bar", "measured", "reached")
    table = markdown_table("Performance bars", columns, ())
    for row in outcomes:
        mark = "yes" if row.reached else "[red]no[/]"
        table.add_row(row.task, row.variant, row.bar, f"{row.measured:.4g} {row.unit}", mark)
    return table
