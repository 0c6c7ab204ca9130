"""The states of a unit: which follow each other, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.errors import StateError
from echelon.fsdp.unit import HIDDEN, SHARDED, UNSHARDED, UNSHARDING, Unit, UnitState
from tests.worlds import run_world

FOLLOWS = {
    (SHARDED, UNSHARDING),
    (UNSHARDING, UNSHARDED),
    (UNSHARDING, SHARDED),
    (UNSHARDED, HIDDEN),
    (UNSHARDED, SHARDED),
    (HIDDEN, UNSHARDED),
    (HIDDEN, SHARDED),
}


def unit_of(world: ec.World) -> Unit:
    model = ec.FSDP(nn.Linear(3, 2), world.group, min_num_params=0)
    return model._units[0]


def test_no_state_follows_another_but_those_that_may() -> None:
    def main(world: ec.World) -> None:
        unit = unit_of(world)
        for before in UnitState:
            for after in UnitState:
                unit.state = before
                if (before, after) in FOLLOWS:
                    unit._enter(after)
                    assert unit.state is after
                else:
                    with pytest.raises(StateError, match=f"{before.name} .*become {after.name}"):
                        unit._enter(after)
                    assert unit.state is before

    ec.run(main, 1)


def test_what_is_shown_is_what_the_state_says() -> None:
    def main(world: ec.World) -> None:
        unit = unit_of(world)
        (weight, bias), shard = unit._params, [param.data for param in unit._params]
        values = [torch.Size([2, 3]), torch.Size([2])]

        def shows_shards() -> bool:
            now = [ec.local_shard(param).data_ptr() for param in (weight, bias)]
            return now == [ec.local_shard(one).data_ptr() for one in shard]

        assert unit.state is SHARDED
        assert shows_shards()
        unit.prefetch()
        assert unit.state is UNSHARDING
        assert shows_shards()
        unit.unshard()
        assert unit.state is UNSHARDED
        assert [weight.shape, bias.shape] == values
        unit.hide()
        assert unit.state is HIDDEN
        assert unit.has_unsharded
        assert shows_shards()
        unit.unshard()
        assert [weight.shape, bias.shape] == values
        unit.reshard()
        assert unit.state is SHARDED
        assert shows_shards()
        assert unit.num_unshards == 1
        unit.unshard_for_others()
        assert unit.state is SHARDED
        assert unit.num_unshards == 2

    ec.run(main, 2)


def unshard_without_memory(world: ec.World) -> None:
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    unit = ec.FSDP(layer, world.group, min_num_params=0)._units[0]
    _, last = unit.storages

    def fails(*, async_op: bool = False) -> None:
        raise torch.OutOfMemoryError("no memory")

    for begin in (unit.prefetch, unit.unshard, unit.unshard_for_others):
        last.unshard = fails  # type: ignore[method-assign]
        with pytest.raises(torch.OutOfMemoryError):
            begin()
        assert unit.state is SHARDED
        assert [storage.unsharded_nbytes for storage in unit.storages] == [0, 0]
        del last.unshard
        unit.unshard()
        assert all(storage.unsharded_nbytes for storage in unit.storages)
        assert layer.weight.shape == (2, 3)
        unit.reshard()
    assert unit.num_unshards == 3


def test_an_unshard_that_has_no_memory_for_one_storage_frees_that_of_the_others() -> None:
    run_world("gloo", unshard_without_memory, 2)  # memory of threads is shared and stays
