"""The reports of real runs of each technique, as a browser shows them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echelon.observe import write_comparison, write_report
from tests.children import environ
from tests.integrations.browser.page_findings import THEMES, WIDTHS, open_browser, shown
from tests.observe.runs import run_lines, write_run

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "train_gpt.py"
SMALL = ["--steps", "24", "--eval-every", "8", "--batch-size", "8", "--context", "32"]
SMALL += ["--layers", "4", "--width", "32", "--heads", "2"]
RUNS = {
    "ddp": (2, ["--save-every", "10"]),
    "fsdp": (2, ["--technique", "fsdp", "--save-every", "10"]),
    "pipeline": (2, ["--technique", "pipeline", "--schedule", "zb-h1"]),
    "plan": (4, ["--plan", "pp=2,shard=2", "--microbatches", "4"]),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reports")
    lines = (f"line {i} of a text that repeats itself\n" for i in range(2000))
    (path / "prose.txt").write_text("".join(lines))
    return path


def run_folder(folder: Path, name: str) -> Path:
    """The folder of a run, which is made when it is wanted first."""
    run = folder / "runs" / name
    if not run.exists():
        ranks, options = RUNS[name]
        command = [sys.executable, "-m", "echelon", "run", "--ranks", str(ranks), str(SCRIPT)]
        command += [*SMALL, "--data", "prose.txt", "--name", name, *options]
        env = environ(TMPDIR=str(folder))
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"the report of this run is runs/{name}/report.html" in done.stdout
    return run


def check(browser: Any, page: Path) -> None:
    """Look at a page in all windows; the pictures stay beside it."""
    grounds = set()
    for width in WIDTHS:
        for theme in THEMES:
            with shown(browser, page, width, theme) as view:
                picture = page.with_name(f"{page.stem}-{width}-{theme}.png")
                view.page.screenshot(path=picture, full_page=True)
                ground = "getComputedStyle(document.body).backgroundColor"
                grounds.add((theme, view.page.evaluate(ground)))
                assert view.findings() == [], (width, theme)
    assert len(grounds) == len(THEMES)  # each theme has one ground of its own


@pytest.mark.parametrize("name", RUNS)
def test_the_report_of_each_technique_has_no_defect(browser: Any, folder: Path, name: str) -> None:
    page = run_folder(folder, name) / "report.html"
    assert page.stat().st_size < 200_000
    check(browser, page)


def test_the_page_of_two_runs_has_no_defect(browser: Any, folder: Path) -> None:
    check(browser, write_comparison(run_folder(folder, "ddp"), run_folder(folder, "fsdp")))


def test_the_report_of_a_restarted_job_on_many_ranks_has_no_defect(
    browser: Any, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", ranks=64, finished=False)
    again = run_lines(ranks=64, first=31)
    again[0] |= {"unix_s": again[0]["unix_s"] + 100.0, "attempt": 1}
    again += [{"kind": "failure", "text": "RankFailed: " + "a long line " * 30}]
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in again if line["kind"] != "end")
    check(browser, write_report(run))


def test_the_values_under_the_pointer_are_shown(browser: Any, tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", ranks=2))
    with shown(browser, page, 390, "light") as view:
        plot = view.page.locator(".plot").first
        plot.hover(position={"x": plot.bounding_box()["width"] - 2, "y": 50})
        text = view.page.locator(".tip").inner_text()
        assert "step 40" in text
        assert "validation: 3.125" in text
        assert view.findings() == []
        view.page.mouse.move(5, 5)
        assert view.page.locator(".tip").count() == 0
