"""A part knows of what it is a part."""

import torch

from echelon.modules.sharded_tensor import Sharding


def test_a_part_of_rows_is_cut_out_of_a_whole_value() -> None:
    value = torch.arange(12.0).view(4, 3)
    sharding = Sharding("w", "root", (4, 3), by_rows=True)
    assert torch.equal(sharding.part_of(value), value)
    assert sharding.flattened((12,)).part_of(value).shape == (12,)


def test_parts_are_alike_if_all_ranks_hold_the_same_elements() -> None:
    first = Sharding("w", "root", (4,), ((0, 2), (2, 2)))
    assert first.is_like(Sharding("v", "other", (4,), ((0, 2), (2, 2))))
    assert not first.is_like(Sharding("w", "root", (4,), ((0, 1), (1, 3))))
    assert not first.is_like(Sharding("w", "root", (2, 2), ((0, 2), (2, 2))))
