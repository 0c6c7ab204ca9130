"""Chooses, from options of the command line, how the ranks share a model and its data."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from gpt import GPT, Block
from stages import cut
from torch import Tensor, nn

import echelon as ec
from echelon.plans.axes import axes_of

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
    add("--plan", help="several at once, instead of --technique: axes such as pp=2,shard=2")
    strategies = [strategy.name for strategy in ec.Strategy]
    add("--shard", type=int, default=1, help="ranks that share the parts of a hybrid strategy")
    add("--strategy", default="FULL_SHARD", choices=strategies, help="what FSDP shards")
    add("--layout", default="flat", choices=["flat", "rows"], help="how FSDP cuts parameters")
    add("--precision", default="full", choices=["full", "bfloat16"], help="FSDP computes in this")
    add("--schedule", default="1f1b", help="of a pipeline; see: echelon schedule")
    add("--microbatches", type=int, default=4, help="parts of a batch in a pipeline")
    add("--chunks", type=int, default=1, help="stages on each rank of a pipeline")


def techniques(args: argparse.Namespace) -> set[str]:
    """The techniques whose options have an effect."""
    if args.plan is None:
        return {args.technique}
    axes = axes_of(args.plan)
    techniques = {"pipeline"} if axes.get("pp", 1) > 1 else set()
    return techniques | ({"fsdp"} if axes.get("shard", 1) > 1 else {"ddp"})


def check_options(args: argparse.Namespace) -> None:
    """Refuse options of techniques that were not chosen."""
    defaults = {
        "fsdp": {"strategy": "FULL_SHARD", "layout": "flat", "precision": "full", "shard": 1},
        "pipeline": {"schedule": "1f1b", "microbatches": 4, "chunks": 1},
    }
    axes = {"fsdp": "shard", "pipeline": "pp"}
    for technique, options in defaults.items():
        changed = [name for name, value in options.items() if getattr(args, name) != value]
        if changed and technique not in techniques(args):
            raise ec.ArgumentError(
                f"--{changed[0]} needs --technique {technique}, or a --plan with "
                f"{axes[technique]} > 1"
            )
    if args.plan is not None:
        for name, default in (("technique", "ddp"), ("shard", 1)):
            if getattr(args, name) != default:
                raise ec.ArgumentError(f"--{name} and --plan say the same: leave one of them out")


def plan_of(args: argparse.Namespace, model: GPT) -> ec.Plan:
    """The plan of ``--plan`` and its options."""
    options = pipeline_options(args)
    if "fsdp" in techniques(args):
        options["strategy"] = ec.Strategy[args.strategy]
        options["fsdp"] = {"layout": args.layout, "precision": precision(args, model)}
    return ec.Plan.parse(args.plan, **options)


def pipeline_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a plan that has stages."""
    names = ("microbatches", "schedule", "chunks") if "pipeline" in techniques(args) else ()
    return {name: getattr(args, name) for name in names}


def precision(args: argparse.Namespace, model: GPT) -> ec.MixedPrecision:
    """The dtypes of a step, from ``--precision``."""
    low = args.precision == "bfloat16" and next(model.parameters()).dtype == torch.float32
    return ec.MixedPrecision(compute=torch.bfloat16 if low else None)


def wrap(model: GPT, args: argparse.Namespace, world: ec.World, loss: Loss) -> Shared:
    """Wrap the model as the options say."""
    check_options(args)
    if args.plan is not None:
        plan = plan_of(args, model)
        units = ec.units.by_type(Block) if plan.shard > 1 else None
        if plan.pp == 1:
            return ec.parallelize(model, plan, world, units=units)
        stages = cut(model, plan.pp * plan.chunks)
        return ec.parallelize(stages, plan, world, loss_fn=loss, units=units)
    if args.technique == "ddp":
        return ec.DDP(model, world.group)
    if args.technique == "pipeline":
        stages = cut(model, world.size * args.chunks)
        microbatches, schedule = args.microbatches, args.schedule
        return ec.Pipeline(
            stages, world.group, microbatches=microbatches, schedule=schedule, loss_fn=loss
        )
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
        precision=precision(args, model),
    )


def share(args: argparse.Namespace, world: ec.World) -> tuple[int, int]:
    """The share of a batch that this rank reads; (0, 1) is all of it, as for a pipeline."""
    if args.plan is not None:
        plan = ec.Plan.parse(args.plan, **pipeline_options(args))
        return plan.data_rank(world), plan.data_size
    return (0, 1) if args.technique == "pipeline" else (world.rank, world.size)


def timed(model: nn.Module) -> AbstractContextManager[ec.pipeline.Measurement | None]:
    """A block that measures the timeline of a pipeline."""
    return model.measure() if isinstance(model, ec.Pipeline) else nullcontext()


@contextmanager
def whole(model: Shared, plain: GPT, world: ec.World) -> Iterator[GPT]:
    """A plain model with all weights, on rank 0. All ranks enter the block."""
    if isinstance(model, ec.FSDP):
        with model.full_parameters():
            yield plain
    elif isinstance(model, ec.Pipeline):
        state = model.whole_state_dict(rank0_only=True)
        if world.rank == 0:  # ``plain`` has parts, or old values, of what other ranks have
            first = next(iter(state.values()))
            plain = GPT(plain.config).to(world.device, first.dtype)
            plain.load_state_dict(state)
        yield plain
    else:
        yield plain
