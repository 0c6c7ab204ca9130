"""``ec.step_through``: ranks are held after each call, and what moved is known."""

from __future__ import annotations

import gc
import random
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import echelon as ec
from tests.children import environ


@pytest.fixture(autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    yield
    gc.collect()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]
    assert left == []


def sum_twice(world: ec.World) -> float:
    """Two calls."""
    total = torch.tensor([world.rank, 1.0])
    world.group.all_reduce(total, label="the first")
    world.group.all_reduce(total, "max")
    return total.sum().item()


def test_ranks_are_held_after_each_call_and_return_in_the_end() -> None:
    past: list[tuple[int, int]] = []

    def main(world: ec.World) -> int:
        for number in range(3):
            world.group.barrier()
            past.append((world.rank, number))
        return world.rank

    steps = ec.step_through(main, 2)
    assert past == []
    seen = []
    for call in steps:
        seen.append((call.number, call.op, len(past)))
    # All ranks have called it, and none has gone on.
    assert seen == [(1, "barrier", 0), (2, "barrier", 2), (3, "barrier", 4)]
    assert steps.results == [0, 1]


def test_a_call_says_what_it_is_and_what_every_rank_gave_and_got() -> None:
    first, second = ec.step_through(sum_twice, 3)
    assert (first.op, first.reduce, first.label) == ("all_reduce", "sum", "the first")
    assert (first.group, first.ranks, first.shape) == ("world", (0, 1, 2), (2,))
    assert first.dtype is torch.float32
    for rank in range(3):
        assert first.before[rank].values.tolist() == [rank, 1]
        assert first.after[rank].values.tolist() == [3, 3]
        assert first.sent(rank) == first.received(rank) == 16
        assert first.places[rank].function == "sum_twice"
    assert (second.reduce, second.label) == ("max", None)
    assert second.changed == {0: [], 1: [], 2: []}


@pytest.mark.slow
def test_looking_changes_no_value_and_no_order() -> None:
    def main(world: ec.World) -> torch.Tensor:
        torch.manual_seed(world.rank)
        values = torch.randn(1000, requires_grad=True)
        sums = values.detach().clone()
        for _ in range(3):
            world.group.all_reduce(sums, "mean")
            sums += torch.randn(1000)
        return sums

    steps = ec.step_through(main, 3)
    for _ in steps:
        torch.randn(5)  # by the caller, whose stream is another
        random.random()
    for seen, alone in zip(steps.results, ec.run(main, 3), strict=True):
        assert torch.equal(seen, alone)


def test_the_caller_has_its_own_streams_and_may_run_others_between_calls() -> None:
    torch.manual_seed(3)
    expected = torch.randn(2)
    torch.manual_seed(3)
    drawn, others = [], []
    for _ in ec.step_through(sum_twice, 2):
        drawn.append(torch.randn(1).item())
        others.append(ec.run(sum_twice, 2))
    assert drawn == expected.tolist()
    assert others == [[3.0, 3.0]] * 2


@pytest.mark.slow
def test_no_time_limit_runs_while_ranks_are_held() -> None:
    steps = ec.step_through(sum_twice, 2, timeout=0.3)
    for _ in steps:
        time.sleep(0.5)
    assert steps.results == [3.0, 3.0]


def test_a_loop_that_is_left_ends_all_ranks() -> None:
    past: list[int] = []

    def main(world: ec.World) -> None:
        world.group.barrier()
        past.append(world.rank)
        world.group.barrier()

    for _ in ec.step_through(main, 3):
        break
    assert past == []


def test_within_a_with_block_a_loop_may_be_left_and_gone_on_with() -> None:
    with ec.step_through(sum_twice, 2) as steps:
        for call in steps:
            if call.number == 1:
                break
        assert next(steps).number == 2
        assert steps.run() == [3.0, 3.0]
    with ec.step_through(sum_twice, 2) as steps:
        next(steps)
    with pytest.raises(ec.StateError, match="ended before they had returned"):
        _ = steps.results
    assert list(steps) == []


def test_steps_that_nobody_refers_to_any_more_end_their_ranks() -> None:
    steps = ec.step_through(sum_twice, 2)
    next(steps)
    del steps


def test_the_error_of_a_rank_is_raised_where_the_next_call_was_asked_for() -> None:
    def main(world: ec.World) -> None:
        world.group.barrier()
        if world.rank == 1:
            raise KeyError("boom")
        world.group.barrier()

    steps = ec.step_through(main, 2)
    next(steps)
    with pytest.raises(KeyError, match="boom") as raised:
        next(steps)
    assert raised.value.__notes__[0] == "raised on rank 1 of 2"
    with pytest.raises(StopIteration):
        next(steps)


def test_a_deadlock_is_raised_and_says_who_waits_for_whom() -> None:
    def main(world: ec.World) -> None:
        world.group.barrier()
        world.group.recv(torch.zeros(1), 1 - world.rank)

    seen = []
    with pytest.raises(ec.DeadlockError, match=r"rank 0 waits in recv .* for rank 1"):
        for call in ec.step_through(main, 2):
            seen.append(call.op)
    assert seen == ["barrier"]


def test_a_call_in_which_ranks_differ_is_raised() -> None:
    def main(world: ec.World) -> None:
        world.group.all_reduce(torch.zeros(1 + world.rank))

    with pytest.raises(ec.CollectiveMismatch):
        next(ec.step_through(main, 2))


def test_run_goes_on_without_holding_the_ranks() -> None:
    steps = ec.step_through(sum_twice, 2)
    assert next(steps).label == "the first"
    assert steps.run() == [3.0, 3.0] == steps.results
    assert ec.step_through(sum_twice, 2).run() == [3.0, 3.0]
    with pytest.raises(ec.StateError, match="not returned"):
        _ = ec.step_through(sum_twice, 2).results


def test_arguments_are_passed_and_checked() -> None:
    def main(world: ec.World, value: float) -> None:
        world.group.all_reduce(torch.full((3,), value))

    (call,) = ec.step_through(main, 2, args=(4.0,), keep=2)
    assert call.before[0].values.tolist() == [4, 4, 4]
    assert not call.before[0].is_whole
    for arguments in ({"ranks": 0}, {"args": 3}, {"timeout": -1}, {"keep": -1}, {"device": "no"}):
        with pytest.raises(ec.ArgumentError):
            ec.step_through(main, **{"ranks": 2, **arguments})  # type: ignore[arg-type]
    with pytest.raises(ec.ArgumentError, match="a function"):
        ec.step_through(3, 2)  # type: ignore[arg-type]


PAGE = Path(__file__).resolve().parents[2] / "docs" / "laboratory" / "step-through.md"


def test_the_page_shows_what_its_program_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, output = re.findall(r"```(?:python)?\n(.*?)```", PAGE.read_text(), re.DOTALL)[:2]
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(program)
    runpy.run_path("train.py", run_name="__main__")
    assert f"$ python train.py\n{capsys.readouterr().out}" == output


def test_the_program_of_the_page_has_the_assertion_of_the_page(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {"__name__": "train"}
    exec(compile(blocks[0] + blocks[1], "train.py", "exec"), names)
    assert isinstance(names["bucket"], ec.SteppedCall)


def test_a_run_shows_itself_in_a_notebook_and_says_where_it_is() -> None:
    steps = ec.step_through(sum_twice, 2)
    assert repr(steps) == "<SteppedRun of sum_twice on 2 ranks, not started>"
    assert "No call yet" in steps._repr_html_()
    next(steps)
    assert repr(steps).endswith("on 2 ranks, held after call 1>")
    html = steps._repr_html_()
    assert "sum_twice on 2 simulated ranks, held after call 1" in html
    assert "8 B from rank 1" in html
    steps.run()
    assert repr(steps).endswith("which have returned>")


def test_a_cell_of_a_notebook_has_the_lines_that_ranks_print(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(world: ec.World) -> None:
        print("before")
        world.group.barrier()
        print("after")

    monkeypatch.setattr("echelon.launch.cell_output.in_notebook", lambda: True)
    steps = ec.step_through(main, 2)
    next(steps)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] before", "[rank 1] before"]
    print("mine")
    steps.run()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mine"
    assert sorted(lines[1:]) == ["[rank 0] after", "[rank 1] after"]


_HELD_AT_THE_END = """
import echelon as ec
from tests.children import environ
from echelon.process import time_limits

time_limits.END_THREADS_S = 60.0  # the end of the interpreter waits so long for ranks


def main(world):
    for _ in range(3):
        world.group.barrier()


steps = ec.step_through(main, 3)
next(steps)
"""


@pytest.mark.slow
def test_a_program_that_ends_while_ranks_are_held_ends_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HELD_AT_THE_END],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
        env=environ(),
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_an_interrupt_ends_the_ranks() -> None:
    def main(world: ec.World) -> None:
        world.group.barrier()
        if world.rank == 1:
            signal.raise_signal(signal.SIGINT)  # Python's handler runs in the main thread
            time.sleep(0.1)
        world.group.barrier()

    steps = ec.step_through(main, 2)
    next(steps)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert "which were ended" in repr(steps)
