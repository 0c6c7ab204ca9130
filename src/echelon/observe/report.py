"""``report.html``: one page that shows a run, made from its ``metrics.jsonl`` alone.

Everything is inside the file, plotly's script too, so the page can be sent to someone.
"""

from __future__ import annotations

import html
import importlib.util
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.errors import ArgumentError
from echelon.observe.metrics import check_run, read_metrics
from echelon.observe.progress import bytes_text, duration_text

Line = dict[str, Any]

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f4f6f9; color: #1f2933; line-height: 1.5;
  font: 15px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }
header h1 { margin: 0; font-size: 28px; font-weight: 650; letter-spacing: -0.01em; }
header p { margin: 4px 0 20px; color: #616e7c; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.fact, section { background: white; border: 1px solid #e1e6ec; border-radius: 10px; }
.fact { padding: 12px 16px; }
.fact b { display: block; font-size: 21px; font-weight: 600; white-space: nowrap; }
.fact span { color: #616e7c; font-size: 13px; }
section { margin-top: 16px; padding: 18px 22px; overflow-x: auto; }
h2 { margin: 0 0 2px; font-size: 18px; font-weight: 600; }
h2::first-letter { text-transform: uppercase; }
section > p { margin: 0 0 8px; color: #616e7c; font-size: 13.5px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { padding: 5px 12px; text-align: right; border-top: 1px solid #e8ecf1;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
thead th { border-top: 0; color: #616e7c; font-weight: 500; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
pre { margin: 8px 0 0; padding: 14px 16px; background: #f7f9fb; border-radius: 8px;
  font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr));
  gap: 6px 20px; margin: 8px 0 0; font-size: 13.5px; }
dl div { display: flex; justify-content: space-between; gap: 10px; }
dt { color: #616e7c; } dd { margin: 0; overflow-wrap: anywhere; text-align: right; }
"""


def write_report(folder: str | os.PathLike[str]) -> Path | None:
    """Write ``report.html`` beside the ``metrics.jsonl`` in ``folder``.

    Returns:
        where the page is; None, with a warning, where plotly is not installed.

    Raises:
        ArgumentError: there is no ``metrics.jsonl``, or it holds no run of this format.
    """
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
    page = Path(folder) / "report.html"
    part = page.with_suffix(".part")
    part.write_text(_page(start, lines), encoding="utf-8")
    part.replace(page)
    return page


def _page(start: Line, lines: Sequence[Line]) -> str:
    from plotly.offline import get_plotlyjs

    name = html.escape(str(start["name"]))
    size = start["ranks"]
    subtitle = (
        f"{size} rank{'s' if size != 1 else ''} · {start['backend']} · {start['device']} · "
        f"started {start['time']}"
    )
    if not any(line["kind"] == "end" for line in lines):
        subtitle += " · did not finish"
    body = "\n".join([_facts(start, lines), *_sections(start, lines)])
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{name} · echelon</title>\n'
        f"<style>{STYLE}</style>\n<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{name}</h1><p>{html.escape(subtitle)}</p></header>\n{body}\n"
        "</main>\n</body>\n</html>\n"
    )


def _facts(start: Line, lines: Sequence[Line]) -> str:
    """The numbers that people look for first."""
    steps, evaluations, ranks = _of(lines, "step"), _of(lines, "evaluation"), _ranks(lines)
    unit = start.get("unit") or ""
    facts: list[tuple[str, str]] = []
    if evaluations:
        facts.append((_number(evaluations[-1]["loss"]), f"validation loss, {unit}".rstrip(", ")))
    references = start.get("references", {})
    facts += [(_number(v), f"{name}, {unit}".rstrip(", ")) for name, v in references.items()]
    if steps:
        speeds = sorted(line["tokens_per_s"] for line in steps)
        facts.append((f"{steps[-1]['step']:,}", f"of {start['total_steps']:,} steps"))
        facts.append((f"{speeds[len(speeds) // 2]:,.0f}", "tokens/s, median"))
    if ranks:
        facts.append((bytes_text(max(r["process_peak"] for r in ranks)), "process memory, peak"))
    if lines[-1].get("time_s") is not None:
        facts.append((duration_text(lines[-1]["time_s"]), "in all"))
    cells = "".join(
        f'<div class="fact"><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>'
        for value, label in facts
    )
    return f'<div class="facts">{cells}</div>'


def _sections(start: Line, lines: Sequence[Line]) -> list[str]:
    """The drawings, tables and texts; those without data are left out."""
    from echelon.observe import figures

    steps, evaluations, ranks = _of(lines, "step"), _of(lines, "evaluation"), _ranks(lines)
    parts = []
    if steps or evaluations:
        figure = figures.loss_figure(steps, evaluations, start)
        parts.append(_section("Loss", "Lower is better.", _drawing(figure)))
    if steps:
        figure = figures.speed_figure(steps)
        about = "All ranks together; evaluation is not counted."
        parts.append(_section("Throughput", about, _drawing(figure)))
    if ranks:
        about = (
            "The most that was held at one time; categories need not peak together. "
            + _process_text(ranks)
        )
        drawing = _drawing(figures.memory_figure(ranks))
        parts.append(_section("Memory per category", about, drawing))
    for line in _of(lines, "memory"):
        about = (
            f"Of rank {line['rank']}, looked at whenever a unit was gathered or released, or "
            "something was communicated. Activations are not counted."
        )
        drawing = _drawing(figures.memory_over_time_figure(line))
        parts.append(_section(f"Memory over step {line['step']}", about, drawing))
    if any(rank["comm"] for rank in ranks):
        about = (
            "Volume is the size of the tensors that calls were about; "
            "time waited is how long a rank was held up."
        )
        content = _drawing(figures.comm_figure(ranks)) + _comm_table(ranks)
        parts.append(_section("Communication per operation", about, content))
    for line in _of(lines, "timelines"):
        about = "What each rank computed and when; between two bars it waited. " + _spans(line)
        drawing = _drawing(figures.timelines_figure(line))
        parts.append(_section(f"Schedule of step {line['step']}", about, drawing))
    for note in _of(lines, "note"):
        parts.append(_section(note["title"], "", f"<pre>{html.escape(note['text'])}</pre>"))
    if start.get("config"):
        rows = "".join(
            f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(str(value))}</dd></div>"
            for key, value in start["config"].items()
        )
        parts.append(_section("Options", "", f"<dl>{rows}</dl>"))
    return parts


def _section(title: str, about: str, content: str) -> str:
    text = f"<p>{html.escape(about)}</p>" if about else ""
    return f"<section><h2>{html.escape(title)}</h2>{text}{content}</section>"


def _drawing(figure: Any) -> str:
    settings = {"displaylogo": False, "responsive": True, "displayModeBar": False}
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config=settings))


def _comm_table(ranks: Sequence[Line]) -> str:
    """The numbers behind the drawing: sums over ranks, and what the ranks waited."""
    operations = dict.fromkeys(op for rank in ranks for op in rank["comm"])
    rows = []
    for op in operations:
        totals = [rank["comm"][op] for rank in ranks if op in rank["comm"]]
        calls = sum(total["calls"] for total in totals)
        nbytes = sum(total["nbytes"] for total in totals)
        waits = [total["wait_s"] for total in totals]
        cells = (
            html.escape(op),
            f"{calls / len(ranks):,.0f}",
            bytes_text(nbytes / len(ranks)),
            bytes_text(nbytes / calls if calls else 0),
            f"{sum(waits) / len(ranks):,.3f} s",
            f"{max(waits):,.3f} s",
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = (
        "operation",
        "calls per rank",
        "volume per rank",
        "volume per call",
        "waited, mean",
        "waited, most",
    )
    head = "".join(f"<th>{title}</th>" for title in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _spans(line: Line) -> str:
    """How long each timeline is."""
    spans = {
        name: max(end for *_, end in steps) - min(start for *_, start, _ in steps)
        for name, steps in line["timelines"].items()
        if steps
    }
    return ", ".join(f"{name}: {1e3 * span:,.4g} ms" for name, span in spans.items()) + "."


def _of(lines: Sequence[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]


def _ranks(lines: Sequence[Line]) -> list[Line]:
    """The summary of each rank; empty where the run did not finish."""
    found = _of(lines, "ranks")
    return list(found[-1]["ranks"]) if found else []


def _process_text(ranks: Sequence[Line]) -> str:
    """What whole processes held; simulated ranks share one."""
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
