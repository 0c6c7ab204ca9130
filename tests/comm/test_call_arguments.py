"""Arguments of calls are refused before anything is sent."""

import pytest
import torch

from echelon.comm.call_arguments import Arguments
from echelon.errors import ArgumentError, RankError

ARGUMENTS = Arguments(rank=1, size=3, device=torch.device("cpu"))


def test_rows_and_splits_cut_a_tensor_into_one_part_for_each_rank() -> None:
    table = torch.zeros(6, 2)
    assert ARGUMENTS.rows("input", table, None) == [4, 4, 4]
    assert ARGUMENTS.rows("input", table, [1, 0, 5]) == [2, 0, 10]
    assert ARGUMENTS.splits("input", table, [2, 0, 10]) == [2, 0, 10]
    for rows in ([6], [1, 2, 4]):
        with pytest.raises(ArgumentError, match="do not cut 6 rows for 3 ranks"):
            ARGUMENTS.rows("input", table, rows)
    with pytest.raises(ArgumentError, match="4 rows, not a multiple of 3 ranks"):
        ARGUMENTS.rows("input", torch.zeros(4), None)


def test_members_of_a_subgroup_are_sorted_without_repetitions() -> None:
    assert ARGUMENTS.members([2, 0, 2]) == [0, 2]
    with pytest.raises(RankError):
        ARGUMENTS.members([3])
    with pytest.raises(ArgumentError, match="at least one rank"):
        ARGUMENTS.members([])


def test_only_the_root_gives_a_list_and_it_has_one_tensor_for_each_rank() -> None:
    tensors = [torch.zeros(1)] * 3
    assert ARGUMENTS.list_of_root("gather", "outputs", tensors, root=1) is tensors
    assert len(ARGUMENTS.list_of_root("gather", "outputs", None, root=0)) == 0
    with pytest.raises(ArgumentError, match="only rank 0 gives outputs, this is rank 1"):
        ARGUMENTS.list_of_root("gather", "outputs", tensors, root=0)
    with pytest.raises(ArgumentError, match="rank 1 must give 3 outputs, got 2"):
        ARGUMENTS.list_of_root("gather", "outputs", tensors[:2], root=1)


@pytest.mark.parametrize("label", [3, ["epoch"]])
def test_a_label_is_a_text(label: object) -> None:
    with pytest.raises(ArgumentError, match=r"label is .*; give a str, or None"):
        Arguments(0, 2, torch.device("cpu")).check_label(label)
