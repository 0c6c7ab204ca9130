"""What runs on each rank: a function of the user, or the training that a plan asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any, final

import torch
from torch import nn

from echelon.comm.world import World
from echelon.errors import ArgumentError
from echelon.fsdp.units import Rule
from echelon.laboratory.batch_rows import Loss, ModelCall, Row, model_call, num_rows, select_rows
from echelon.laboratory.one_process import SEED, MakeModel, MakeOptimizer
from echelon.laboratory.value_recorder import TrainingValues, ValueRecorder
from echelon.modules.replica_check import without_replica_checks
from echelon.pipeline.api import Pipeline
from echelon.pipeline.microbatch import split_batch
from echelon.plans.parallelize import parallelize
from echelon.plans.plans import Plan
from echelon.train.gradient_norm import clip_grad_norm_

TrainFunction = Callable[[World, nn.Module, list[Any], MakeOptimizer], nn.Module | None]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class RankTraining:
    """What one rank does; called with its world.

    Attributes:
        function: trains the model.
        make_model: used where ranks are processes.
        models: one for each rank, where ranks share a process; some libraries change global state
            while they build a model.
        batches: one for each step.
        optimizer: makes one of parameters.
        name: of the function, for errors.
    """

    function: TrainFunction
    make_model: MakeModel
    models: Sequence[nn.Module]
    batches: Sequence[Any]
    optimizer: MakeOptimizer
    name: str

    def __call__(self, world: World) -> TrainingValues:
        """Train on this rank.

        Raises:
            ArgumentError: the function did not make one step for each batch.
        """
        torch.manual_seed(SEED)
        model = self.models[world.rank] if self.models else self.make_model().double()
        torch.manual_seed(SEED)
        in_stages = isinstance(self.function, PlanTraining) and self.function.plan.pp > 1
        recorder = ValueRecorder(model, in_stages=in_stages)
        with recorder.recording(), without_replica_checks():
            trained = self.function(world, model, deepcopy(list(self.batches)), self.optimizer)
        steps, expected = recorder.num_steps, len(self.batches)
        if steps != expected:
            raise ArgumentError(
                f"{self.name} made {steps} steps of a torch.optim.Optimizer on rank {world.rank} "
                f"for {expected} batches: make one step for each batch, with an optimizer of torch"
            )
        return recorder.finish(trained)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PlanTraining:
    """The training loop of a plan.

    Attributes:
        plan: how ranks share the model.
        loss_fn: of an output and a target.
        units: which modules FSDP gathers at once; None for its own choice.
        clip: the largest norm of the gradient; None for any.
    """

    plan: Plan
    loss_fn: Loss
    units: Rule | None
    clip: float | None

    def __call__(
        self, world: World, model: nn.Module, batches: list[Any], optimizer: MakeOptimizer
    ) -> nn.Module:
        """Train ``model`` as the plan says; returns it wrapped."""
        plan = self.plan
        wrapped = parallelize(
            model, plan, world, loss_fn=self.loss_fn if plan.pp > 1 else None, units=self.units
        )
        stepper = optimizer(list(wrapped.parameters()))
        rank = plan.data_rank(world)
        # Ranks with the same rows, the stages of a pipeline, draw the same numbers.
        torch.manual_seed(SEED + 1 + rank)
        for batch in batches:
            rows = data_rows(plan, rank, num_rows(batch))
            call = model_call(select_rows(batch, rows))
            if isinstance(wrapped, Pipeline):
                args, kwargs = _positional(model, call)
                wrapped.step(*args, target=call.target, **kwargs)
            else:
                self.loss_fn(wrapped(*call.args, **call.kwargs), call.target).backward()
            if self.clip is not None:
                clip_grad_norm_(wrapped, self.clip)
            stepper.step()
            stepper.zero_grad()
        return wrapped


def _positional(model: nn.Module, call: ModelCall) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, the first ones by position: a pipeline sends these by stages."""
    args, kwargs = list(call.args), dict(call.kwargs)
    for name in list(signature(model.forward).parameters)[len(args) :]:
        if name not in kwargs:
            break
        args.append(kwargs.pop(name))
    return args, kwargs


def data_rows(plan: Plan, rank: int, size: int) -> range:
    """The rows of a batch of ``size`` rows that the ranks at position ``rank`` read."""
    length = size // plan.data_size
    return range(rank * length, (rank + 1) * length)


def check_sizes(plan: Plan, batches: Sequence[Any]) -> None:
    """Refuse batches that the plan cannot share evenly.

    Raises:
        ArgumentError: names the batch.
    """
    for index, batch in enumerate(batches):
        size = num_rows(batch)
        if size % plan.data_size:
            raise ArgumentError(
                f"batch {index} has {size} rows, which {plan.data_size} data-parallel ranks of "
                f"{plan} cannot share evenly: give a multiple of {plan.data_size}, or a function "
                "that weights its ranks"
            )
        if plan.microbatches is not None and size // plan.data_size < plan.microbatches:
            raise ArgumentError(
                f"batch {index} has {size // plan.data_size} rows for each pipeline of {plan}, and "
                f"microbatches is {plan.microbatches}: give more rows or fewer microbatches"
            )


def microbatch_rows(plan: Plan, rank: int, step: int, size: int) -> list[list[Row]]:
    """The rows of each microbatch of a rank of a pipeline."""
    assert plan.microbatches is not None, "only pipelines have them"
    rows = torch.tensor(data_rows(plan, rank % plan.data_size, size), device="cpu")
    parts = split_batch(rows, plan.microbatches).values
    return [[(step, int(row)) for row in part] for part in parts]
