"""What may be typed between two calls."""

from __future__ import annotations

import pytest
import torch

import echelon as ec
from echelon.laboratory.step_commands import HELP


def four_calls(world: ec.World) -> int:
    """Calls with labels."""
    for label in ("a", "b", "c", "d"):
        world.group.all_reduce(torch.tensor([world.rank]), label=label)
    return world.rank


class Typed:
    """Stands for ``input``: answers with these lines, and then with the end of input."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Typed:
    answers = Typed()
    monkeypatch.setattr("echelon.laboratory.step_commands.input", answers, raising=False)
    return answers


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The labels of the calls that were printed."""
    lines = capsys.readouterr().out.splitlines()
    return [line.split("'")[1] for line in lines if line.startswith("call ")]


def test_enter_goes_on_to_the_next_call(typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    typed.lines = ["", "", "", ""]
    assert ec.step_through(four_calls, 2).interact() == [0, 1]
    assert shown(capsys) == ["a", "b", "c", "d"]
    assert "Enter" in typed.prompts[0]
    assert set(typed.prompts[1:]) == {"> "}


def test_c_runs_on_to_the_end(typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    typed.lines = ["", "c"]
    assert ec.step_through(four_calls, 2).interact() == [0, 1]
    assert shown(capsys) == ["a", "b"]


@pytest.mark.parametrize("lines", [["q"], []], ids=["q", "end of input"])
def test_q_and_the_end_of_input_end_the_ranks(
    lines: list[str], typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    typed.lines = lines
    steps = ec.step_through(four_calls, 2)
    assert steps.interact() is None
    assert shown(capsys) == ["a"]
    assert "which were ended" in repr(steps)


def test_a_text_is_the_call_to_go_on_to(typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    typed.lines = ["/of 'c'", "", "q"]
    ec.step_through(four_calls, 2).interact()
    assert shown(capsys) == ["a", "c", "d"]


def test_v_prints_all_values_of_a_rank_and_else_there_is_help(
    typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    typed.lines = ["v 1", "q"]
    ec.step_through(four_calls, 2).interact()
    assert "before: tensor([1])\nafter: tensor([1])\n" in capsys.readouterr().out
    for wrong in ("v 2", "v", "v -1", "x", "?"):
        typed.lines = [wrong, "q"]
        ec.step_through(four_calls, 2).interact()
        assert HELP in capsys.readouterr().out


def test_v_says_how_much_of_a_large_tensor_was_kept(
    typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(world: ec.World) -> None:
        world.group.broadcast(torch.arange(1000), src=0)
        world.group.barrier()
        world.group.all_gather_object({"rank": world.rank})

    typed.lines = ["v 0", "", "v 0", "", "v 1", "c"]
    ec.step_through(main, 2, keep=100).interact()
    out = capsys.readouterr().out
    assert "before, 16 of 1,000: tensor([ 0,  1" in out
    assert "rank 0 moves nothing in this call" in out
    assert "before: {'rank': 1}\nafter: {'rank': 0} | {'rank': 1}\n" in out


def test_an_error_of_a_rank_is_raised(typed: Typed) -> None:
    def main(world: ec.World) -> None:
        world.group.barrier()
        raise KeyError(world.rank)

    typed.lines = [""]
    with pytest.raises(KeyError):
        ec.step_through(main, 2).interact()
