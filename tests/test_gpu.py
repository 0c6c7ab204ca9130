"""The driver of ``make gpu`` goes on past failures and hangs, and its page names them."""

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALONE = {
    "variant": "one process alone",
    "num_params": 10**9,
    "num_units": 10,
    "tokens": 1000,
    "step_ms": 100.0,
    "issue_ms": 10.0,
    "cpu_ms": 9.0,
    "steps_ms": [],
    "peak_bytes": 2**30,
    "first_loss": 2.0,
    "last_loss": 1.0,
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    yield gpu
    for name in ("gpu", "gpu_page"):
        sys.modules.pop(name)


@pytest.mark.slow
def test_what_fails_and_what_hangs_is_noted_and_the_next_part_runs(
    gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step = "import json; print('RESULT ' + json.dumps({}))"
    fast = {**ALONE, "variant": "echelon FSDP", "step_ms": 50.0, "cpu_ms": 10.0}
    test = 'print(\'RESULT \' + \'{"test": "a test", "error": "E: wrong"}\'); exit(1)'
    slow = 'import time; print(\'RESULT {"test": "first", "error": ""}\', flush=True); '
    parts = [
        gpu.Part("tests fsdp", ("-c", test), 20.0),
        gpu.Part("tests ddp", ("-c", slow + "time.sleep(100)"), 1.5),
        gpu.Part("steps torn", ("-c", "import os; print('lost'); os.abort()"), 20.0),
        gpu.Part("steps alone", ("-c", step.format(ALONE)), 20.0),
        gpu.Part("steps FSDP2", ("-c", step.format({**ALONE, "variant": "FSDP2"})), 20.0),
        gpu.Part("steps FSDP", ("-c", step.format(fast)), 20.0),
    ]
    monkeypatch.setattr(gpu, "parts_of", lambda device, tiny: parts)
    monkeypatch.setattr(gpu, "candidates", lambda: [sys.executable])
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    endings = [row["ending"] for row in report["parts"]]
    assert endings == ["exit code 1", "killed after 2 s", "exit code -6", *["exit code 0"] * 3]
    page = (tmp_path / "gpu.md").read_text()
    for line in (
        "- tests fsdp, a test: E: wrong",
        "- tests ddp: killed after 2 s: RESULT",
        "- steps torn: exit code -6: lost",
        "| fsdp | 0 | 1 |",
        "| ddp | 1 | 0 |",
        "| echelon FSDP | 50.00 | 0.50 | 20,000 | 1.00 | 10.00 | 10.00 | 100 | 1.0000 |",
    ):
        assert line in page


@pytest.mark.slow
def test_parts_for_which_no_time_is_left_are_named(
    gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "candidates", lambda: [sys.executable])
    assert gpu.main(["--device", "cpu", "--minutes", "0", "--out", str(tmp_path)]) == 1
    page = (tmp_path / "gpu.md").read_text()
    assert "- tests fsdp: no time was left" in page
    assert "- steps profile: no time was left" in page


def test_a_machine_without_torch_gets_a_page_that_says_so(
    gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    os.chmod(python, 0o755)
    monkeypatch.setattr(gpu, "candidates", lambda: [str(python)])
    assert gpu.main(["--out", str(tmp_path)]) == 1
    page = (tmp_path / "gpu.md").read_text()
    assert f"- `{python}`: ModuleNotFoundError: No module named 'torch'" in page


def test_all_parts_together_may_take_twenty_minutes_and_their_programs_are_there(gpu) -> None:
    parts = gpu.parts_of("cuda", tiny=False)
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        if part.command[0] == "-m":
            assert (ROOT / "tests" / "cuda" / f"{part.command[-1]}.py").exists()
        else:
            assert Path(part.command[0]).exists()
