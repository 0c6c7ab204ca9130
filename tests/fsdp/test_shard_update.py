"""Values for all shards of a rank in one tensor are written when nobody reads them, or refused."""

import pytest
import torch

import echelon as ec
from echelon.errors import ArgumentError
from echelon.fsdp.shard_update import shard_update
from tests.parts import build


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (torch.ones(2), "expected 3 elements but got 2"),
        (torch.ones(3, dtype=torch.complex64), "imaginary parts"),
        (torch.full((3,), 2**24 + 1), "cannot hold all of the torch.int64 values"),
    ],
)
def test_values_that_shards_cannot_hold_are_refused(values: torch.Tensor, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        shard_update(values, [torch.ones(2), torch.ones(1)])


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_shards_are_not_written_while_another_rank_reads_them(kind: str) -> None:
    def losses(world: ec.World) -> float:
        model = ec.FSDP(build(), world.group, min_num_params=0)
        loss = model(torch.ones(1, 3, dtype=torch.float64)).square().sum()  # keeps a graph
        model.update_shards(torch.zeros(10, dtype=torch.float64))
        return loss.item()

    expected = build()(torch.ones(1, 3, dtype=torch.float64)).square().sum().item()
    assert ec.run(losses, 2, kind) == pytest.approx([expected, expected], rel=1e-12)
