"""The parts of the page of two runs: what is the same, what differs, and their curves together."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from echelon.observe import rank_figures, run_sections
from echelon.observe.curves import PHASE_NAMES, running_median, smoothed
from echelon.observe.phases import PHASES
from echelon.observe.progress import duration_text
from echelon.observe.recorded_run import Line, RecordedRun
from echelon.page import Bar, BarRows, Chart, Curve, Row, Stroke, bytes_text, section, table

Pair = tuple[RecordedRun, RecordedRun]
_MEANINGS = ("curve", "second")  # of the colours of the first and of the second run


def pair_names(runs: Pair) -> tuple[str, str]:
    """The names of two runs, which differ."""
    first, second = (run.name for run in runs)
    return (first, second) if first != second else (f"{first} (A)", f"{second} (B)")


def pair_sections(runs: Pair) -> Iterator[str]:
    """The parts of the page, from top to bottom."""
    names = pair_names(runs)
    yield section("Numbers", "", table(("", *names, "B / A"), _numbers(runs)))
    about = "Smoothed training loss, and validation with dots."
    unit = runs[0].unit if runs[0].unit == runs[1].unit else ""
    label = f"loss ({unit})" if unit else "loss"
    by_step, by_time = (loss_chart_of_two(runs, axis, label) for axis in ("step", "time_s"))
    yield section("Loss", about, f'<div class="pair">{by_step.html()}{by_time.html()}</div>')
    speed = speed_chart_of_two(runs).html()
    yield section("Throughput", "Medians of 21 steps, of all ranks together.", speed)
    rows = phase_rows_of_two(runs)
    if rows is not None:
        yield section(
            "Time by phase", "Of rank 0, the mean of all steps but the first.", rows.html()
        )
    if all(run.ranks for run in runs):
        rows = _memory_rows(runs)
        yield section("Memory", "Of the rank that held most.", rows.html())
        heads = (
            "operation, group",
            *(f"{n}: {what}" for n in names for what in ("calls", "bytes")),
        )
        yield section("Communication per rank", "", table(heads, _traffic(runs)))
    for title, field in (("Environment", "environment"), ("Options", "config")):
        rows_of_facts, same = _differences(runs, field)
        about = f"{same} more are the same." if rows_of_facts else f"All {same} are the same."
        content = table(("", *names), rows_of_facts, is_prose=True) if rows_of_facts else ""
        yield section(f"{title}: differences", about, content)


def loss_chart_of_two(runs: Pair, axis: str, label: str) -> Chart:
    """Both losses over steps or over time."""
    curves = []
    for run, name, meaning in zip(runs, pair_names(runs), _MEANINGS, strict=True):
        curves.append(
            Curve(
                name=name,
                x=[line[axis] for line in run.kept],
                y=smoothed([line["loss"] for line in run.kept]),
                meaning=meaning,
            )
        )
        curves.append(
            Curve(
                name=f"{name}, validation",
                x=[line[axis] for line in run.evaluations],
                y=[line["loss"] for line in run.evaluations],
                meaning=meaning,
                stroke=Stroke.DOTS,
            )
        )
    x_label = "step" if axis == "step" else "time since the start (s)"
    return Chart(curves=curves, x_label=x_label, y_label=label, height=260)


def speed_chart_of_two(runs: Pair) -> Chart:
    """Both throughputs over steps."""
    curves = []
    for run, name, meaning in zip(runs, pair_names(runs), _MEANINGS, strict=True):
        medians = running_median([line["tokens_per_s"] for line in run.kept])
        x = [line["step"] for line in run.kept]
        curves.append(Curve(name=name, x=x, y=medians, meaning=meaning))
    return Chart(curves=curves, x_label="step", y_label="tokens per second", from_zero=True)


def phase_rows_of_two(runs: Pair) -> BarRows | None:
    """What rank 0 of both runs spent the time of a step on; None if it was not measured."""
    rows, phases_used = [], set()
    for run, name in zip(runs, pair_names(runs), strict=True):
        lines = [line["phases"] for line in run.kept if line.get("phases")]
        if not lines:
            return None
        start, bars = 0.0, []
        for phase in PHASES:
            mean_ms = 1e3 * statistics.fmean(line.get(phase, 0.0) for line in lines)
            tip = f"{PHASE_NAMES[phase]}: {mean_ms:,.1f} ms"
            text = f"{mean_ms:,.0f}"
            bars.append(Bar(start=start, end=start + mean_ms, meaning=phase, text=text, tip=tip))
            start += mean_ms
            phases_used |= {phase} if mean_ms else set()
        rows.append(Row(name=name, bars=bars, total=f"{start:,.0f} ms"))
    legend = {phase: PHASE_NAMES[phase] for phase in PHASES if phase in phases_used}
    return BarRows(rows=rows, legend=legend, axis="time of a step (ms)")


def _memory_rows(runs: Pair) -> BarRows:
    names = pair_names(runs)
    summaries = [
        {
            "title": name,
            "memory": {
                category: {"peak": max(r["memory"].get(category, {}).get("peak", 0) for r in ranks)}
                for category in dict.fromkeys(c for r in ranks for c in r["memory"])
            },
        }
        for name, ranks in zip(names, (run.ranks for run in runs), strict=True)
    ]
    return rank_figures.memory_rows(summaries)


def _numbers(runs: Pair) -> Iterator[tuple[str, str, str, str]]:
    def row(name: str, values: Sequence[float | None], text: str = "{:,.4g}") -> tuple[str, ...]:
        first, second = values
        ratio = f"{second / first:.3f}" if first and second else ""
        shown = ("–" if value is None else text.format(value) for value in values)
        return name, *shown, ratio

    def of_both(value: object) -> list[float | None]:
        return [value(run) for run in runs]  # type: ignore[operator]

    rows = [
        row("last training loss", of_both(lambda run: run.kept[-1]["loss"] if run.kept else None)),
        row(
            "last validation loss",
            of_both(lambda run: run.evaluations[-1]["loss"] if run.evaluations else None),
        ),
        row("steps", of_both(lambda run: run.kept[-1]["step"] if run.kept else None), "{:,}"),
        row(
            "tokens per second, median",
            of_both(lambda run: run_sections.median_speed(run) if run.kept else None),
            "{:,.0f}",
        ),
        row("ranks", of_both(lambda run: run.start["ranks"]), "{:,}"),
    ]
    peaks = of_both(lambda run: max((r["process_peak"] for r in run.ranks), default=None))
    seconds = of_both(lambda run: run.seconds)
    for name, values, shown in (
        ("process memory, peak", peaks, bytes_text),
        ("time in all", seconds, duration_text),
    ):
        cells = row(name, values)
        texts = ("–" if value is None else shown(value) for value in values)
        rows.append((name, *texts, cells[-1]))
    return iter(rows)  # type: ignore[arg-type]


def _traffic(runs: Pair) -> list[tuple[str, ...]]:
    totals = [
        {(op, group): each for group, op, each in rank_figures.traffic(run.ranks)} for run in runs
    ]
    rows = []
    for op, group in dict.fromkeys([*totals[0], *totals[1]]):
        cells: list[str] = []
        for by_call in totals:
            each: list[Line] = by_call.get((op, group), [])
            if not each:
                cells += ["–", "–"]
                continue
            cells.append(f"{sum(total['calls'] for total in each) / len(each):,.0f}")
            cells.append(bytes_text(sum(total["nbytes"] for total in each) / len(each)))
        rows.append((f"{op}, {group}", *cells))
    return rows


def _differences(runs: Pair, field: str) -> tuple[list[tuple[str, str, str]], int]:
    """The facts that differ, and how many do not."""
    first, second = (run.start.get(field, {}) for run in runs)
    names = dict.fromkeys([*first, *second])
    rows = [
        (name, str(first.get(name, "–")), str(second.get(name, "–")))
        for name in names
        if first.get(name) != second.get(name)
    ]
    return rows, len(names) - len(rows)
