"""echelon replay: a script that failed on processes, its step again, the debugger, and mistakes."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from tests.processes import run_python

pytestmark = pytest.mark.slow  # a job that a fixture starts takes most of the time

SCRIPT = """
import os, signal, sys

import torch
from torch import nn

import echelon as ec

def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, 9):
        x = torch.randn(4, 8, generator=generator)
        if step == 5 and rank == 1:
            x[0, 0] = torch.nan
        yield x

def main(world, folder, how):
    torch.manual_seed(0)
    model = ec.DDP(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)), world.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    guard = ec.FiniteGuard(model, world.group)
    box = ec.Blackbox(folder, model=model, optimizer=optimizer, guard=guard, every=2)
    for step, x in box.steps(batches(world.rank)):
        loss = model(x).square().mean()
        loss.backward()
        if how == "kill" and step == 4 and world.rank == 1 and not world.is_replay:
            os.kill(os.getpid(), signal.SIGKILL)
        box.note(loss=loss)
        print(f"rank {world.rank} step {step} loss {loss.item().hex()}")
        guard.allows_step(loss)
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    with ec.init(BACKEND) as world:
        main(world, *sys.argv[1:])
"""


def start(folder: Path, how: str = "nan", ranks: int = 2, backend: str | None = None) -> list[str]:
    """Run the script on processes; what it printed."""
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("BACKEND", repr(backend)))
    words = ("-m", "echelon", "run", "--tee", "--ranks", str(ranks), str(script), "runs/a", how)
    result = run_python(*words, cwd=folder)
    assert result.returncode != 0
    return [*result.stdout.splitlines(), *result.stderr.splitlines()]


def call(folder: Path, *words: object, keys: str = "", how: str = "nan") -> tuple[int, str]:
    program = [str(folder / "train.py"), "runs/a", how]
    arguments = ["replay", str(folder / "runs/a"), *map(str, words), *program]
    result = CliRunner().invoke(app, arguments, input=keys, env={"COLUMNS": "200"})
    return result.exit_code, result.output


def losses(lines: list[str], step: int) -> set[str]:
    return {line.partition("] ")[2] for line in lines if f" step {step} loss" in line}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a job of two processes that has failed in step 5, and what it printed."""
    folder = tmp_path_factory.mktemp("job")
    return folder, start(folder)


def check_step_5(folder: Path, lines: list[str]) -> None:
    words = f"echelon replay {folder / 'runs/a'} --step 5 {folder / 'train.py'} runs/a nan"
    assert f"replay it: {words}" in lines
    code, output = call(folder, "--step", 5)
    assert code == 0
    assert losses(output.splitlines(), 5) == losses(lines, 5)
    assert len(losses(lines, 5)) == 2
    assert losses(output.splitlines(), 4) == set()  # of the step alone
    assert "raised NonFiniteError: step 5 is not finite" in output
    assert "loss: nan on rank 1" in output
    assert "as in the run" in output
    assert "noted numbers have the bits of the run" in output


def test_a_step_of_a_job_is_replayed_from_the_command_line(job: tuple[Path, list[str]]) -> None:
    check_step_5(*job)


def test_a_step_of_a_job_over_gloo_is_replayed(tmp_path: Path) -> None:
    check_step_5(tmp_path, start(tmp_path, backend="gloo"))


def test_one_rank_the_debugger_another_batch_and_the_list(job: tuple[Path, list[str]]) -> None:
    folder, lines = job
    code, output = call(
        folder, "--rank", 1, "--pdb", keys="p step, x[0, 0]\nranks\nrank 0\np world.rank\nq\n"
    )
    assert code == 0
    assert losses(output.splitlines(), 5) == {f"rank 1 step 5 loss {float('nan').hex()}"}
    assert "rank 0 step" not in output
    assert "-> guard.allows_step(loss)" in output
    assert "(5, tensor(nan))" in output
    assert "(Pdb rank 0) 0\n" in output
    assert re.search(r"\n->    1 .*has raised NonFiniteError: step 5 is not finite:", output)

    code, output = call(folder, "--step", 3, "--pdb", "--rank", 0, keys="p step, world.rank\nq\n")
    assert code == 0
    assert losses(output.splitlines(), 3) < losses(lines, 3)
    assert "pdb of rank 0, at the end of the step" in output
    assert "(3, 0)" in output

    code, output = call(folder, "--batch-of", 5, "--step", 5)
    assert code == 0
    code, output = call(folder, "--step", 6)
    assert code == 2
    assert "step 6 was not kept. Steps that can be replayed: 1 to 5" in output

    assert call(folder, "--keep")[0] == 0
    code, output = call(folder, "--list")
    assert code == 0
    assert "attempt 1: train.py on 2 ranks over shm, runs, or has failed" in output
    assert "steps that can be replayed: 1 to 5" in output
    assert "kept for good: stretch-000000005" in output
    assert "with numbers that are not finite: stretch-000000005" in output
    assert "rank 1: NonFiniteError in step 5: step 5 is not finite" in output


def test_a_rank_that_was_killed_is_replayed_to_the_end_of_its_step(tmp_path: Path) -> None:
    start(tmp_path, "kill")
    code, output = call(tmp_path, how="kill")
    assert code == 1  # nobody kills it again
    assert "step 4 of " in output
    assert "no rank failed" in output
    assert "in the run, rank 0 raised RankFailed: rank 1 died" in output
    assert "noted numbers have the bits of the run" in output
    assert len(losses(output.splitlines(), 4)) == 2


def test_a_changed_script_is_refused_unless_it_is_wanted(job: tuple[Path, list[str]]) -> None:
    folder, _ = job
    script = folder / "train.py"
    before = script.read_text()
    try:
        script.write_text(
            before.replace("torch.nan", "0.0").replace("guard.allows_step(loss)", "pass")
        )
        code, output = call(folder)
        assert code == 2
        assert "the step would not be the one that has run" in output
        assert "script: " in output
        code, output = call(folder, "--anyway")
        assert code == 1  # the batch is the kept one, but nobody guards it
        assert "no rank failed" in output
        assert "in the run, rank 1 raised NonFiniteError: step 5 is not finite" in output
        script.unlink()
        assert "does not exist" in call(folder)[1]
    finally:
        script.write_text(before)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--rank", 2), "--rank is 2, which is not in a group of 2"),
        (("--step", 0), "greater than or equal to 1"),
        (("--batch-of", 99), "step 99 was not kept"),
        (("--", "other.py"), "File 'other.py' does not exist."),
    ],
)
def test_mistakes_get_a_sentence(
    words: tuple[object, ...], sentence: str, job: tuple[Path, list[str]]
) -> None:
    code, output = call(job[0], *words)
    assert code == 2
    assert sentence in output


def test_a_replay_names_the_recorded_program_and_starts_only_the_named_one(
    job: tuple[Path, list[str]],
) -> None:
    folder, run = job[0], str(job[0] / "runs/a")
    recorded = f"the run recorded the program {folder / 'train.py'} runs/a nan, in the folder "
    result = CliRunner().invoke(app, ["replay", run, "--step", "3"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert recorded in result.output
    assert "name the program yourself" in result.output
    words = ["replay", run, "--step", "3", str(folder / "train.py"), "--step", "4"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert "arguments: runs/a nan in the run, --step 4 here" in result.output


def test_a_folder_without_a_box_is_named(tmp_path: Path) -> None:
    for words in ((), ("--list",), ("--keep",)):
        code, output = call(tmp_path, *words)
        assert code == 2
        assert "has no black box" in output
