"""Measures variants of one task against each other in alternation, and compares them pair by pair.

One *round* runs every variant once, so all of them see the same state of the machine::

    round 0   A B C        barrier before each; the time of a variant in a round
    round 1   B C A        is that of the slowest rank
    round 2   C A B

A ratio of two variants is taken inside each round, and its median over rounds is reported: a slow
second of the machine then spoils one pair, and not the comparison. On a virtual machine the host
may take processors away for a while ("steal time"), which hurts ranks that wait for each other
more than one process alone; ``quiet`` keeps the rounds in which it did not.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = [
    "RankGroup",
    "Samples",
    "Variant",
    "alternate",
    "alternate_within",
    "num_rounds_within",
]

QUIET_SHARE = 0.01
FEWEST_QUIET = 5


class RankGroup(Protocol):
    """A group of ranks that measure together, such as a ``Group`` of echelon."""

    @property
    def rank(self) -> int: ...

    def barrier(self) -> object:
        """Synchronise the ranks."""

    def all_gather_object(self, item: Any) -> list[Any]:
        """The ``item`` of every rank, in rank order."""


@dataclass(frozen=True)
class Variant:
    """One way to do the task.

    Attributes:
        name: in tables.
        run: does the task once.
        ranks: the ranks that run it; the others wait in a barrier. None: all.
        prepare: called on all ranks before each sample, and not timed.
    """

    name: str
    run: Callable[[], object]
    ranks: frozenset[int] | None = None
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Samples:
    """The time that each variant took in each round, by name.

    Attributes:
        seconds: wall time.
        cpu_seconds: processor time of all threads of the process; spinning while waiting counts.
        stolen: share of the machine's processor time that the host took, round by round.
    """

    seconds: Mapping[str, Sequence[float]]
    cpu_seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    stolen: Sequence[float] = ()

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Samples:
        """The samples in a record of a JSON file."""
        return cls(record["seconds"], record["cpu_seconds"], record["stolen"])

    def record(self) -> dict[str, Any]:
        """All samples as a record for a JSON file."""
        return {
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "stolen": self.stolen,
        }

    def quiet(self) -> Samples:
        """The rounds with at most 1 % of steal time; all rounds if fewer than 5 are so quiet."""
        kept = [r for r, share in enumerate(self.stolen) if share <= QUIET_SHARE]
        if len(kept) < FEWEST_QUIET:
            return self

        def of(by_name: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
            return {name: [values[r] for r in kept] for name, values in by_name.items()}

        return Samples(of(self.seconds), of(self.cpu_seconds), [self.stolen[r] for r in kept])

    @property
    def num_rounds(self) -> int:
        """How often every variant was measured."""
        return max(map(len, self.seconds.values()))

    def median_s(self, name: str) -> float:
        """Median time of one variant."""
        return statistics.median(self.seconds[name])

    def ratios(self, name: str, base: str) -> list[float]:
        """Time of ``name`` in units of the time of ``base``, round by round."""
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        return [ours / theirs for ours, theirs in pairs]

    def ratio(self, name: str, base: str) -> float:
        """Median of the paired ratios: above 1 means that ``name`` is slower than ``base``."""
        return statistics.median(self.ratios(name, base))

    def difference_s(self, name: str, base: str) -> float:
        """Median of the paired differences: what ``name`` takes more than ``base``, in seconds."""
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        return statistics.median(ours - theirs for ours, theirs in pairs)


def alternate(
    group: RankGroup, variants: Sequence[Variant], num_rounds: int, num_calls: int = 1
) -> Samples:
    """Run all variants in turn, ``num_rounds`` times; each round begins with the next variant.

    Args:
        num_calls: calls in a row in one sample; a sample is the mean time of a call.

    Returns:
        Seconds per call of the slowest rank; the same on all ranks.
    """
    mine: dict[str, list[tuple[float, float]]] = {variant.name: [] for variant in variants}
    stolen: list[float] = []
    for round_ in range(num_rounds):
        before = _processor_ticks()
        for turn in range(len(variants)):
            variant = variants[(round_ + turn) % len(variants)]
            mine[variant.name].append(_sample(group, variant, num_calls))
        taken, everything = (b - a for a, b in zip(before, _processor_ticks(), strict=True))
        stolen.append(taken / max(1, everything))
    group.barrier()
    by_rank = group.all_gather_object(mine)

    def most(name: str, clock: int) -> list[float]:
        rounds = zip(*(measured[name] for measured in by_rank), strict=True)
        return [max(sample[clock] for sample in samples) for samples in rounds]

    seconds, cpu_seconds = ({name: most(name, clock) for name in mine} for clock in (0, 1))
    return Samples(seconds, cpu_seconds, group.all_gather_object(stolen)[0])


def _processor_ticks() -> tuple[int, int]:
    """Ticks of all processors since the machine started: stolen by the host, and all."""
    with open("/proc/stat") as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]
    return ticks[7], sum(ticks)


def _sample(group: RankGroup, variant: Variant, num_calls: int) -> tuple[float, float]:
    """Wall time and processor time of a call, in seconds."""
    run = variant.run
    variant.prepare()
    group.barrier()
    if variant.ranks is not None and group.rank not in variant.ranks:
        return 0.0, 0.0
    start_cpu_s = time.process_time()
    start_s = time.perf_counter()
    for _ in range(num_calls):
        run()
    seconds = time.perf_counter() - start_s
    return seconds / num_calls, (time.process_time() - start_cpu_s) / num_calls


def alternate_within(
    group: RankGroup, variants: Sequence[Variant], budget_s: float, *, sample_s: float
) -> tuple[int, Samples]:
    """``alternate`` for about ``budget_s``, at least 3 rounds, after a pilot round.

    Args:
        sample_s: shortest time of a sample of the slowest variant.

    Returns:
        The number of calls in a sample, and the samples.
    """
    pilot = alternate(group, variants, 1)
    last_s = [seconds[-1] for seconds in pilot.seconds.values()]
    num_calls = math.ceil(sample_s / max(last_s))
    num_rounds = num_rounds_within(budget_s, num_calls * sum(last_s), at_least=3)
    return num_calls, alternate(group, variants, num_rounds, num_calls)


def num_rounds_within(
    budget_s: float, round_s: float, *, at_least: int = 5, at_most: int = 200
) -> int:
    """How many rounds of ``round_s`` fit into ``budget_s``, within bounds.

    Example:
        >>> num_rounds_within(2.0, 0.1), num_rounds_within(2.0, 10.0), num_rounds_within(2.0, 1e-5)
        (20, 5, 200)
    """
    return max(at_least, min(at_most, int(budget_s / max(round_s, 1e-9))))
