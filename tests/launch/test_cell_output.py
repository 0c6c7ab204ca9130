"""A cell shows what ranks print, by rank, in a real kernel of a notebook."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import echelon as ec

DEFINED = """
import os, sys, time
import echelon as ec
def main(world):
    for i in range(3):
        print("line", i, end=" ")
        print("of", world.rank)
    os.write(2, f"err {world.rank}\\n".encode()) if world.backend == "shm" else None
    print("no end", end="")
"""

FAILS = """
def bad(world):
    print("last words", world.rank)
    raise KeyError("a")
ec.run(bad, 2)
"""


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs cells in one kernel; gives the text that each stream of the cell shows."""
    from jupyter_client.manager import start_new_kernel

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    kernel, client = start_new_kernel(extra_arguments=["--transport=ipc", f"--ip={tmp_path}/ipc"])

    def run(code: str) -> dict[str, str]:
        messages: list[dict] = []
        client.execute_interactive(code, output_hook=messages.append, timeout=100)
        shown: dict[str, str] = {}
        for message in messages:
            content = message["content"]
            if message["msg_type"] == "stream":
                name = content["name"]
                shown[name] = shown.get(name, "") + content["text"]
            if message["msg_type"] == "error":
                shown["error"] = "\n".join(content["traceback"])
            if message["msg_type"] in ("display_data", "execute_result"):
                shown.update(content["data"])
        return shown

    try:
        yield run
    finally:
        client.stop_channels()
        kernel.shutdown_kernel()


def lines_of(rank: int) -> list[str]:
    return [*(f"[rank {rank}] line {i} of {rank}" for i in range(3)), f"[rank {rank}] no end"]


@pytest.mark.slow
def test_a_cell_shows_whole_lines_with_the_rank_of_threads_and_of_processes(cell: Any) -> None:
    cell(DEFINED)
    for world in ("threads", "processes"):
        shown = cell(
            f"before = sys.stdout; ec.run(main, 3, '{world}'); assert sys.stdout is before"
        )
        lines = shown["stdout"].splitlines()
        for rank in range(3):
            assert [line for line in lines if f"rank {rank}]" in line] == lines_of(rank)
        assert len(lines) == 12
        assert "error" not in shown
    assert sorted(shown["stderr"].splitlines()) == [
        f"[rank {rank}] err {rank}" for rank in range(3)
    ]
    failed = cell(FAILS)
    assert "[rank 0] last words 0" in failed["stdout"]
    assert "KeyError" in failed["error"]
    html = cell("ec.show(ec.Plan(dp=2))")["text/html"]
    assert "Plan dp=2" in html
    assert "4 stages" in cell("ec.pipeline.schedule('1f1b', 4, 8, 4)")["text/html"]


def test_outside_of_a_notebook_lines_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    ec.run(lambda world: print("rank", world.rank), 2)
    assert sys.stdout is before
    assert sorted(capsys.readouterr().out.splitlines()) == ["rank 0", "rank 1"]
