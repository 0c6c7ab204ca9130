"""Compares the step time that the planner predicts from a measured machine with training.

    python benchmarks/measured_plans.py                # 12 plans of a GPT on 2 local processes
    python benchmarks/measured_plans.py --only pp=2

The machine is measured as ``echelon plan --measure`` does, and each plan trains in processes of its
own, both in every round, because the speed of a machine that others use changes within a minute.
Medians are compared. A plan is chosen by its predicted time for a sequence.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import argparse
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from models import GPT, GPTConfig, token_loss
from report import markdown_table
from rich.console import Console
from torch import Tensor, nn

import echelon as ec
from echelon.planner.layout import Layout, Recompute, ShardedStates
from echelon.planner.measured_cluster import MeasuredCluster, measure_cluster
from echelon.planner.model_tracing import trace_model
from echelon.planner.step_time import StepTime, step_time
from echelon.planner.traced_model import TracedModel

CONFIG = GPTConfig()
RANKS = 2
SHARDED = {
    None: ShardedStates.PARAMETERS,
    ec.Strategy.FULL_SHARD: ShardedStates.PARAMETERS,
    ec.Strategy.SHARD_GRAD_OP: ShardedStates.GRADIENTS,
    ec.Strategy.SHARD_OPTIMIZER: ShardedStates.OPTIMIZER,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan and the sequences of its step."""

    plan: ec.Plan
    batch: int

    def __str__(self) -> str:
        plan = self.plan
        facts = [str(plan), f"batch {self.batch}"]
        if plan.strategy is not None:
            facts.append(plan.strategy.name)
        if plan.pp > 1:
            facts.append(f"{plan.schedule}, {plan.microbatches} microbatches")
        if plan.pipeline.get("recompute"):
            facts.append("recompute")
        return ", ".join(facts)

    def layout(self) -> Layout:
        """The same for the planner."""
        plan, is_sharded = self.plan, self.plan.shard > 1
        microbatches = plan.microbatches or 1
        recompute = plan.pipeline.get("recompute", False)
        return Layout(
            pp=plan.pp,
            dp=plan.dp,
            shard=plan.shard,
            chunks=plan.chunks,
            microbatches=microbatches,
            microbatch=self.batch // plan.data_size // microbatches,
            sharded=SHARDED[plan.strategy] if is_sharded else ShardedStates.NOTHING,
            recompute=Recompute.BLOCKS if recompute else Recompute.NOTHING,
        )


def cases() -> list[Case]:
    """Twelve plans of two ranks."""
    strategies = (
        ec.Strategy.FULL_SHARD,
        ec.Strategy.SHARD_GRAD_OP,
        ec.Strategy.SHARD_OPTIMIZER,
    )

    def pipeline(schedule: str, microbatches: int, **options: Any) -> ec.Plan:
        return ec.Plan(pp=2, schedule=schedule, microbatches=microbatches, **options)

    return [
        Case(plan=ec.Plan(dp=2), batch=4),
        Case(plan=ec.Plan(dp=2), batch=8),
        Case(plan=ec.Plan(dp=2), batch=16),
        *(Case(plan=ec.Plan(shard=2, strategy=strategy), batch=8) for strategy in strategies),
        Case(plan=ec.Plan(shard=2, strategy=strategies[0]), batch=16),
        Case(plan=pipeline("gpipe", 4), batch=8),
        Case(plan=pipeline("1f1b", 4), batch=8),
        Case(plan=pipeline("1f1b", 8), batch=16),
        Case(plan=pipeline("interleaved", 4, chunks=2), batch=8),
        Case(plan=pipeline("1f1b", 4, pipeline={"recompute": True}), batch=8),
    ]


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(CONFIG)


def tokens(rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CONFIG.vocabulary, (rows, CONFIG.context), generator=generator)


def train(world: ec.World, case: Case, steps: int) -> float:
    """The median time of a step on this rank, of those after the first two."""
    torch.set_num_threads(1)
    plan = case.plan
    units = ec.units.by_type("Block") if plan.shard > 1 else None
    loss_fn = token_loss if plan.pp > 1 else None
    model = ec.parallelize(gpt(), plan, world, units=units, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = case.batch // plan.data_size
    x = tokens(rows, seed=world.rank if plan.pp == 1 else 0)
    target, times = x.roll(-1, dims=1), []
    for _ in range(steps + 2):
        world.group.barrier()
        start_s = time.perf_counter()
        if isinstance(model, ec.Pipeline):
            model.step(x, target=target)
        else:
            token_loss(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        world.group.barrier()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[2:])


def blocks_of_ranks(plan: ec.Plan) -> list[int]:
    """How many blocks ``split`` gives to each rank of a pipeline."""
    counts = [0] * plan.pp
    for index, stage in enumerate(ec.pipeline.split(gpt(), plan.pp * plan.chunks)):
        names = (re.match(r"blocks\.(\d+)\.", name) for name in stage.state_dict())
        counts[index % plan.pp] += len({match[1] for match in names if match})
    return counts


def predict(case: Case, model: TracedModel, measured: MeasuredCluster) -> StepTime:
    """The time of a step by its terms."""
    blocks = blocks_of_ranks(case.plan)
    return step_time(model, case.layout(), measured.cluster, measured.stack, blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose text contains this")
    parser.add_argument("--rounds", type=int, default=3, help="of measuring and training")
    parser.add_argument("--steps", type=int, default=5, help="of each plan in a round, after two")
    parser.add_argument("--seconds", type=float, default=30.0, help="for measuring, in all rounds")
    args = parser.parse_args()
    example = tokens(1)
    model = trace_model(gpt(), example, example, token_loss, dtype=None)
    chosen = [case for case in cases() if args.only in str(case)]
    taken: dict[Case, list[float]] = {case: [] for case in chosen}
    predicted: dict[Case, list[float]] = {case: [] for case in chosen}
    for number in range(args.rounds):
        measured = measure_cluster(RANKS, seconds=args.seconds / args.rounds)
        print(f"round {number + 1} of {args.rounds}: {measured.cluster.device}", flush=True)
        print(measured.stack.rates)
        for case in chosen:
            taken[case].append(max(ec.run(train, RANKS, "processes", args=(case, args.steps))))
            prediction = predict(case, model, measured)
            predicted[case].append(prediction.total)
            terms = sorted(prediction.terms().items(), key=lambda item: -item[1])
            text = ", ".join(f"{name} {seconds:.3f}" for name, seconds in terms if seconds > 1e-3)
            print(f"{case}: {taken[case][-1]:.3f} s, predicted {text}", flush=True)
    show(
        {case: statistics.median(seconds) for case, seconds in taken.items()},
        {case: statistics.median(seconds) for case, seconds in predicted.items()},
        {case: max(seconds) / min(seconds) - 1 for case, seconds in taken.items()},
    )


def show(
    taken: Mapping[Case, float], predicted: Mapping[Case, float], spread: Mapping[Case, float]
) -> None:
    """Print medians of all rounds, and how far the slowest round is from the fastest one."""
    columns = ("plan", "s", "rounds differ by", "predicted s", "off")
    table = markdown_table("step time", columns, ())
    errors = {case: predicted[case] / seconds - 1 for case, seconds in taken.items()}
    for case, seconds in taken.items():
        facts = f"{seconds:.3f}", f"{spread[case]:.0%}", f"{predicted[case]:.3f}"
        table.add_row(str(case), *facts, f"{errors[case]:+.1%}")
    Console(width=120).print(table)
    best = min(taken, key=lambda case: taken[case] / case.batch)
    choice = min(predicted, key=lambda case: predicted[case] / case.batch)
    above = taken[choice] / choice.batch / (taken[best] / best.batch) - 1
    print(
        f"{sum(abs(error) <= 0.15 for error in errors.values())} of {len(errors)} within 15 %, "
        f"worst {max(map(abs, errors.values())):.1%}; chosen {choice}, best {best}: "
        f"{above:.1%} above it"
    )


if __name__ == "__main__":
    main()
