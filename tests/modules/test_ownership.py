"""A parameter belongs to one wrapper at a time."""

from __future__ import annotations

import copy
import gc

import pytest
from torch import nn

import echelon as ec

WRAPPERS = {
    "DDP": ec.DDP,
    "manual DDP": lambda module, group: ec.DDP(module, group, sync="manual"),
    "FSDP": ec.FSDP,
}


@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("inner", WRAPPERS)
def test_neither_a_part_nor_the_whole_is_wrapped_again(outer: str, inner: str) -> None:
    def main(world: ec.World) -> None:
        for first, second in (
            (lambda net: net, lambda net: net),
            (lambda net: net, lambda net: net[0]),
            (lambda net: net[0], lambda net: net),
        ):
            net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            kept = WRAPPERS[inner](first(net), world.group)
            name = inner.split()[-1]
            with pytest.raises(ec.ArgumentError, match=f"weight' belongs to {name} already"):
                WRAPPERS[outer](second(net), world.group)
            with pytest.raises(ec.ArgumentError, match=f"belongs to {name} already"):
                WRAPPERS[outer](kept, world.group)

    ec.run(main, 2)


def test_what_a_ddp_has_left_can_be_wrapped_again() -> None:
    def main(world: ec.World) -> None:
        net = nn.Linear(2, 2)
        ec.DDP(net, world.group).unwrap()
        wrapped = ec.DDP(net, world.group)
        del wrapped
        gc.collect()
        ec.FSDP(net, world.group)

    ec.run(main, 1)


def test_copies_and_ignored_parameters_belong_to_nobody_else() -> None:
    def main(world: ec.World) -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        wrapped = ec.FSDP(net, world.group, ignored=[net[1]])
        ec.DDP(net[1], world.group)
        clone = copy.deepcopy(wrapped)
        with pytest.raises(ec.ArgumentError, match="belongs to FSDP already"):
            ec.DDP(clone.module, world.group)

    ec.run(main, 2)
