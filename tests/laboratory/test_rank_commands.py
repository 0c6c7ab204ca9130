"""Commands that show other ranks."""

import pytest
import torch

import echelon as ec
from tests.laboratory.typed_commands import Typist


def layer(world: ec.World, x: torch.Tensor) -> torch.Tensor:
    scale = world.rank + 1
    if world.rank == 2:
        breakpoint()
    world.group.all_reduce(x)
    return x * scale


def main(world: ec.World) -> float:
    values = torch.full((1,), float(world.rank))
    return layer(world, values).item()


@pytest.mark.slow
def test_another_rank_is_looked_at_with_all_commands_that_look(typist: Typist) -> None:
    typist.types("rank 1", "p scale", "up", "p values", "where", "down", "rank 2", "p scale", "c")
    ec.run(main, 3)
    output = typist.reads()
    assert "(Pdb rank 1) p scale\n2\n" in output
    assert "(Pdb rank 1) p values\ntensor([1.])\n" in output
    assert "(Pdb rank 2) p scale\n3\n" in output
    where = output.split("where\n")[1].split("(Pdb")[0].splitlines()
    assert [line.strip() for line in where[1::2]] == [
        "-> return layer(world, values).item()",
        "-> world.group.all_reduce(x)",
    ]


def test_a_value_of_another_rank_can_be_changed(typist: Typist) -> None:
    typist.types("rank 0", "!x.fill_(10)", "c")
    assert ec.run(main, 3) == [13.0, 26.0, 39.0]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["n", "step", "r", "until", "jump 1"])
def test_commands_that_step_move_only_the_rank_that_is_shown(typist: Typist, command: str) -> None:
    typist.types("rank 1", command, "rank 2", "p scale", "c")
    ec.run(main, 3)
    assert f"{command.split()[0]} moves rank 2: `rank 2` shows it again" in typist.reads()


def test_a_rank_that_is_not_there_or_has_no_frames_is_a_sentence(typist: Typist) -> None:
    def leave_early(world: ec.World) -> None:
        if world.rank == 1:
            breakpoint()
            world.step = 1

    typist.types("rank 7", "rank", "rank 0", "c")
    ec.run(leave_early, 2)
    output = typist.reads()
    assert output.count("*** give a rank: 0, 1\n") == 2
    assert "*** rank 0 has returned, and has no frames\n" in output


@pytest.mark.slow
def test_frames_of_echelon_are_shown_on_request(typist: Typist) -> None:
    typist.types("rank 0", "internals", "where", "internals", "where", "c")
    ec.run(main, 3)
    first, second = (text.split("(Pdb")[0] for text in typist.reads().split("where\n")[1:])
    assert "thread_world.py" in first
    assert "echelon" not in second


def test_help_has_the_commands(typist: Typist) -> None:
    typist.types("help rank", "help ranks", "c")
    ec.run(main, 3)
    output = typist.reads()
    assert "Look at the frames of another rank" in output
    assert "Print a table of all ranks" in output
