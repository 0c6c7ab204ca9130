"""The parts of the page of one run: titles, sentences and drawings, for what there is data of."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from echelon.observe import curves, rank_figures
from echelon.observe.progress import duration_text
from echelon.observe.recorded_run import Line, RecordedRun
from echelon.page import bytes_text, definitions, facts, section, table

VERDICT = "Who held us up"  # the note that stands above the drawings
_MOST_LINES, _FIRST_LINES = 14, 6  # of a note


def run_facts(run: RecordedRun) -> str:
    """The most important numbers of a run."""
    values: list[tuple[str, str]] = []
    unit = f", {run.unit}" if run.unit else ""
    if run.evaluations:
        values.append((number_text(run.evaluations[-1]["loss"]), f"validation loss{unit}"))
    elif run.kept:
        values.append((number_text(run.kept[-1]["loss"]), f"training loss{unit}"))
    references = run.start["references"].items()
    values += [(number_text(value), f"{name}{unit}") for name, value in references]
    if run.kept:
        values.append((f"{run.kept[-1]['step']:,}", f"of {run.start['total_steps']:,} steps"))
        values.append((f"{median_speed(run):,.0f}", "tokens/s, median"))
        if run.utilization is not None:
            share = 100 * median_speed(run) * run.utilization
            values.append((f"{share:.1f}%", "utilization (MFU), median"))
        elif run.start.get("flops_per_token"):
            flops = median_speed(run) * run.start["flops_per_token"] / run.start["ranks"]
            values.append((f"{flops / 1e9:,.1f} GFLOP/s", "a rank, median"))
    peak = max((r["process_peak"] for r in run.ranks), default=0) or max(
        (line.get("process_peak", 0) for line in run.steps), default=0
    )
    if peak:
        values.append((bytes_text(peak), "process memory, peak"))
    values.append((duration_text(run.seconds), "in all" if run.ended else "so far"))
    return facts(values)


def run_sections(run: RecordedRun) -> Iterator[str]:
    """The parts of the page, from top to bottom."""
    for note in _notes(run):
        if note["title"] == VERDICT:
            yield section(note["title"], "", note_html(note["text"]))
    yield from _over_steps(run)
    yield from _of_time(run)
    yield from _of_memory(run)
    yield from _of_communication(run)
    for line in run.of_kind.get("timelines", []):
        about = "What each rank computed and when; between two bars it waited. " + spans_text(line)
        drawing = rank_figures.timeline_rows(line).html()
        yield section(f"Pipeline, step {line['step']}", about, drawing)
    for note in _notes(run):
        if note["title"] != VERDICT:
            yield section(note["title"], "", note_html(note["text"]))
    yield from _of_origin(run)


def _notes(run: RecordedRun) -> list[Line]:
    return run.of_kind.get("note", [])


def _over_steps(run: RecordedRun) -> Iterator[str]:
    if run.steps or run.evaluations:
        yield section(
            "Loss",
            "Smoothed: the mean of the steps so far, in which older ones count less.",
            curves.loss_chart(run).html(),
        )
    values = curves.values_charts(run)
    if values:
        drawings = "".join(chart.html() for _, chart in values)
        titles = ", ".join(title for title, _ in values)
        yield section(titles, "", f'<div class="pair">{drawings}</div>')
    if run.steps:
        about = f"{median_speed(run):,.0f} tokens per second of all ranks together, in the median."
        about += " Evaluation is not counted."
        if run.utilization is not None:
            per_token, peak = (flops_text(run, f) for f in ("flops_per_token", "peak_flops"))
            about += (
                f" Utilization (MFU) is the model's operations, {per_token} a token, as a share of "
                f"{peak}/s that a rank could do."
            )
        yield section("Throughput", about, curves.speed_chart(run).html())


def _of_time(run: RecordedRun) -> Iterator[str]:
    chart, rows = curves.phases_chart(run), rank_figures.phase_rows(run.ranks)
    if chart is None and rows is None:
        return
    about = (
        "Waiting is communication that the rank could not hide: for data of others, or for others "
        "to come. Without a processor, the rank could run and something else ran."
    )
    content = (rows.html() if rows is not None else "") + (
        f"<h3>Over the run, rank 0</h3>{chart.html()}" if chart is not None else ""
    )
    yield section("Time by phase", about, content)


def _of_memory(run: RecordedRun) -> Iterator[str]:
    chart = curves.memory_chart(run)
    if run.ranks or chart is not None:
        about = ""
        if run.ranks:
            about = "The most that was held at one time; categories need not peak together. "
            about += process_text(run.ranks)
        content = rank_figures.memory_rows(run.ranks).html() if run.ranks else ""
        if chart is not None:
            content += f"<h3>Over the run, rank 0, after each step</h3>{chart.html()}"
        yield section("Memory", about, content)
    for line in run.of_kind.get("memory", []):
        about = (
            f"Of rank {line['rank']}, looked at whenever a unit was gathered or released, or "
            "something was communicated. Activations are not counted."
        )
        content = curves.memory_of_step_chart(line).html()
        if line.get("units"):
            content += (
                "<h3>Gathered units</h3><p>Where ranks share memory, a gathered unit is mapped, "
                "not copied, and takes no memory of its own.</p>"
                + rank_figures.unit_rows(line).html()
            )
        yield section(f"Memory over step {line['step']}", about, content)


def _of_communication(run: RecordedRun) -> Iterator[str]:
    if any(rank["comm"] for rank in run.ranks):
        about = (
            "Volume is the size of the tensors that calls of one rank were about, on average. "
            "Calls with less than a thousandth of the largest volume stand in the table only."
        )
        content = rank_figures.traffic_rows(run.ranks).html() + (
            f"<details><summary>Calls and waiting</summary>{traffic_table(run.ranks)}</details>"
        )
        yield section("Communication", about, content)
    for line in run.of_kind.get("waits", [])[-1:]:
        about = (
            "By how long a rank was there before the one that came last, in the last 4,096 "
            "collectives. What it was late already in the call before is not counted again."
        )
        yield section("Who waited for whom", about, rank_figures.waits_table(line["waited_s"]))


def _of_origin(run: RecordedRun) -> Iterator[str]:
    starts = run.of_kind.get("start", [])
    facts_of_run = dict(starts[-1].get("environment", {}))
    if facts_of_run:
        command = f"<pre>{html.escape(facts_of_run.pop('command', ''))}</pre>"
        yield section("Environment", "", command + definitions(facts_of_run.items()))
    if run.start["config"]:
        options = ((key, str(value)) for key, value in run.start["config"].items())
        yield section("Options", "", definitions(options))


def note_html(text: str) -> str:
    """A text; a long one is shown when it is asked for."""
    lines = text.splitlines()
    shown = f"<pre>{html.escape(text)}</pre>"
    if len(lines) <= _MOST_LINES:
        return shown
    rest = html.escape("\n".join(lines[_FIRST_LINES:]))
    return (
        f"<pre>{html.escape(chr(10).join(lines[:_FIRST_LINES]))}</pre>"
        f"<details><summary>{len(lines) - _FIRST_LINES} more lines</summary>"
        f"<pre>{rest}</pre></details>"
    )


def flops_text(run: RecordedRun, field: str) -> str:
    """A number of operations of a run, in a unit that reads well."""
    value = float(run.start[field])
    for power, unit in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if value >= power:
            return f"{value / power:,.3g} {unit}"
    return f"{value:,.0f} FLOP"


def traffic_table(ranks: Sequence[Line]) -> str:
    """Calls, bytes and waiting of each collective of each group."""
    rows = []
    for group, op, totals in rank_figures.traffic(ranks):
        calls = sum(total["calls"] for total in totals) / len(totals)
        nbytes = sum(total["nbytes"] for total in totals) / len(totals)
        waits = [total["wait_s"] for total in totals]
        rows.append(
            (
                f"{op}, {group}",
                f"{calls:,.0f}",
                bytes_text(nbytes),
                bytes_text(nbytes / calls if calls else 0),
                f"{sum(waits) / len(waits):,.3f} s",
                f"{max(waits):,.3f} s",
            )
        )
    heads = (
        "operation, group",
        "calls per rank",
        "volume per rank",
        "volume per call",
        "waited, mean",
        "waited, most",
    )
    return table(heads, rows)


def median_speed(run: RecordedRun) -> float:
    """Tokens per second of the median step; there are steps."""
    speeds = sorted(line["tokens_per_s"] for line in run.kept)
    return float(speeds[len(speeds) // 2])


def spans_text(line: Line) -> str:
    """A text with the length of each timeline."""
    spans = {
        name: max(end for *_, end in steps) - min(start for *_, start, _ in steps)
        for name, steps in line["timelines"].items()
        if steps
    }
    return ", ".join(f"{name}: {1e3 * span:,.4g} ms" for name, span in spans.items()) + "."


def process_text(ranks: Sequence[Line]) -> str:
    """A sentence about the memory of whole processes; simulated ranks share one process."""
    peaks = {rank["pid"]: rank["process_peak"] for rank in ranks}
    also = "with activations, the data and PyTorch itself."
    if len(peaks) == 1:
        shared = f", which all {len(ranks)} ranks share," if len(ranks) > 1 else ""
        return f"The process{shared} held {bytes_text(max(peaks.values()))}, {also}"
    low, high = bytes_text(min(peaks.values())), bytes_text(max(peaks.values()))
    held = low if low == high else f"{low} to {high}"
    return f"The process of a rank held {held}, {also}"


def number_text(value: float | None) -> str:
    """A loss, which may be None where it was not finite."""
    return "not finite" if value is None else f"{value:.3f}"
