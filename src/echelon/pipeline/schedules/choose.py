"""Compares all schedules that a size can have, and recommends one with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from echelon import checks
from echelon.errors import ArgumentError
from echelon.page import html_of
from echelon.pipeline.schedules.costs import read_costs
from echelon.pipeline.schedules.dataflow import crossings
from echelon.pipeline.schedules.families import FAMILIES, schedule
from echelon.pipeline.schedules.simulate import Simulation, simulate

ALIKE = 0.01  # Schedules whose times differ by less count as equally fast: costs are as uncertain.


@dataclass(frozen=True, kw_only=True)
class ChoiceRow:
    """One schedule of a size.

    Attributes:
        name: the name of the schedule.
        chunks: stages per rank.
        options: options of the schedule.
        simulation: of the schedule; the unit of time is that of the costs.
        messages: the largest number of transfers of one rank, sent and received.
        fits: whether the peak is within the cap.
    """

    name: str
    chunks: int
    options: Mapping[str, int | bool] = field(default_factory=dict)
    simulation: Simulation
    messages: int
    fits: bool

    @property
    def peak(self) -> float:
        """Most activations alive on any rank, in activations of one rank's share."""
        return max(self.simulation.peak)

    def __str__(self) -> str:
        chunks = {"v": self.chunks} if FAMILIES[self.name].chunks is None else {}
        options = ", ".join(f"{key}={value}" for key, value in {**chunks, **self.options}.items())
        return f"{self.name}({options})" if options else self.name


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The schedules of a size.

    Attributes:
        rows: from the fastest to the slowest.
        recommended: the row to take; None if no schedule is within the cap.
        reason: a sentence that says why.
    """

    rows: tuple[ChoiceRow, ...]
    recommended: ChoiceRow | None
    reason: str

    _repr_html_ = html_of

    def __repr__(self) -> str:
        return f"<Choice of {self.recommended!s} among {len(self.rows)} schedules>"

    def __str__(self) -> str:
        head = (
            f"  {'schedule':<28} {'time':>10} {'bubble':>8} {'own':>8} {'peak':>7} {'messages':>9}"
        )
        lines = [head]
        for row in self.rows:
            mark = "*" if row is self.recommended else " " if row.fits else "x"
            simulation = row.simulation
            lines.append(
                f"{mark} {row!s:<28} {simulation.makespan:>10.4g} {simulation.span_bubble:>8.2%} "
                f"{simulation.own_bubble:>8.2%} {row.peak:>7.4g} {row.messages:>9}"
            )
        return "\n".join([*lines, self.reason])


def choose(
    ranks: int,
    microbatches: int,
    *,
    chunks: Iterable[int] = (1, 2, 4),
    costs: Mapping[str, float] | None = None,
    memory_cap: float | None = None,
) -> Choice:
    """Simulate every schedule that a size can have, and recommend one.

    Recommended is the fastest whose memory is within the cap; of those as fast within 1 %, the one
    with the least memory, then with the fewest messages. Time is over all ranks, so a schedule that
    gains only where each rank steps its optimizer alone does not win by that.

    Args:
        ranks: number of ranks.
        microbatches: number of microbatches.
        chunks: how many stages a rank may hold; the model must be cut into so many times ``ranks``.
        costs: as ``simulate``, but numbers for a rank's whole share of the model, of which a stage
            has its part. ``dualpipe-v`` is fused only where ``F&B`` is given.
        memory_cap: most activations alive on a rank, in those of one microbatch over the rank's
            whole share (1F1B keeps as many as there are ranks); None for no cap.

    Raises:
        ArgumentError: an argument is not a number, or a list of them, that is allowed.

    Example:
        >>> choice = choose(4, 8, chunks=[1, 2], costs={"F": 1, "B": 2}, memory_cap=4)
        >>> str(choice.recommended)
        'zb(v=2, k=1)'
        >>> choice.reason.split(":")[0]
        'zb(v=2, k=1) is recommended'
    """
    numbers = _numbers_of_chunks(chunks)
    checks.integer("ranks", ranks, 1)
    checks.integer("microbatches", microbatches, 1)
    if costs is not None:
        checks.mapping("costs", costs)
    if memory_cap is not None:
        checks.number("memory_cap", memory_cap, 0.0)
    rows = []
    for name, v, options in _candidates(
        sorted(set(numbers)), ranks, microbatches, fused=costs is not None and "F&B" in costs
    ):
        candidate = schedule(name, ranks * v, microbatches, ranks, **options)
        simulation = simulate(candidate, _share(costs, v))
        rows.append(
            ChoiceRow(
                name=name,
                chunks=v,
                options=options,
                simulation=simulation,
                messages=_messages(simulation),
                fits=memory_cap is None or max(simulation.peak) <= memory_cap,
            )
        )
    rows.sort(key=lambda row: (row.simulation.makespan, row.peak, row.messages))
    recommended, reason = _recommend(rows, memory_cap)
    return Choice(rows=tuple(rows), recommended=recommended, reason=reason)


def _numbers_of_chunks(chunks: object) -> list[int]:
    numbers = list(chunks) if isinstance(chunks, Iterable) else []
    if not numbers or not all(type(v) is int and v > 0 for v in numbers):
        raise ArgumentError(f"chunks is {chunks!r:.80}; give numbers of stages per rank, each >= 1")
    return numbers


def _candidates(
    chunks: list[int], ranks: int, microbatches: int, *, fused: bool
) -> Iterator[tuple[str, int, dict[str, int | bool]]]:
    """Every training schedule once; zb of one chunk is zb-h1 and zb-h2."""
    for name, family in FAMILIES.items():
        for v in chunks:
            if name == "forward-only" or (family.chunks is not None and family.chunks != v):
                continue
            if family.chunks is None and v == 1:
                continue
            if name == "dualpipe-v" and microbatches < 2 * ranks:
                continue
            if name == "interleaved":
                yield from ((name, v, {"factor": factor}) for factor in (1, 2))
            elif name == "zb":
                yield from ((name, v, {"k": k}) for k in (1, 2))
            else:
                yield name, v, {}
                if name == "dualpipe-v" and fused:
                    yield name, v, {"fused": True}


def _share(costs: Mapping[str, float] | None, v: int) -> dict[str, float]:
    """The costs of one of the v stages of a rank; a message takes as long as before."""
    costs = {"F": 1.0} if costs is None else costs
    for name, number in costs.items():
        if not isinstance(number, int | float):
            raise ArgumentError(
                f"costs[{name!r}] is {number!r:.80}; choose compares cuts into different numbers "
                "of stages, so give one number for a rank's share"
            )
    whole = read_costs(costs, 1)
    parts = {kind.value: by_stage for kind, by_stage in whole.by_kind.items()}
    parts |= {} if whole.pair is None else {"F&B": whole.pair}
    return {name: by_stage[0] / v for name, by_stage in parts.items()} | {"hop": whole.hop}


def _messages(simulation: Simulation) -> int:
    """The largest number of transfers that one rank sends or receives."""
    schedule, counts = simulation.schedule, [0] * simulation.schedule.num_ranks
    for _, *ranks in crossings(schedule.placement):
        for rank in ranks:
            counts[rank] += schedule.num_microbatches * (2 if schedule.has_backward else 1)
    return max(counts)


def _recommend(rows: list[ChoiceRow], cap: float | None) -> tuple[ChoiceRow | None, str]:
    """The row to take, and the sentence that says why."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        least = min(rows, key=lambda row: row.peak)
        return None, (
            f"none is within the memory cap of {cap:g}: the least is {least}, which keeps "
            f"{least.peak:g}. Use smaller microbatches, activation checkpointing or more ranks"
        )
    fastest = fitting[0].simulation.makespan
    alike = [row for row in fitting if row.simulation.makespan <= fastest * (1 + ALIKE)]
    best = min(alike, key=lambda row: (row.peak, row.messages, row.simulation.makespan))
    within = "" if cap is None else f" within the memory cap of {cap:g}"
    reason = f"{best} is recommended: the fastest{within}"
    if len(alike) > 1:
        reason = (
            f"{best} is recommended: of the {len(alike)} fastest{within}, alike to "
            f"{100 * ALIKE:g} %, it has the least memory and, among those, the fewest messages"
        )
    time, bubble = best.simulation.makespan, best.simulation.span_bubble
    return best, f"{reason} (time {time:.4g}, bubble {bubble:.2%})."
