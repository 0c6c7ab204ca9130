"""``Comparison``: whether ranks computed what one process computes, and if not, where and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from html import escape
from math import inf, nan
from typing import Self, final

from echelon.page import table

_MAX_NAMES = 4  # that are written out


class ValueKind(Enum):
    """What was compared."""

    ROWS = "rows of a batch"
    STREAM = "random stream"
    PARAMETER = "parameter"
    OUTPUT = "module output"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    STATE = "optimizer state"


class CauseKind(Enum):
    """The causes that are known by their signature."""

    MEAN_OF_MEANS = "a mean of means"
    SUMMED = "gradients were summed and not averaged"
    AVERAGED_TWICE = "gradients were averaged twice"
    NOT_REDUCED = "gradients were not reduced"
    SAMPLES = "samples were seen twice or never"
    RANDOM_STREAM = "random streams are alike"
    BATCH_NORM = "a statistic of the batch was computed over a part of it"
    CLIPPING = "gradients were clipped by the norm of a part"
    CLIPPED_OTHERWISE = "the ranks and one process clip gradients to other norms"
    CLIPPED_BY_SOME = "some ranks clipped their gradients, and others did not"
    NOT_ZEROED = "gradients of the step before were kept"
    STALE = "a value was not brought up to date"
    PRECISION = "a lower precision"
    ACCUMULATION = "accumulated gradients have a wrong scale"
    START = "ranks started from other weights"
    OPTIONS = "the optimizer has other options"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ValueDifference:
    """A value of ranks that is not that of one process.

    Attributes:
        step: the number of the step, from 0; the number of steps at the end of the training.
        kind: what it is.
        name: of the tensor or module in the plain model.
        rank: the first rank that has it.
        ranks: all ranks that have it.
        largest: the largest difference of an element.
        relative: the same as a part of the largest element of the expected tensor.
        expected: the element of one process where the difference is largest.
        observed: that of the rank.

    Rows of a batch and random streams have no elements: differences are inf, and elements nan.
    """

    step: int
    kind: ValueKind
    name: str
    rank: int
    ranks: tuple[int, ...]
    largest: float
    relative: float
    expected: float
    observed: float

    @classmethod
    def of_step(cls, step: int, kind: ValueKind, ranks: Sequence[int]) -> Self:
        """That ranks took other rows, or drew other numbers, than one process."""
        return cls(
            step=step,
            kind=kind,
            name=kind.value,
            rank=ranks[0],
            ranks=tuple(dict.fromkeys(ranks)),
            largest=inf,
            relative=inf,
            expected=nan,
            observed=nan,
        )

    def __str__(self) -> str:
        if self.kind in (ValueKind.ROWS, ValueKind.STREAM):
            return f"step {self.step}, {self.kind.value}, rank {self.rank}"
        return (
            f"step {self.step}, {self.kind.value} {self.name!r}, rank {self.rank}: "
            f"{self.observed:.6g} instead of {self.expected:.6g} "
            f"(largest difference {self.largest:.2g}, {self.relative:.2g} of the largest value)"
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """A likely cause of differences.

    Attributes:
        kind: which it is.
        text: what was seen, in a sentence with the numbers.
        advice: what to do.
        names: of the tensors or modules that differ for this cause.
    """

    kind: CauseKind
    text: str
    advice: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.text}. {self.advice}"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What ``ec.compare`` found.

    Attributes:
        what: the plan, or the name of the function.
        ranks: how many trained.
        steps: how many were compared.
        differences: those of the first kind, in the first step, that has some; the first one first.
            What is computed later follows from them.
        causes: the likely ones; empty if the two are the same, or the cause is unknown.
        compared: how many tensors were compared, by kind.
        largest: the largest difference of each kind, as a part of the largest values.
        rounding: the same between two trainings on one process that differ by rounding only.
        notes: what was not compared, and why.
    """

    what: str
    ranks: int
    steps: int
    differences: tuple[ValueDifference, ...] = ()
    causes: tuple[Cause, ...] = ()
    compared: Mapping[ValueKind, int] = field(default_factory=dict)
    largest: Mapping[ValueKind, float] = field(default_factory=dict)
    rounding: Mapping[ValueKind, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether ranks computed what one process computes, up to rounding."""
        return not self.differences

    @property
    def first(self) -> ValueDifference | None:
        """The first difference; None if there is none."""
        return self.differences[0] if self.differences else None

    @property
    def verdict(self) -> str:
        """Whether the two are the same, in one line."""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        relation = "the same" if self.same else "NOT the same"
        return f"{relation}: {self.what} on {ranks} and one process, {steps} in float64"

    def __repr__(self) -> str:
        return f"<Comparison: {self.verdict}>"

    def __str__(self) -> str:
        lines = [self.verdict]
        if self.first is not None:
            lines.append(f"  first: {self.first}")
            lines.append(f"  ranks: {listed(self.first.ranks)}")
            others = [difference.name for difference in self.differences[1:]]
            if others:
                lines.append(f"  also in that step: {listed(others)}")
            if not self.causes:
                lines.append("  cause unknown: no known signature fits these numbers")
        lines += [f"  cause: {cause}" for cause in self.causes]
        lines += [
            f"  {kind.value}s: {count} compared, largest difference {self.largest[kind]:.1e}"
            f" (rounding alone: {self.rounding.get(kind, 0.0):.1e})"
            for kind, count in self.compared.items()
        ]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """For notebooks: the verdict, the differences, the causes, and what was compared."""
        parts = [f"<p><b>{escape(self.verdict)}</b></p>"]
        if self.differences:
            heads = ("what", "name", "step", "ranks", "expected", "observed", "relative")
            rows = [
                (
                    difference.kind.value,
                    difference.name,
                    str(difference.step),
                    listed(difference.ranks),
                    f"{difference.expected:.6g}",
                    f"{difference.observed:.6g}",
                    f"{difference.relative:.2g}",
                )
                for difference in self.differences
            ]
            parts.append(table(heads, rows))
            texts = [str(cause) for cause in self.causes] or ["cause unknown"]
            parts.append("<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>")
        counted = [
            (
                f"{kind.value}s",
                str(count),
                f"{self.largest[kind]:.1e}",
                f"{self.rounding.get(kind, 0.0):.1e}",
            )
            for kind, count in self.compared.items()
        ]
        parts.append(table(("compared", "tensors", "largest difference", "rounding"), counted))
        parts += [f"<p>{escape(note)}</p>" for note in self.notes]
        return "\n".join(parts)


def listed(items: Iterable[object], most: int = _MAX_NAMES) -> str:
    """The first items, and how many there are besides."""
    texts = [*map(str, items)]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more
