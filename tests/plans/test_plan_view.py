"""The view of a plan has the place of every rank; its repr has what differs from the default."""

import pytest

import echelon as ec
from echelon.comm.mesh import coordinates
from echelon.page import Picture, TextTable, view_of


def test_the_table_has_the_coordinates_of_the_mesh() -> None:
    plan = ec.Plan(pp=2, dp=2, shard=3, microbatches=4)
    picture, table, schedule, _ = (part.content for part in view_of(plan).parts)
    assert isinstance(table, TextTable)
    for rank, row in enumerate(table.rows):
        at = coordinates(rank, {"pp": 2, "dp": 2, "shard": 3})
        assert row == [str(rank), *map(str, at.values()), f"part {rank % 6} of 6"]
    assert isinstance(picture, Picture)
    assert picture.text.splitlines() == [
        "       pp 0        pp 1",
        "dp 0   [ 0  1  2]  [ 6  7  8]",
        "dp 1   [ 3  4  5]  [ 9 10 11]",
    ]
    assert picture.svg.count("<rect") == 12
    assert isinstance(schedule, Picture)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [ec.Plan(), ec.Plan(dp=64), ec.Plan(pp=64, microbatches=256), ec.Plan(pp=2, microbatches=2)],
    ids=str,
)
def test_the_repr_is_a_plan_in_a_line(plan: ec.Plan) -> None:
    assert len(repr(plan)) < 80
    assert eval(repr(plan), {"Plan": ec.Plan}) == plan
    assert len(plan._repr_html_()) < 100_000


def test_a_plan_with_a_schedule_of_64_ranks_fits_in_two_lines() -> None:
    schedule = ec.pipeline.schedule("1f1b", 64, 128, 64)
    assert len(repr(ec.Plan(pp=64, microbatches=128, schedule=schedule))) < 200
