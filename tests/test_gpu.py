"""The driver of ``make gpu`` goes on past failures and hangs, and its page names them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes import has_ended

ROOT = Path(__file__).resolve().parent.parent
ALONE: dict[str, Any] = {
    "kind": "step",
    "line": "one process alone",
    "error": "",
    "left_out": "",
    "seconds": 1.0,
    "ranks": 1,
    "network": None,
    "model": "llama",
    "variant": "one process alone",
    "num_params": 10**9,
    "num_units": 10,
    "tokens": 1000,
    "flops": 989e12 * 0.04,
    "step_ms": [90.0, 100.0, 120.0],
    "forward_ms": [4.0],
    "backward_ms": [6.0],
    "losses": [2.0, 1.0],
    "kernels": 100,
    "launches": 100,
    "host_waits": 0,
    "peak_allocated": 2**30,
    "peak_reserved": 2**31,
    "device_allocs": 0,
    "alloc_retries": 0,
    "clocks": {"clocks.sm": "1980 MHz"},
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    monkeypatch.setattr(gpu, "candidates", lambda: [sys.executable])
    yield gpu
    for name in ("gpu", "gpu_page"):
        sys.modules.pop(name)


def part_of(gpu, name: str, code: str, limit_s: float = 20.0, **options: Any):
    """A part that is a program of its own."""
    stage = options.pop("stage", name)
    return gpu.Part(name=name, stage=stage, command=("-c", code), limit_s=limit_s, **options)


def prints(*rows: dict[str, Any]) -> str:
    """A program that prints these results."""
    return "import json; " + "; ".join(f"print('RESULT ' + json.dumps({row}))" for row in rows)


def run(gpu, monkeypatch: pytest.MonkeyPatch, out: Path, parts: list[Any]) -> dict[str, Any]:
    """The report of these parts."""
    monkeypatch.setattr(gpu, "parts_of", lambda device, tiny, out: parts)
    gpu.main(["--device", "cpu", "--out", str(out)])
    report: dict[str, Any] = json.loads((out / "gpu.json").read_text())
    return report


@pytest.mark.slow
def test_what_fails_and_what_hangs_is_noted_and_the_next_part_runs(
    gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hangs = "import time; print('so far', flush=True); time.sleep(100)"
    parts = [
        part_of(gpu, "hanging", hangs, 2.5),
        part_of(gpu, "torn", "import os; print('lost'); os.abort()"),
        part_of(gpu, "alone", prints(ALONE)),
    ]
    report = run(gpu, monkeypatch, tmp_path, parts)
    hanging, *others = [row["ending"] for row in report["parts"]]
    assert hanging.startswith("killed after")
    assert others == ["exit code -6", "exit code 0"]
    page = (tmp_path / "gpu.md").read_text()
    assert "- hanging: killed after" in page
    assert "- torn: exit code -6: " in page
    log = (tmp_path / "gpu.log").read_text()
    assert "so far" in log
    assert "most recent call first" in log  # where it hung
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.json", "gpu.md", "gpu.log"}


@pytest.mark.slow
def test_a_line_that_ends_its_process_is_named_and_the_lines_behind_it_run(
    gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = (
        "import os, sys, time\n"
        "from tests.cuda.lines import LeftOut, run_lines\n"
        "def lacking(): raise LeftOut('a device')\n"
        "def wrong(): raise ValueError('wrong')\n"
        "lines = {'lacking': lacking, 'torn': os.abort, 'wrong': wrong,\n"
        "         'hanging': lambda: time.sleep(50), 'right': lambda: {'value': 7}}\n"
        "after = int(sys.argv[2]) if sys.argv[1:] else 0\n"
        "sys.exit(run_lines(lines.items(), 'cuda', after, 1.0))\n"
    )
    report = run(gpu, monkeypatch, tmp_path, [part_of(gpu, "smoke", lines, 60.0, resumes=True)])
    (part,) = report["parts"]
    rows = {row["line"]: row for row in part["results"]}
    assert list(rows) == ["lacking", "torn", "wrong", "hanging", "right"]
    assert rows["lacking"]["left_out"] == "a device"
    assert rows["torn"]["error"].endswith("exit code -6 in this line")
    assert "ValueError: wrong" in rows["wrong"]["error"]
    assert "Timeout" in rows["hanging"]["error"]
    assert rows["right"]["value"] == 7
    page = (tmp_path / "gpu.md").read_text()
    assert "| smoke | 1 | 3 | 1 |" in page
    assert "- smoke, wrong: ValueError: wrong" in page
    assert "- smoke, lacking: a device" in page


@pytest.mark.slow
def test_parts_of_one_stage_run_at_the_same_time(
    gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    meets = (
        "import pathlib, sys, time\n"
        "at = pathlib.Path({folder!r})\n"
        "(at / {name!r}).touch()\n"
        "while len(list(at.iterdir())) < 3: time.sleep(0.01)\n"
    )
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    parts = [
        part_of(gpu, name, meets.format(folder=str(meeting), name=name), stage="tests")
        for name in ("a", "b", "c")
    ]
    report = run(gpu, monkeypatch, tmp_path / "out", parts)
    assert all(row["ok"] for row in report["parts"])


@pytest.mark.slow
def test_what_ends_the_driver_ends_its_parts(tmp_path: Path) -> None:
    code = (
        "import sys, signal, pathlib, gpu\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "program = f'import os, time, pathlib; pathlib.Path({str(out / \"pid\")!r})'\n"
        "program += '.write_text(str(os.getpid())); time.sleep(100)'\n"
        "part = gpu.Part(name='long', stage='long', command=('-c', program), limit_s=90.0)\n"
        "gpu.parts_of = lambda device, tiny, out: [part]\n"
        "gpu.candidates = lambda: [sys.executable]\n"
        "signal.signal(signal.SIGTERM, gpu._end)\n"
        "gpu.main(['--device', 'cpu', '--out', str(out)])\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environ) as driver:
        file = tmp_path / "pid"
        end_s = time.monotonic() + 60
        while not (file.exists() and file.read_text()):
            assert time.monotonic() < end_s
            time.sleep(0.05)
        pid = int(file.read_text())
        driver.terminate()
        assert driver.wait(20) == 128 + signal.SIGTERM
    while not has_ended(pid):
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_a_result_that_is_torn_is_left_out_and_a_page_that_fails_keeps_the_json(
    gpu, tmp_path: Path
) -> None:
    assert list(gpu.results_of('RESULT {"a": 1}\nother\nRESULT {"a": 1, "b"')) == [{"a": 1}]
    gpu.write({"parts": [{}]}, tmp_path)
    assert json.loads((tmp_path / "gpu.json").read_text()) == {"parts": [{}]}
    assert "KeyError" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
def test_the_page_is_written_after_each_part(
    gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks = f"print('first' in open({str(tmp_path / 'gpu.md')!r}).read()); exit(3)"
    report = run(
        gpu, monkeypatch, tmp_path, [part_of(gpu, "first", "0"), part_of(gpu, "next", looks)]
    )
    assert report["parts"][1]["output"] == "True\n"


@pytest.mark.slow
def test_parts_for_which_no_time_is_left_are_named(gpu, tmp_path: Path) -> None:
    assert gpu.main(["--device", "cpu", "--minutes", "0", "--out", str(tmp_path)]) == 1
    page = (tmp_path / "gpu.md").read_text()
    for part in gpu.parts_of("cpu", False, tmp_path):
        assert f"- {part.name}: no time was left" in page


def test_the_table_has_the_figures_that_convince_and_names_what_does_not_communicate(gpu) -> None:
    import gpu_page

    fsdp = {
        **ALONE,
        "variant": "echelon FSDP",
        "step_ms": [200.0],
        "forward_ms": [5.0],
        "backward_ms": [7.0],
        "host_waits": 1,
    }
    fsdp2 = {**ALONE, "variant": "FSDP2", "losses": [2.0, 1.5]}
    eight = {**fsdp, "ranks": 8, "network": "off", "collectives": 9, "network_bytes": 2e9}
    slow = {**eight, "network": "50 GB/s", "step_ms": [212.5]}
    speed = {"kind": "speed", "what": "bf16 matrix product, TFLOP/s", "value": 494.5}
    report = {
        "device": "cuda",
        "commit": "0123",
        "time": "now",
        "machine": {
            "packages": {},
            "torch": "2",
            "cuda": "13",
            "python": "3.12",
            "executable": "python3",
            "cores": 16,
            "machine": "x86_64",
        },
        "no_time_left": [],
        "parts": [
            {
                "part": "all",
                "ok": True,
                "seconds": 1,
                "ending": "exit code 0",
                "results": [speed, ALONE, fsdp, fsdp2, eight, slow],
            }
        ],
    }
    page = gpu_page.page_of(report)
    figures = "1.00 | 2.00 | 0 | 0 | 1980 MHz"
    for line in (
        f"| one process alone | 100.00 (90.00–120.00) | 40.0 | 80.0 | 10.00 | – | 100 | 0 | "
        f"{figures} | – |",
        f"| echelon FSDP | 200.00 (200.00–200.00) | 20.0 | 40.0 | 12.00 | 100 / 100 | 100 | 1 | "
        f"{figures} | equal bits, 2 steps |",
        "| FSDP2 (does not communicate with one rank) |",
        "| differ by 5.0e-01 |",
        "| 8 ranks, echelon FSDP, network 50 GB/s | 12.50 | 9 | 2.00 | 212.50",
        "| 8 ranks, echelon FSDP, network off | – | 9 | 2.00 | 200.00",
    ):
        assert line in page


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


def test_all_parts_together_fit_and_their_programs_are_there(gpu, tmp_path: Path) -> None:
    parts = gpu.parts_of("cuda", False, tmp_path)
    assert len({part.name for part in parts}) == len(parts)
    assert 60 * gpu.MINUTES <= 540
    for part in parts:
        if part.command[0] == "-m":
            assert part.resumes
        else:
            assert Path(part.command[0]).exists()
    probe = next(part for part in parts if part.name == "probe")
    assert probe is parts[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_part_runs_from_end_to_end_on_a_cpu_and_names_what_it_cannot_show(
    gpu, tmp_path: Path
) -> None:
    start_s = time.monotonic()
    options = ["--device", "cpu", "--tiny", "--minutes", "9", "--out", str(tmp_path)]
    code = gpu.main(options)
    page = (tmp_path / "gpu.md").read_text()
    assert code == 0, page
    assert "## What failed" not in page
    assert time.monotonic() - start_s < 540
    report = json.loads((tmp_path / "gpu.json").read_text())
    names = {part.name for part in gpu.parts_of("cpu", True, tmp_path)}
    assert {row["part"] for row in report["parts"]} == names
    assert report["no_time_left"] == []
    steps = [
        row for part in report["parts"] for row in part["results"] if row.get("kind") == "step"
    ]
    one_rank = [row for row in steps if row["ranks"] == 1 and "float32" not in row["variant"]]
    assert len({tuple(row["losses"]) for row in one_rank}) == 1
    for row in steps:
        assert row["kernels"] is row["host_waits"] is row["peak_allocated"] is row["clocks"] is None
    assert "- MFU, Python of a unit, kernels, host waits, memory and clocks: no CUDA device" in page
    assert "torch's CUDA sanitizer, which needs a CUDA device" in page
    files = list(tmp_path.iterdir())
    assert len(files) <= 8
    assert all(path.is_file() and path.stat().st_size < 16 * 2**20 for path in files)
