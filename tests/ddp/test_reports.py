"""What a user can ask a DDP: buckets, and parameters without a gradient."""

import torch
from torch import nn

import echelon as ec
from echelon.ddp.reports import BucketInfo, Unused


def test_buckets_and_unused_parameters_are_named() -> None:
    def main(world: ec.World) -> None:
        ddp = ec.DDP(nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1, bias=False)]), world.group)
        nbytes = 4 * (16 + 16 + 2 + 3 + 6)  # gradients begin at multiples of 16; flags, notices
        assert ddp.buckets == (BucketInfo(ddp.buckets[0].names, torch.float32, nbytes),)
        assert sorted(ddp.buckets[0].names) == ["0.bias", "0.weight", "1.weight"]
        list(ddp.parameters())[2 * world.rank].sum().backward()
        here = ("0.bias", "1.weight") if world.rank == 0 else ("0.weight", "0.bias")
        assert ddp.unused_parameters() == Unused(here, ("0.bias",))

    ec.run(main, 2)
