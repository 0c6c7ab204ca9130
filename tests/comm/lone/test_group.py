"""A rank whose peers are not there: its calls return at once, as if the peers were like it."""

import pytest
import torch

import echelon as ec
from echelon.comm.lone.group import LoneGroup
from echelon.comm.world import World
from echelon.errors import UnsupportedError


def ones(numel: int) -> torch.Tensor:
    return torch.ones(numel, dtype=torch.float64)


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", 6.0), ("mean", 2.0), ("min", 2.0), ("max", 2.0), ("product", 8.0)]
)
def test_a_reduction_is_that_of_equal_values(op: str, expected: float) -> None:
    group = LoneGroup(1, range(3))
    value = 2 * ones(4)
    group.all_reduce(value, op)
    assert value.tolist() == [expected] * 4
    output = ones(2)
    group.reduce_scatter_single(output, 2 * ones(6), op)
    assert output.tolist() == [expected] * 2


@pytest.mark.parametrize(("size", "expected"), [(2, 0), (3, 5)])
def test_the_exclusive_or_of_equal_values_depends_on_how_many_there_are(
    size: int, expected: int
) -> None:
    value = torch.tensor([5])
    LoneGroup(0, range(size)).all_reduce(value, "bxor")
    assert value.item() == expected


def test_what_is_gathered_is_what_this_rank_gave() -> None:
    group = LoneGroup(2, range(4))
    output = torch.zeros(8, dtype=torch.float64)
    group.all_gather_single(output, torch.arange(2.0, dtype=torch.float64))
    assert output.tolist() == [0.0, 1.0] * 4
    unequal = [torch.zeros(numel) for numel in (3, 3, 2, 2)]
    group.all_gather(unequal, torch.tensor([1.0, 2.0]))
    assert [part.tolist() for part in unequal] == [[1, 2, 0], [1, 2, 0], [1, 2], [1, 2]]
    assert group.all_gather_object({"rank": group.rank}) == [{"rank": 2}] * 4
    assert group.broadcast_object("mine", src=0) == "mine" if group.rank == 0 else True
    received = torch.zeros(4)
    group.all_to_all_single(received, torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert received.tolist() == [2.0] * 4


def test_messages_and_barriers_return() -> None:
    group = LoneGroup(0, range(2))
    group.send(ones(1), 1)
    group.irecv(ones(1), 1).wait()
    work = group.barrier(async_op=True)
    assert work is not None
    assert work.done()


def test_a_thousand_ranks_have_a_mesh() -> None:
    mesh = World(LoneGroup(437, range(1000)), backend="fake").mesh(dp=10, shard=100)
    assert mesh.coordinates == {"dp": 4, "shard": 37}
    assert (mesh["shard"].rank, mesh["shard"].size) == (37, 100)
    assert mesh["dp"].ranks == tuple(range(37, 1000, 100))


def test_ranks_that_are_there_communicate_in_their_subgroup() -> None:
    """Of 6 ranks on two axes, the line of rank 0 along the first one is there."""

    def main(present: ec.World) -> list[float]:
        line = (0, 3)
        group = LoneGroup(line[present.rank], range(6), present=present.group, present_ranks=line)
        mesh = World(group, backend="fake").mesh(pp=2, shard=3)
        value = torch.tensor([float(present.rank + 1)])
        mesh["pp"].all_reduce(value)
        alike = torch.tensor([float(present.rank + 1)])
        mesh["shard"].all_reduce(alike)
        return [value.item(), alike.item()]

    assert ec.run(main, 2) == [[3.0, 3.0], [3.0, 6.0]]


def test_memory_is_shared_only_where_it_was_asked_for() -> None:
    with pytest.raises(UnsupportedError, match="do not share memory"):
        LoneGroup(0, range(2)).shared_tensor(4)
    group = LoneGroup(0, range(2), shares_memory=True)
    assert group.shared_tensor(4).numel() == 4
    assert group.window(3).local.numel() == 3


def test_operations_of_a_group_and_its_subgroups_are_told() -> None:
    heard: list[tuple[int, str]] = []
    group = LoneGroup(
        0, range(4), issued=lambda group, call: heard.append((group.size, type(call).__name__))
    )
    group.all_reduce(torch.ones(2))
    group.subgroup([0, 2]).all_gather_object("text")
    assert heard[0] == (4, "AllReduce")
    assert heard[-1] == (2, "AllGather")
