"""The drawings with a row for each rank: functions from recorded lines to rows of bars or tables.

Where there are more ranks than ``MOST_ROWS``, the lowest, the median and the highest stand for all.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from echelon.observe.curves import PHASE_NAMES, meaning_of
from echelon.observe.phases import PHASES
from echelon.observe.recorded_run import Line
from echelon.page import Bar, BarRows, Row, bytes_text

MOST_ROWS = 8
LEAST_SHOWN = 1e-3  # of the largest volume

# The names of the actions of a pipeline and the meaning of their colour, by the letter in their
# text.
ACTIONS = {
    "F": ("forward", "forward"),
    "B": ("backward", "backward"),
    "I": ("gradients of inputs", "inputs"),
    "W": ("gradients of weights", "weights"),
}


def memory_rows(ranks: Sequence[Line]) -> BarRows:
    """The peak bytes of each category, with a row for each rank."""
    categories = dict.fromkeys(name for rank in ranks for name in rank["memory"])

    def peak(rank: Line, category: str) -> float:
        return float(rank["memory"].get(category, {}).get("peak", 0))

    rows = []
    for category in categories:
        if not any(peak(rank, category) for rank in ranks):
            continue
        values = _by_rank(ranks, [peak(rank, category) for rank in ranks])
        for i, (name, nbytes) in enumerate(values):
            text = bytes_text(nbytes)
            bar = Bar(start=0.0, end=nbytes, meaning=meaning_of(category), tip=f"{name}: {text}")
            rows.append(Row(name=name, bars=[bar], total=text, group="" if i else category))
    return BarRows(rows=rows, legend={})


def phase_rows(ranks: Sequence[Line]) -> BarRows | None:
    """What each rank spent its time on, as a share of it; None if nothing was measured."""
    measured = [rank for rank in ranks if sum(rank.get("phases", {}).values()) > 0]
    if not measured:
        return None
    if len(measured) > MOST_ROWS:  # those that wait least, as most, and most hold up the others
        order = sorted(measured, key=lambda rank: rank["phases"].get("communication", 0.0))
        measured = [order[0], order[len(order) // 2], order[-1]]
    rows = []
    for rank in measured:
        spans = {phase: rank["phases"].get(phase, 0.0) for phase in PHASES}
        total, start, bars = sum(spans.values()), 0.0, []
        for phase, seconds in spans.items():
            share = 100 * seconds / total
            text, tip = f"{share:.0f}%", f"{PHASE_NAMES[phase]}: {seconds:,.2f} s, {share:.1f}%"
            bars.append(Bar(start=start, end=start + share, meaning=phase, text=text, tip=tip))
            start += share
        rows.append(Row(name=rank_name(rank), bars=bars, total=f"{total:,.1f} s"))
    legend = {p: PHASE_NAMES[p] for p in PHASES if any(r["phases"].get(p) for r in measured)}
    return BarRows(
        rows=rows, legend=legend, axis="share of the time of all steps but the first (%)"
    )


def timeline_rows(line: Line) -> BarRows:
    """The timelines, one below the other, with a row for each rank and a bar for each action."""
    rows, letters = [], set()
    for name, steps in line["timelines"].items():
        by_rank: dict[int, list[Bar]] = {}
        for rank, what, start, end in steps:
            letter = next((char for char in what if char in ACTIONS), "F")
            letters.add(letter)
            tip = f"{what}: {1e3 * start:,.3f} ms, for {1e3 * (end - start):,.3f} ms"
            bar = Bar(
                start=1e3 * start, end=1e3 * end, meaning=ACTIONS[letter][1], text=what, tip=tip
            )
            by_rank.setdefault(rank, []).append(bar)
        end = max((bar.end for bars in by_rank.values() for bar in bars), default=0.0)
        for i, rank in enumerate(by_rank):
            busy = sum(bar.end - bar.start for bar in by_rank[rank]) / end if end else 0.0
            rows.append(
                Row(
                    name=f"rank {rank}",
                    bars=by_rank[rank],
                    total=f"{100 * busy:.0f}% busy",
                    group="" if i else name,
                )
            )
    legend = {ACTIONS[x][1]: ACTIONS[x][0] for x in ACTIONS if x in letters}
    return BarRows(rows=rows, legend=legend, axis="time since the step began (ms)")


def unit_rows(line: Line) -> BarRows:
    """When which unit of an ``FSDP`` was gathered in a step."""
    by_unit: dict[str, list[Bar]] = {}
    for unit, start, end, _ in line["units"]:
        tip = f"{unit}: gathered from {1e3 * start:,.2f} to {1e3 * end:,.2f} ms"
        bar = Bar(start=1e3 * start, end=1e3 * end, meaning="gathered", tip=tip)
        by_unit.setdefault(unit, []).append(bar)
    return BarRows(
        rows=[Row(name=unit, bars=bars, total=f"{len(bars)}×") for unit, bars in by_unit.items()],
        legend={"gathered": "gathered: all parameters of the unit can be used"},
        axis="time since the step began (ms)",
        end=1e3 * line["time_s"][-1],
    )


def traffic_rows(ranks: Sequence[Line]) -> BarRows:
    """The bytes of each collective of each group, for one rank of the group on average.

    Those with less than ``LEAST_SHOWN`` of the largest are left out.
    """
    rows, volumes, last_group = [], list[tuple[str, str, float]](), None
    for group, op, totals in traffic(ranks):
        volumes.append((group, op, statistics.fmean(total["nbytes"] for total in totals)))
    least = LEAST_SHOWN * max((nbytes for *_, nbytes in volumes), default=0.0)
    for group, op, nbytes in volumes:
        if nbytes < least or not nbytes:
            continue
        bar = Bar(start=0.0, end=nbytes, meaning="communication", tip=bytes_text(nbytes))
        title = f"group {group}, {members(ranks, group)}" if group != last_group else ""
        rows.append(Row(name=op, bars=[bar], total=bytes_text(nbytes), group=title))
        last_group = group
    return BarRows(rows=rows, legend={})


def traffic(ranks: Sequence[Line]) -> list[tuple[str, str, list[Line]]]:
    """Group, operation, and the totals of each rank that called it."""
    totals: dict[tuple[str, str], list[Line]] = {}
    for rank in ranks:
        for group, by_op in rank.get("groups", {"world": rank["comm"]}).items():
            for op, total in by_op.items():
                totals.setdefault((group, op), []).append(total)
    return [(group, op, each) for (group, op), each in sorted(totals.items())]


def members(ranks: Sequence[Line], group: str) -> str:
    """The ranks that called something in a group, as text."""
    called = [rank["rank"] for rank in ranks if group in rank.get("groups", {"world": {}})]
    if len(called) > 2 and called == [*range(called[0], called[-1] + 1)]:
        return f"ranks {called[0]} to {called[-1]}"
    shown = ", ".join(map(str, called[:MOST_ROWS])) + (", …" if len(called) > MOST_ROWS else "")
    return f"rank{'s' if len(called) != 1 else ''} {shown}"


def waits_table(waited_s: Sequence[Sequence[float]]) -> str:
    """Who was there before whom: a table with a row for each rank, as HTML.

    Of many ranks, those columns are shown that the others waited for most.
    """
    size = len(waited_s)
    totals = [sum(row[last] for row in waited_s) for last in range(size)]
    columns = sorted(sorted(range(size), key=lambda r: -totals[r])[:MOST_ROWS])
    rows = sorted(sorted(range(size), key=lambda r: -sum(waited_s[r]))[: 2 * MOST_ROWS])
    most = max((waited_s[r][last] for r in rows for last in columns), default=0.0) or 1.0

    def cell(seconds: float, *, is_self: bool) -> str:
        share = 0 if is_self else round(100 * seconds / most)
        text = "–" if is_self else f"{1e3 * seconds:,.0f} ms"
        return f'<td class="heat" style="--share:{share}">{text}</td>'

    head = "".join(f"<th>for rank {last}</th>" for last in columns)
    body = "".join(
        f"<tr><td>rank {r} waited</td>"
        + "".join(cell(waited_s[r][last], is_self=r == last) for last in columns)
        + "</tr>"
        for r in rows
    )
    sums = "".join(f"<td>{1e3 * totals[last]:,.0f} ms</td>" for last in columns)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{body}<tr><td>all ranks</td>{sums}</tr></tbody></table></div>"
    )


def rank_name(rank: Line) -> str:
    """The name of a row."""
    return str(rank["title"]) if "title" in rank else f"rank {rank['rank']}"


def _by_rank(ranks: Sequence[Line], values: Sequence[float]) -> list[tuple[str, float]]:
    """The value of each rank, or of many ranks the lowest, the median and the highest."""
    if len(ranks) <= MOST_ROWS:
        return list(zip(map(rank_name, ranks), values, strict=True))
    ordered = sorted(values)
    kinds = (("lowest rank", 0), ("median rank", len(ordered) // 2), ("highest rank", -1))
    return [(kind, ordered[place]) for kind, place in kinds]
