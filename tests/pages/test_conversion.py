"""A plain script of PyTorch and its conversions: few lines differ, and the numbers are the same."""

import argparse
import difflib
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from echelon.launch.program import Program
from echelon.launch.simulated_job import run_threads
from tests.pages.code_blocks import ROOT

FOLDER = ROOT / "examples" / "conversion"
SMALL = ["--epochs", "2", "--context", "16", "--layers", "2", "--width", "16"]
MOST_LINES = {"ddp": 4, "fsdp": 6, "plan": 10}


def changes(name: str) -> tuple[int, list[str]]:
    """How many lines of code change in the plain script, and what a diff shows of them."""
    plain, converted = (
        (FOLDER / f"{script}.py").read_text().splitlines() for script in ("plain", name)
    )
    diff = list(difflib.ndiff(plain, converted))
    shown = [f"{line[0]}{line[2:]}" for line in diff if line[0] in "+-" and line[2:].strip()]
    matcher = difflib.SequenceMatcher(None, plain, converted, autojunk=False)
    count = 0
    for tag, start, stop, new_start, new_stop in matcher.get_opcodes():
        if tag != "equal":
            old, new = plain[start:stop], converted[new_start:new_stop]
            count += max(sum(bool(line.strip()) for line in lines) for lines in (old, new))
    return count, shown


@pytest.mark.parametrize("name", MOST_LINES)
def test_few_lines_of_a_script_change(name: str) -> None:
    count, _ = changes(name)
    assert 0 < count <= MOST_LINES[name]
    assert len((FOLDER / "plain.py").read_text().splitlines()) == 125


@pytest.mark.parametrize("name", MOST_LINES)
def test_the_pages_show_lines_of_the_diff(name: str) -> None:
    text = "".join((ROOT / page).read_text() for page in ("README.md", "docs/convert.md"))
    blocks = re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S)
    block = blocks[list(MOST_LINES).index(name)]
    marked = [line for line in block.splitlines() if line[:1] in ("+", "-")]
    assert marked
    assert set(marked) <= set(changes(name)[1])


@pytest.fixture
def plain_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """What the plain script prints in float64, for a small model and text."""
    (tmp_path / "text").write_bytes(Path(argparse.__file__).read_bytes()[:12000])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(sys, "argv", ["plain.py", *SMALL, "--data", "text", "--out", "plain.pt"])
    runpy.run_path(str(FOLDER / "plain.py"), run_name="__main__")
    yield capsys.readouterr().out.splitlines()
    torch.set_default_dtype(before)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("ddp", 2), ("fsdp", 4), ("plan", 4)])
def test_a_converted_script_has_the_losses_and_weights_of_the_plain_one(
    name: str, ranks: int, plain_losses: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*SMALL, "--data", "text", "--out", f"{name}.pt"]
    assert run_threads(Program(str(FOLDER / f"{name}.py")), options, ranks) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(plain_losses) == 2
    assert printed == [line for line in plain_losses for _ in range(ranks)]
    plain, converted = torch.load("plain.pt"), torch.load(f"{name}.pt")
    assert set(plain) == set(converted)
    for key in plain:  # sums over ranks run in another order
        torch.testing.assert_close(converted[key], plain[key], rtol=1e-9, atol=1e-12)
