"""Combines ``DDP``, ``FSDP`` and ``Pipeline`` on one model, as a ``Plan`` says.

::

    Plan(pp=2, dp=2, shard=2)           stage 0        stage 1
                                     ┌ 0 ── 1 ┐     ┌ 4 ── 5 ┐
                                  dp │ shard  │     │        │    microbatches go from 0 to 4,
                                     └ 2 ── 3 ┘     └ 6 ── 7 ┘    from 1 to 5, ... along pp

Ranks that differ on ``shard`` keep shards of the same parameters and exchange the most data, so
they are neighbours; those that differ on ``pp`` exchange the least. Ranks that differ on ``dp`` or
``shard`` have different batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from echelon import checks
from echelon.comm.group import Group
from echelon.comm.mesh import Mesh
from echelon.comm.world import World
from echelon.ddp import DDP
from echelon.errors import ArgumentError, UnsupportedError
from echelon.fsdp import FSDP, Strategy
from echelon.fsdp.policy import MixedPrecision
from echelon.fsdp.units import Rule
from echelon.pipeline.api import Pipeline
from echelon.pipeline.shared_parameters import check_memory_of_stages, shared_parameters
from echelon.pipeline.splitting.split import split
from echelon.plans.plans import Plan

_HYBRID_OF = {  # the same strategy if other groups have the same shards
    Strategy.FULL_SHARD: Strategy.HYBRID_SHARD,
    Strategy.SHARD_GRAD_OP: Strategy.HYBRID_SHARD_ZERO2,
}


def parallelize(
    model: nn.Module | Sequence[nn.Module],
    plan: Plan,
    world: World,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    units: Rule | None = None,
) -> nn.Module:
    """Share ``model`` among all ranks of ``world`` as ``plan`` says. All ranks call it.

    Law: if each rank on ``dp`` and ``shard`` has a batch of the same size and the loss is a mean,
    weights are those of one process on all these batches together.

    Args:
        model: the same on all ranks. With ``plan.pp`` > 1: a list of stages, or what
            ``ec.pipeline.split`` cuts, here into ``pp * chunks`` stages of similar numbers of
            parameters. To cut it in another way, call that and give the list.
        plan: of ``world.size`` ranks.
        world: whose mesh it becomes.
        loss_fn: called by a pipeline with output and target of a microbatch. Every plan takes it,
            so that one script has any plan; without stages the script calls it on the output.
        units: which modules FSDP gathers at once, with ``plan.shard`` > 1.

    Returns:
        a ``DDP``, an ``FSDP``, or a ``Pipeline`` of stages, which are wrapped if they are shared.

    Raises:
        ArgumentError: the plan is for another number of ranks, or does not fit the model.
        UnsupportedError: stages share a parameter, and FSDP computes in another dtype, or the
            gradients of the wrappers are no mean.

    Example:
        >>> import torch
        >>> def main(world):
        ...     torch.manual_seed(0)
        ...     model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        ...     plan = Plan(pp=2, dp=2, microbatches=2)
        ...     pipe = parallelize(model, plan, world, loss_fn=nn.MSELoss())
        ...     loss = pipe.step(torch.ones(8, 4), target=torch.zeros(8, 1), loss_everywhere=True)
        ...     return round(loss.item(), 4)
        >>> from echelon.launch.run import run
        >>> run(main, ranks=4)
        [0.0785, 0.0785, 0.0785, 0.0785]
    """
    _check(model, plan, world, loss_fn, units)
    mesh = world.mesh(pp=plan.pp, dp=plan.dp, shard=plan.shard)
    if plan.pp == 1:
        assert isinstance(model, nn.Module)
        return _wrap(model, plan, mesh, units, ())
    return _pipeline(_stages_of(model, plan), plan, world, mesh, units, loss_fn)


def _pipeline(
    stages: list[nn.Module],
    plan: Plan,
    world: World,
    mesh: Mesh,
    units: Rule | None,
    loss_fn: Callable[[Any, Any], Tensor] | None,
) -> Pipeline:
    shared = shared_parameters(stages)
    check_memory_of_stages(stages, range(len(stages)))  # wrappers give it other memory
    _check_shared(shared, plan)
    schedule, replicas = plan.make_schedule(), plan.dp * plan.shard
    for index in schedule.stages_of(mesh.coordinates["pp"]):
        stages[index] = _wrap(stages[index], plan, mesh, units, list(shared))
    replicate: Group | None = None
    if shared and replicas > 1:  # no wrapper knows which ranks have the parameters that it ignores
        replicate = world.mesh(pp=plan.pp, replicas=replicas)["replicas"]
    assert plan.microbatches is not None, "Plan has checked it"
    pipeline_options, _ = plan.split_options()
    return Pipeline(
        stages,
        mesh["pp"],
        microbatches=plan.microbatches,
        schedule=schedule,
        loss_fn=loss_fn,
        replicate=replicate,
        **pipeline_options,
    )


def _check(
    model: object,
    plan: Plan,
    world: World,
    loss_fn: Callable[..., Any] | None,
    units: Rule | None,
) -> None:
    checks.instance("plan", plan, Plan)
    plan.check_world(world)
    checks.function("loss_fn", loss_fn, "output and target", or_none=True)
    if units is not None and plan.shard == 1:
        raise ArgumentError(
            "units are what FSDP gathers, and shard is 1: leave units out, or use shard > 1"
        )
    if plan.pp == 1 and not isinstance(model, nn.Module):
        raise ArgumentError(f"model is {model!r:.80}; with pp=1, give a torch.nn.Module")


def _wrap(
    module: nn.Module,
    plan: Plan,
    mesh: Mesh,
    units: Rule | None,
    shared: Sequence[nn.Parameter],
) -> nn.Module:
    """Wrap the module, or a stage of it, except for ``shared``, which the pipeline reduces."""
    inside = set(module.parameters())
    ignored = [param for param in shared if param in inside]
    if plan.shard > 1:
        strategy = plan.strategy or Strategy.FULL_SHARD
        replicate = None if plan.dp == 1 else mesh["dp"]
        return FSDP(
            module,
            mesh["shard"],
            units=units,
            strategy=strategy if replicate is None else _HYBRID_OF[strategy],
            replicate=replicate,
            ignored=ignored,
            **plan.fsdp,
        )
    if plan.dp > 1 or plan.pp == 1:
        return DDP(module, mesh["dp"], ignored=ignored, **plan.ddp)
    return module


def _stages_of(model: nn.Module | Sequence[nn.Module], plan: Plan) -> list[nn.Module]:
    """The stages of the user, or those that the model is cut into."""
    count = plan.pp * plan.chunks
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        return split(model, count)
    stages = list(model)
    if len(stages) != count or not all(isinstance(stage, nn.Module) for stage in stages):
        raise ArgumentError(
            f"model is a list of {len(stages)}; the plan needs pp * chunks = {plan.pp} * "
            f"{plan.chunks} = {count} modules"
        )
    return stages


def _check_shared(shared: Mapping[nn.Parameter, Mapping[int, str]], plan: Plan) -> None:
    """Refuse options that do not work with shared parameters; every rank has all stages."""
    options = plan.fsdp if plan.shard > 1 else plan.ddp
    reduction = options.get("reduction", "mean")
    precision = options.get("precision") or MixedPrecision()
    for param, names in shared.items():
        stages = " and ".join(f"stage {index} ({name!r})" for index, name in names.items())
        if reduction != "mean" and plan.dp * plan.shard > 1:
            raise UnsupportedError(
                f"{stages} share a parameter, whose gradient is the mean over replicas, and "
                f"reduction is {reduction!r}: leave reduction out and scale the loss, or give each "
                "stage a parameter of its own"
            )
        if precision.compute not in (None, param.dtype):
            raise UnsupportedError(
                f"{stages} share a parameter, which stays whole and {param.dtype}, and FSDP "
                f"computes in {precision.compute}: run the loop under torch.autocast instead of "
                "precision.compute, or give each stage a parameter of its own"
            )
