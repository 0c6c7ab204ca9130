"""Named axes: the arithmetic, and the groups of every axis."""

import doctest
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import echelon as ec
from echelon.comm import mesh
from echelon.comm.mesh import axis_ranks, coordinates
from echelon.errors import ArgumentError, RankError

AXES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda lengths: {"abcd"[i]: length for i, length in enumerate(lengths)}
)


def test_the_examples_run() -> None:
    assert doctest.testmod(mesh).failed == 0


@pytest.mark.parametrize(
    ("rank", "lengths", "at"),
    [
        (5, {"dp": 2, "tp": 4}, {"dp": 1, "tp": 1}),
        (7, {"a": 2, "b": 2, "c": 3}, {"a": 1, "b": 0, "c": 1}),
        (5, {"dp": 2, "tp": 2, "pp": 2}, {"dp": 1, "tp": 0, "pp": 1}),
    ],
)
def test_the_last_axis_varies_fastest(rank, lengths, at) -> None:
    assert coordinates(rank, lengths) == at
    assert list(coordinates(rank, lengths)) == list(lengths)


@pytest.mark.parametrize(
    ("axis", "rank", "lengths", "ranks"),
    [
        ("dp", 5, {"dp": 2, "tp": 4}, [1, 5]),
        ("tp", 5, {"dp": 2, "tp": 4}, [4, 5, 6, 7]),
        ("c", 7, {"a": 2, "b": 2, "c": 3}, [6, 7, 8]),
        ("a", 7, {"a": 2, "b": 2, "c": 3}, [1, 7]),
    ],
)
def test_an_axis_joins_the_ranks_that_differ_on_it_only(axis, rank, lengths, ranks) -> None:
    assert axis_ranks(axis, rank, lengths) == ranks


@pytest.mark.slow
@given(lengths=AXES)
def test_the_groups_of_each_axis_cover_all_ranks_once(lengths) -> None:
    size = prod(lengths.values())
    for axis in lengths:
        groups = {tuple(axis_ranks(axis, rank, lengths)) for rank in range(size)}
        assert sorted(rank for group in groups for rank in group) == list(range(size))
        for rank in range(size):
            found = axis_ranks(axis, rank, lengths)
            assert found[coordinates(rank, lengths)[axis]] == rank


def test_a_rank_outside_has_no_coordinates() -> None:
    with pytest.raises(RankError):
        coordinates(8, {"dp": 2, "tp": 4})


def test_every_axis_of_a_mesh_is_a_group() -> None:
    def main(world: ec.World) -> tuple[dict[str, int], list[float]]:
        found = world.mesh(dp=2, pp=2, tp=-1)
        sums = []
        for axis in ("dp", "pp", "tp"):
            value = torch.tensor([float(world.rank)])
            found[axis].all_reduce(value)
            sums.append(value.item())
        return found.coordinates, sums

    results = ec.run(main, ranks=8)
    assert results[5] == ({"dp": 1, "pp": 0, "tp": 1}, [1.0 + 5, 5.0 + 7, 4.0 + 5])
    assert results[0] == ({"dp": 0, "pp": 0, "tp": 0}, [0.0 + 4, 0.0 + 2, 0.0 + 1])


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({}, "at least one axis"),
        ({"dp": 3}, "need 3 ranks"),
        ({"dp": 2, "tp": 3}, "need 6 ranks"),
        ({"dp": 0}, "must be positive"),
        ({"dp": -2}, "axis dp is -2"),
        ({"dp": -1, "tp": -1}, "one of them may be -1"),
        ({"dp": -1, "tp": 3}, "need 3 ranks"),
    ],
)
def test_axes_that_do_not_fit_are_refused_on_every_rank(axes, words) -> None:
    def main(world: ec.World) -> str:
        with pytest.raises(ArgumentError, match=words) as info:
            world.mesh(**axes)
        return str(info.value)

    assert len(set(ec.run(main, ranks=4))) == 1


def test_an_unknown_axis_is_named_with_those_there_are() -> None:
    def main(world: ec.World) -> None:
        with pytest.raises(ArgumentError, match=r"no axis 'pp': it has \['dp', 'tp'\]"):
            world.mesh(dp=1, tp=2)["pp"]

    ec.run(main, ranks=2)
