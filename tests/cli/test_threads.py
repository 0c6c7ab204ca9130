import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import sys
import torch
import echelon as ec
seen = globals().setdefault("seen", [])
"""


def run(folder: Path, body: str, ranks: int = 3) -> subprocess.CompletedProcess[str]:
    """``echelon run --world threads`` of a script, as a user starts it."""
    script = folder / "train.py"
    script.write_text(PRELUDE + body)
    command = [sys.executable, "-m", "echelon", "run", "--ranks", str(ranks), "--world", "threads"]
    return subprocess.run(
        [*command, str(script), "--lr", "3"], capture_output=True, text=True, timeout=60
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    folder = tmp_path_factory.mktemp("good")
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    body = """
import beside
if __name__ == "__main__":
    with ec.init() as world:
        seen.append(world.rank)
        total = torch.tensor([world.rank + 1])
        world.group.all_reduce(total)
        for _ in range(50):
            print("rank", world.rank, "sum", total.item(), seen, sys.argv[1:], beside.NAME)
"""
    return run(folder, body)


def test_every_rank_runs_the_script_with_its_own_names(
    good: subprocess.CompletedProcess[str],
) -> None:
    assert good.returncode == 0, good.stderr
    assert set(good.stdout.splitlines()) == {
        f"rank {rank} sum 6 [{rank}] ['--lr', '3'] beside" for rank in range(3)
    }


def test_lines_of_ranks_do_not_run_into_each_other(good: subprocess.CompletedProcess[str]) -> None:
    assert len(good.stdout.splitlines()) == 150


def test_the_first_line_of_a_failure_names_the_rank_and_the_cause(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
with ec.init() as world:
    if world.rank == 1:
        raise ValueError("boom")
    world.group.barrier()
""",
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[0] == "rank 1 raised ValueError: boom"
    assert lines[1] == f"  at {tmp_path / 'train.py'}:9 in <module>"
    assert len(lines) <= 25


def test_a_script_that_is_no_python_is_a_short_message(tmp_path: Path) -> None:
    done = run(tmp_path, "this is no python")
    assert done.returncode == 1
    assert done.stderr.startswith("rank 0 raised SyntaxError: ")


def test_the_exit_code_of_a_script_is_kept(tmp_path: Path) -> None:
    done = run(tmp_path, "sys.exit(3)")
    assert done.returncode == 3
