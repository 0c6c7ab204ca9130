"""Chooses, from options of the command line, how the ranks share a model."""

from __future__ import annotations

import argparse

import torch
from gpt import Block
from torch import nn

import echelon as ec


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--technique", default="ddp", choices=["ddp", "fsdp"], help="copies, or parts, of the model"
    )
    strategies = [strategy.name for strategy in ec.Strategy]
    add("--shard", type=int, default=1, help="ranks that share the parts of a hybrid strategy")
    add("--strategy", default="FULL_SHARD", choices=strategies, help="what FSDP shards")
    add("--layout", default="flat", choices=["flat", "rows"], help="how FSDP cuts parameters")
    add("--precision", default="full", choices=["full", "bfloat16"], help="FSDP computes in this")


def wrap(model: nn.Module, args: argparse.Namespace, world: ec.World) -> ec.DDP | ec.FSDP:
    """The model, shared by the ranks as the options say."""
    if args.technique == "ddp":
        given = (args.strategy, args.shard, args.layout, args.precision)
        if given != ("FULL_SHARD", 1, "flat", "full"):
            raise ec.ArgumentError(
                "--strategy, --shard, --layout and --precision need --technique fsdp"
            )
        return ec.DDP(model, world.group)
    low = args.precision == "bfloat16" and next(model.parameters()).dtype == torch.float32
    strategy = ec.Strategy[args.strategy]
    group, replicas = world.group, None
    if args.shard != 1 and not strategy.hybrid:
        raise ec.ArgumentError("--shard needs a hybrid --strategy")
    if strategy.hybrid:
        mesh = world.mesh(replicate=-1, shard=args.shard)
        group, replicas = mesh["shard"], mesh["replicate"]
    return ec.FSDP(
        model,
        group,
        replicate=replicas,
        units=ec.units.by_type(Block),
        strategy=strategy,
        layout=args.layout,
        precision=ec.MixedPrecision(compute=torch.bfloat16 if low else None),
    )
