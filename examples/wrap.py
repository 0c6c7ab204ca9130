"""Chooses, from options of the command line, how the ranks share a model and its data."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

import torch
from gpt import GPT, Block
from stages import cut
from torch import Tensor, nn

import echelon as ec

Shared: TypeAlias = ec.DDP | ec.FSDP | ec.Pipeline
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--technique",
        default="ddp",
        choices=["ddp", "fsdp", "pipeline"],
        help="copies of the model, parts of its tensors, or some of its layers",
    )
    strategies = [strategy.name for strategy in ec.Strategy]
    add("--shard", type=int, default=1, help="ranks that share the parts of a hybrid strategy")
    add("--strategy", default="FULL_SHARD", choices=strategies, help="what FSDP shards")
    add("--layout", default="flat", choices=["flat", "rows"], help="how FSDP cuts parameters")
    add("--precision", default="full", choices=["full", "bfloat16"], help="FSDP computes in this")
    add("--schedule", default="1f1b", help="of a pipeline; see: echelon schedule")
    add("--microbatches", type=int, default=4, help="parts of a batch in a pipeline")
    add("--chunks", type=int, default=1, help="stages on each rank of a pipeline")


def check_options(args: argparse.Namespace) -> None:
    """Refuse options of another technique than the one that was chosen."""
    defaults = {
        "fsdp": {"strategy": "FULL_SHARD", "layout": "flat", "precision": "full", "shard": 1},
        "pipeline": {"schedule": "1f1b", "microbatches": 4, "chunks": 1},
    }
    for technique, options in defaults.items():
        changed = [name for name, value in options.items() if getattr(args, name) != value]
        if changed and technique != args.technique:
            raise ec.ArgumentError(f"--{changed[0]} needs --technique {technique}")


def wrap(model: GPT, args: argparse.Namespace, world: ec.World, loss: Loss) -> Shared:
    """The model, shared by the ranks as the options say."""
    check_options(args)
    if args.technique == "ddp":
        return ec.DDP(model, world.group)
    if args.technique == "pipeline":
        stages = cut(model, world.size * args.chunks)
        microbatches, schedule = args.microbatches, args.schedule
        return ec.Pipeline(
            stages, world.group, microbatches=microbatches, schedule=schedule, loss_fn=loss
        )
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


def share(args: argparse.Namespace, world: ec.World) -> tuple[int, int]:
    """Which part of a batch this rank reads: (0, 1) is the whole, of which a pipeline does some."""
    return (0, 1) if args.technique == "pipeline" else (world.rank, world.size)


def timed(model: nn.Module) -> AbstractContextManager[ec.pipeline.Measurement | None]:
    """A block that measures when a pipeline computed what."""
    return model.measure() if isinstance(model, ec.Pipeline) else nullcontext()


@contextmanager
def whole(model: Shared, plain: GPT, world: ec.World) -> Iterator[GPT]:
    """The plain model with all weights, on rank 0. All ranks enter the block."""
    if isinstance(model, ec.FSDP):
        with model.full_parameters():
            yield plain
    else:
        if isinstance(model, ec.Pipeline):
            own = {id(param) for param in model.parameters()}
            state = {name: p.detach() for name, p in plain.named_parameters() if id(p) in own}
            for part in world.group.all_gather_object(state):
                plain.load_state_dict(part, strict=False)
        yield plain
