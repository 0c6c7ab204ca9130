"""A collective over shards would mix other elements of each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError
from tests.worlds import run_world


@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("world", ["threads", "processes"])
def test_collectives_do_not_take_the_parts_of_ranks_for_one_tensor(world: str, layout: str) -> None:
    run_world(world, gives_parts_to_collectives, 2, (layout,))


def gives_parts_to_collectives(world: World, layout: Any) -> None:
    model = ec.FSDP(nn.Linear(4, 4), world.group, layout=layout, min_num_params=1)
    model(torch.ones(2, 4)).sum().backward()
    group, other, empty = world.group, 1 - world.rank, torch.empty(16)
    for param in model.parameters():
        assert param.grad is not None
        for part in (param, param.data, param.detach(), param.grad, param.grad * 2):
            for call in (
                lambda part=part: group.broadcast(part, 0),
                lambda part=part: group.all_reduce(part, "sum"),
                lambda part=part: group.reduce(part, 0, "sum"),
                lambda part=part: group.all_gather_single(empty, part),
                lambda part=part: group.all_gather([empty, empty], part),
                lambda part=part: group.reduce_scatter_single(part, empty),
                lambda part=part: group.all_to_all_single(part, part),
                lambda part=part: group.send(part, other),
            ):
                with pytest.raises(ArgumentError, match=r"parts of ranks for one tensor: of '"):
                    call()
        if layout == "rows":  # equal parts
            group.all_reduce(ec.local_shard(param.grad), "sum")
