"""A group over an engine's own collectives passes all checks of groups over c10d."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.comm.torch_dist.c10d_checks import CHECKS, outcome
from tests.rank_zero import fake_engine, group_of


@pytest.mark.parametrize(
    ("ranks", "compared"),
    [(3, False), (2, True)],
    ids=["3 ranks", "2 ranks, calls compared"],
)
@pytest.mark.parametrize("name", CHECKS, ids=lambda name: name.partition("check_")[2])
def test_that(name: str, ranks: int, compared: bool) -> None:
    outcome(ranks, native=True, compared=compared).require(name)


class DirectEngine:
    """An engine that writes its output while others read their inputs, unlike gloo."""

    def __init__(self, rank: int, size: int) -> None:
        self._engine = fake_engine(rank, size)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, options: Any) -> Any:
        assert output.untyped_storage().data_ptr() != input.untyped_storage().data_ptr()
        return self._engine._reduce_scatter_base(output, input, options)


def test_the_part_of_another_rank_is_not_written_while_it_is_read() -> None:
    group, _ = group_of(2, engine_of=DirectEngine)
    values = torch.arange(4.0)
    group.reduce_scatter_single(values[2:], values)  # over the part of rank 1
    assert values.tolist() == [0, 1, 0, 1]
    group.close()
