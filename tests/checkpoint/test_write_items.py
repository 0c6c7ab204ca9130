"""The pieces of all ranks make up each tensor exactly once, or the save is refused."""

from pathlib import Path

import pytest
import torch

from echelon.checkpoint.sections import Section
from echelon.checkpoint.write_items import merge_reports, plan_writes, report_items
from echelon.errors import StateError
from echelon.state.tensor_shard import Replication, TensorShard


def report(rank: int, *, start: int = 0, numel: int = 4, dtype: torch.dtype = torch.float32):
    """What one of two ranks reports of its range of a tensor of eight elements."""
    values = torch.arange(start, start + numel, dtype=dtype)
    shard = TensorShard(names=("w", "tied"), shape=(8,), start=start, values=values)
    section = Section(kind="module", facts={}, tensors=(shard,))
    return report_items(plan_writes({"model": section}, [{}, {}], rank))


def test_ranges_of_two_ranks_make_up_a_tensor() -> None:
    merged = merge_reports([report(0), report(1, start=4)], Path("run"))
    assert merged.keys() == {"w"}
    assert (merged["w"].shape, merged["w"].ties) == ((8,), ("tied",))
    assert [(p.file, p.start, p.numel) for p in merged["w"].pieces] == [(0, 0, 4), (1, 4, 4)]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"start": 2}, "several ranks hold elements 2 and on of 'w'"),
        ({"start": 5, "numel": 3}, "no rank holds elements 4 and on of 'w'"),
        ({"start": 4, "numel": 3}, "no rank holds elements 7 to 8 of 'w'"),
        ({"start": 4, "dtype": torch.float64}, r"is F64\(8,\) on rank 1 and F32\(8,\) on rank 0"),
    ],
)
def test_ranges_that_do_not_make_up_a_tensor_are_refused(second, message: str) -> None:
    with pytest.raises(StateError, match=message):
        merge_reports([report(0), report(1, **second)], Path("run"))


def test_a_rank_writes_its_own_values_only_where_they_differ_from_the_first_rank() -> None:
    shard = TensorShard(
        names=("w",), shape=(2,), start=0, values=torch.ones(2), replication=Replication.PER_RANK
    )
    sections = {"model": Section(kind="module", facts={}, tensors=(shard,))}
    digests = [{"w": "a"}, {"w": "a"}, {"w": "b"}]
    names = [[item.name for item in plan_writes(sections, digests, rank)] for rank in range(3)]
    assert names == [["w"], [], ["own/2/w"]]
