"""The debugger of ranks in a terminal and with a pipe, in scripts of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

pexpect = pytest.importorskip("pexpect")

SCRIPT = """
import torch
import echelon as ec

def main(world):
    value = torch.full((2,), float(world.rank))
    breakpoint()
    world.group.all_reduce(value)
    print("sum", value.sum().item())

if __name__ == "__main__":
    with ec.init() as world:
        main(world)
"""
COMMAND = [sys.executable, "-m", "echelon", "run", "--world", "threads", "--ranks", "3"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A program with a breakpoint."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.slow
def test_a_terminal_completes_words_and_ctrl_c_ends_the_run(script: str) -> None:
    terminal = pexpect.spawn(COMMAND[0], [*COMMAND[1:], script], encoding="utf-8", timeout=100)
    with terminal:
        terminal.expect_exact("(Pdb rank 0) ")
        terminal.sendline("c")
        terminal.expect_exact("(Pdb rank 1) ")
        terminal.sendline("rank 2")
        terminal.expect_exact("(Pdb rank 2) ")
        terminal.send("interna\t")
        terminal.expect_exact("internals")
        terminal.sendline("")
        terminal.expect_exact("frames of echelon are shown")
        terminal.expect_exact("(Pdb rank 2) ")
        terminal.sendintr()
        terminal.expect_exact("interrupted")
        terminal.expect(pexpect.EOF)
        terminal.wait()
        assert terminal.exitstatus == 130


@pytest.mark.slow
def test_commands_may_come_from_a_pipe_whose_end_ends_the_run(script: str) -> None:
    done = subprocess.run(
        [*COMMAND, script], input="c\nc\nc\n", capture_output=True, text=True, timeout=100
    )
    assert done.stdout.count("sum 6.0\n") == 3
    assert done.returncode == 0
    done = subprocess.run(
        [*COMMAND, script], input="ranks\nc\n", capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    assert done.stderr == (
        "the run was ended in the debugger, which had stopped rank 1 at train.py:8\n"
    )
