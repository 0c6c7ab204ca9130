"""``ec.show`` on a terminal; tests/launch/test_cell_output.py shows in a real notebook."""

from typing import Any

import pytest
from torch import nn

import echelon as ec


def test_a_terminal_shows_titles_numbers_tables_and_pictures_as_text(capsys: Any) -> None:
    ec.show(ec.pipeline.schedule("1f1b", 2, 2, 2))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [
        "1f1b: 2 ranks, 2 stages, 2 microbatches",
        "9 time · 33.33% bubble · 2 most microbatches alive on a rank",
    ]
    assert "  rank 1 |  .  1F0 1B0 === 1F1 1B1 ===  .   ." in lines
    assert any(line.split() == ["0", "2", "6", "0", "3", "0", "0", "1:", "3"] for line in lines)


def test_texts_are_no_markup_of_rich(capsys: Any) -> None:
    ec.show(ec.pipeline.Schedule.from_csv("0F0,0B0", name="[red]x[/red]"))
    assert "[red]x[/red]: 1 ranks" in capsys.readouterr().out


def test_a_rank_can_show_its_model_alone(capsys: Any) -> None:
    def main(world: ec.World) -> None:
        model = ec.FSDP(nn.Linear(8, 8), world.group, min_num_params=0)
        if world.rank == 1:
            ec.show(model)

    ec.run(main, 2)
    assert "FSDP of Linear: 1 units on 2 ranks" in capsys.readouterr().out


def test_an_object_that_shows_itself_is_printed(capsys: Any) -> None:
    class Result:
        def __str__(self) -> str:
            return "the same"

        def _repr_html_(self) -> str:
            return "<b>the same</b>"

    ec.show(Result())
    assert capsys.readouterr().out == "the same\n"


def test_what_has_nothing_to_see_is_refused_with_what_to_do() -> None:
    with pytest.raises(ec.ArgumentError, match=r"this is 3, a int; show a model in ec\.DDP"):
        ec.show(3)
    with pytest.raises(ec.ArgumentError, match=r"this Linear is a plain module.*ec\.parallelize"):
        ec.show(nn.Linear(2, 2))
    worlds: list[ec.World] = []

    def main(world: ec.World) -> None:
        with pytest.raises(ec.ArgumentError, match=r"World\(rank \d of 2.*print it"):
            ec.show(world)
        worlds.append(world)

    ec.run(main, 2)
    with pytest.raises(ec.ArgumentError, match=r"has been closed.*inside of the function"):
        ec.show(worlds[0])
    with pytest.raises(ec.ArgumentError, match=r"this is <class 'echelon.plans.plans.Plan'>"):
        ec.show(ec.Plan)
