"""``report.html``: a page that shows a run, made from its ``metrics.jsonl`` alone.

The file contains everything and loads nothing, so it can be sent to someone. While the run goes on,
the page loads itself again from time to time.
"""

from __future__ import annotations

import os
from pathlib import Path

from echelon import checks
from echelon.observe.metrics import read_metrics
from echelon.observe.recorded_run import RecordedRun
from echelon.observe.run_pair import pair_names, pair_sections
from echelon.observe.run_sections import run_facts, run_sections
from echelon.page import CHART_SCRIPT, CHART_STYLE, page
from echelon.process.atomic_files import replace_file

_AGAIN_S = 15  # between two loads of a page whose run goes on
_RELOAD = f"setTimeout(() => location.reload(), {1000 * _AGAIN_S});\n"


def write_report(folder: str | os.PathLike[str], *, live: bool = False) -> Path:
    """Write ``report.html`` beside the ``metrics.jsonl`` in ``folder``, in one piece.

    Args:
        live: whether the run goes on; then the page loads itself again.

    Returns:
        The path of the page.

    Raises:
        ArgumentError: there is no ``metrics.jsonl``, or it is not of a run in this format.
    """
    checks.path("folder", folder)
    checks.flag("live", live)
    run = read_run(folder)
    script = CHART_SCRIPT + (_RELOAD if live else "")
    content = page(
        run.name,
        _subtitle(run, live=live),
        [run_facts(run), *run_sections(run)],
        script=script,
        style=CHART_STYLE,
        dark=True,
    )
    return _write(Path(folder) / "report.html", content)


def write_comparison(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a page that compares two runs.

    Args:
        first: the folder of the run to compare with.
        second: the folder of the other run.
        path: of the page; None: ``compared-with-NAME.html`` in the folder of the second run.

    Raises:
        ArgumentError: a folder has no run in this format.
    """
    for name, folder in (("first", first), ("second", second)):
        checks.path(name, folder)
    runs = read_run(first), read_run(second)
    names = pair_names(runs)
    content = page(
        f"{names[0]} and {names[1]}",
        " · ".join(f"{letter}: {name}" for letter, name in zip("AB", names, strict=True)),
        pair_sections(runs),
        script=CHART_SCRIPT,
        style=CHART_STYLE,
        dark=True,
    )
    default = Path(second) / f"compared-with-{Path(first).resolve().name}.html"
    return _write(default if path is None else Path(path), content)


def read_run(folder: str | os.PathLike[str]) -> RecordedRun:
    """The run in a folder."""
    return RecordedRun.of(read_metrics(folder), str(Path(folder) / "metrics.jsonl"))


def _write(path: Path, content: str) -> Path:
    """Write a page so that a reader sees the old one or the new one."""
    replace_file(path, content.encode("utf-8", "backslashreplace"), sync=False)
    return path


def _subtitle(run: RecordedRun, *, live: bool) -> str:
    size = run.start["ranks"]
    parts = [f"{size} rank{'s' if size != 1 else ''}", run.start["backend"], run.start["device"]]
    parts.append(f"started {run.start['time']}")
    if run.restarts:
        times = len(run.restarts)
        parts.append(f"restarted {times} time{'s' if times != 1 else ''}")
    if live:
        parts.append("running: this page loads itself again")
    elif not run.ended:
        failures = [line["text"] for line in run.of_kind.get("failure", [])]
        parts.append(f"did not finish: {failures[-1]}" if failures else "did not finish")
    return " · ".join(parts)
