"""``report.html``: a page that shows a run, made from its ``metrics.jsonl`` alone.

The file contains everything, also plotly's script, so it can be sent to someone.
"""

from __future__ import annotations

import html
import importlib.util
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon import checks
from echelon.errors import ArgumentError
from echelon.observe.metrics import check_run, read_metrics
from echelon.observe.progress import duration_text
from echelon.page import bytes_text, definitions, facts, page, section, table

Line = dict[str, Any]


def write_report(folder: str | os.PathLike[str]) -> Path | None:
    """Write ``report.html`` beside the ``metrics.jsonl`` in ``folder``.

    Returns:
        The path of the page; None, with a warning, if plotly is not installed.

    Raises:
        ArgumentError: there is no ``metrics.jsonl``, or it is not of a run in this format.
    """
    checks.path("folder", folder)
    lines = read_metrics(folder)
    start = next((line for line in lines if line["kind"] == "start"), None)
    if start is None:
        raise ArgumentError(f"{Path(folder) / 'metrics.jsonl'} has no 'start' line: not a run")
    check_run(lines)
    if importlib.util.find_spec("plotly") is None:
        warnings.warn(
            "plotly is not installed, so there is no report.html; metrics.jsonl has all numbers. "
            "Install the extra with: pip install 'echelon[plots]', then: "
            f"echelon report {folder}",
            stacklevel=2,
        )
        return None
    path = Path(folder) / "report.html"
    part = path.with_suffix(".part")
    part.write_text(_page(start, lines), encoding="utf-8")
    part.replace(path)
    return path


def _page(start: Line, lines: Sequence[Line]) -> str:
    from plotly.offline import get_plotlyjs

    size = start["ranks"]
    subtitle = (
        f"{size} rank{'s' if size != 1 else ''} · {start['backend']} · {start['device']} · "
        f"started {start['time']}"
    )
    if not any(line["kind"] == "end" for line in lines):
        subtitle += " · did not finish"
    body = [_facts(start, lines), *_sections(start, lines)]
    return page(str(start["name"]), subtitle, body, script=get_plotlyjs())


def _facts(start: Line, lines: Sequence[Line]) -> str:
    """The most important numbers of the run."""
    steps, evaluations, ranks = _of(lines, "step"), _of(lines, "evaluation"), _ranks(lines)
    unit = start.get("unit") or ""
    values: list[tuple[str, str]] = []
    if evaluations:
        values.append((_number(evaluations[-1]["loss"]), f"validation loss, {unit}".rstrip(", ")))
    references = start.get("references", {})
    values += [(_number(v), f"{name}, {unit}".rstrip(", ")) for name, v in references.items()]
    if steps:
        speeds = sorted(line["tokens_per_s"] for line in steps)
        values.append((f"{steps[-1]['step']:,}", f"of {start['total_steps']:,} steps"))
        values.append((f"{speeds[len(speeds) // 2]:,.0f}", "tokens/s, median"))
    if ranks:
        values.append((bytes_text(max(r["process_peak"] for r in ranks)), "process memory, peak"))
    if lines[-1].get("time_s") is not None:
        values.append((duration_text(lines[-1]["time_s"]), "in all"))
    return facts(values)


def _sections(start: Line, lines: Sequence[Line]) -> list[str]:
    """The drawings, tables and texts for which there are data."""
    from echelon.observe import figures

    steps, evaluations, ranks = _of(lines, "step"), _of(lines, "evaluation"), _ranks(lines)
    parts = []
    if steps or evaluations:
        figure = figures.loss_figure(steps, evaluations, start)
        parts.append(section("Loss", "Lower is better.", _drawing(figure)))
    if steps:
        figure = figures.speed_figure(steps)
        about = "All ranks together; evaluation is not counted."
        parts.append(section("Throughput", about, _drawing(figure)))
    if ranks:
        about = (
            "The most that was held at one time; categories need not peak together. "
            + _process_text(ranks)
        )
        drawing = _drawing(figures.memory_figure(ranks))
        parts.append(section("Memory per category", about, drawing))
    for line in _of(lines, "memory"):
        about = (
            f"Of rank {line['rank']}, looked at whenever a unit was gathered or released, or "
            "something was communicated. Activations are not counted."
        )
        drawing = _drawing(figures.memory_over_time_figure(line))
        parts.append(section(f"Memory over step {line['step']}", about, drawing))
    if any(rank["comm"] for rank in ranks):
        about = (
            "Volume is the size of the tensors that calls were about; "
            "time waited is how long a rank was held up."
        )
        content = _drawing(figures.comm_figure(ranks)) + _comm_table(ranks)
        parts.append(section("Communication per operation", about, content))
    for line in _of(lines, "timelines"):
        about = "What each rank computed and when; between two bars it waited. " + _spans(line)
        drawing = _drawing(figures.timelines_figure(line))
        parts.append(section(f"Schedule of step {line['step']}", about, drawing))
    for note in _of(lines, "note"):
        parts.append(section(note["title"], "", f"<pre>{html.escape(note['text'])}</pre>"))
    if start.get("config"):
        options = ((key, str(value)) for key, value in start["config"].items())
        parts.append(section("Options", "", definitions(options)))
    return parts


def _drawing(figure: Any) -> str:
    settings = {"displaylogo": False, "responsive": True, "displayModeBar": False}
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config=settings))


def _comm_table(ranks: Sequence[Line]) -> str:
    """A table of the calls, bytes and waiting times of each operation."""
    operations = dict.fromkeys(op for rank in ranks for op in rank["comm"])
    rows = []
    for op in operations:
        totals = [rank["comm"][op] for rank in ranks if op in rank["comm"]]
        calls = sum(total["calls"] for total in totals)
        nbytes = sum(total["nbytes"] for total in totals)
        waits = [total["wait_s"] for total in totals]
        cells = (
            op,
            f"{calls / len(ranks):,.0f}",
            bytes_text(nbytes / len(ranks)),
            bytes_text(nbytes / calls if calls else 0),
            f"{sum(waits) / len(ranks):,.3f} s",
            f"{max(waits):,.3f} s",
        )
        rows.append(cells)
    heads = (
        "operation",
        "calls per rank",
        "volume per rank",
        "volume per call",
        "waited, mean",
        "waited, most",
    )
    return table(heads, rows)


def _spans(line: Line) -> str:
    """A text with the length of each timeline."""
    spans = {
        name: max(end for *_, end in steps) - min(start for *_, start, _ in steps)
        for name, steps in line["timelines"].items()
        if steps
    }
    return ", ".join(f"{name}: {1e3 * span:,.4g} ms" for name, span in spans.items()) + "."


def _of(lines: Sequence[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]


def _ranks(lines: Sequence[Line]) -> list[Line]:
    """The summary of each rank; empty if the run did not finish."""
    summaries = _of(lines, "ranks")
    return list(summaries[-1]["ranks"]) if summaries else []


def _process_text(ranks: Sequence[Line]) -> str:
    """A sentence about the memory of whole processes; simulated ranks share one process."""
    peaks = {rank["pid"]: rank["process_peak"] for rank in ranks}
    also = "with activations, the data and PyTorch itself."
    if len(peaks) == 1:
        shared = f", which all {len(ranks)} ranks share," if len(ranks) > 1 else ""
        return f"The process{shared} held {bytes_text(max(peaks.values()))}, {also}"
    low, high = bytes_text(min(peaks.values())), bytes_text(max(peaks.values()))
    held = low if low == high else f"{low} to {high}"
    return f"The process of a rank held {held}, {also}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"
