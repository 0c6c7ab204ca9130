"""The one place where techniques meet: a ``Plan`` says how ranks share a model, and this does it.

::

    Plan(pp=2, dp=2, shard=2)           stage 0        stage 1
                                     ┌ 0 ── 1 ┐     ┌ 4 ── 5 ┐
                                  dp │ shard  │     │        │    microbatches go from 0 to 4,
                                     └ 2 ── 3 ┘     └ 6 ── 7 ┘    from 1 to 5, ... along pp

Ranks that differ on ``shard`` keep parts of the same parameters and exchange the most, so they are
neighbours; those that differ on ``pp`` exchange the least. On ``dp`` and on ``shard`` every rank
has a batch of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from echelon.arguments import one_of, whole
from echelon.ddp import DDP
from echelon.errors import ArgumentError, UnsupportedError
from echelon.fsdp import FSDP, Strategy
from echelon.fsdp.units import Rule
from echelon.pipeline.api import Pipeline
from echelon.pipeline.ir import Schedule
from echelon.pipeline.partition import partition
from echelon.pipeline.schedules import schedule as make_schedule
from echelon.pipeline.shardable import ReduceEvery
from echelon.world.base import World
from echelon.world.mesh import Mesh

__all__ = ["Plan", "parallelize"]

_ACROSS = {  # the same strategy, where other groups have the same parts
    Strategy.FULL_SHARD: Strategy.HYBRID_SHARD,
    Strategy.SHARD_GRAD_OP: Strategy.HYBRID_SHARD_ZERO2,
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How ranks share a model: ``pp * dp * shard`` of them.

    Attributes:
        pp: stages run on so many ranks, one after the other.
        dp: so many replicas, each with batches of its own.
        shard: so many ranks keep parts of the same parameters, each with batches of its own.
        microbatches: into how many parts a batch is cut; needed with ``pp`` > 1.
        schedule: a name for ``ec.pipeline.schedule``, or a schedule; ``"1f1b"`` if None.
        chunks: stages per rank, where ``parallelize`` cuts the model.
        strategy: what is sharded; ``FULL_SHARD`` if None. With ``dp`` > 1 it is the hybrid one.
        reduce_every: of ``ec.Pipeline``.
        window_nbytes: of ``ec.Pipeline``.

    Raises:
        ArgumentError: a number is below 1, or an option belongs to an axis of length 1.

    Example:
        >>> plan = Plan(pp=2, shard=4, microbatches=8)
        >>> plan.num_ranks, str(plan)
        (8, 'pp=2,shard=4')
    """

    pp: int = 1
    dp: int = 1
    shard: int = 1
    microbatches: int | None = None
    schedule: str | Schedule | None = None
    chunks: int = 1
    strategy: Strategy | None = None
    reduce_every: ReduceEvery = "step"
    window_nbytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "shard", "chunks"):
            whole(name, getattr(self, name), low=1)
        self._check_pipeline()
        self._check_sharding()

    def _check_pipeline(self) -> None:
        defaults = (("microbatches", None), ("schedule", None), ("chunks", 1))
        for name, default in (*defaults, ("reduce_every", "step"), ("window_nbytes", None)):
            value = getattr(self, name)
            if self.pp == 1 and value != default:
                raise ArgumentError(
                    f"{name} is {value!r:.80}, which is for pipelines, and pp is 1: leave it out, "
                    "or use pp > 1"
                )
        if self.pp > 1 and self.microbatches is None:
            raise ArgumentError(
                f"pp is {self.pp} without microbatches: give at least as many as stages, such as "
                f"microbatches={4 * self.pp}, of which a rank has some work while others wait"
            )

    def _check_sharding(self) -> None:
        if self.strategy is None:
            return
        allowed = list(_ACROSS) if self.dp > 1 else [one for one in Strategy if not one.hybrid]
        one_of("strategy", self.strategy, allowed)
        if self.shard == 1:
            raise ArgumentError(
                f"strategy is {self.strategy}, and shard is 1: leave it out, or use shard > 1"
            )

    @property
    def num_ranks(self) -> int:
        """How many it is for."""
        return self.pp * self.dp * self.shard

    def __str__(self) -> str:
        axes = {"pp": self.pp, "dp": self.dp, "shard": self.shard}
        return ",".join(f"{name}={length}" for name, length in axes.items() if length > 1) or "dp=1"


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
        model: the same on all ranks. With ``plan.pp`` > 1: a list of stages, or an
            ``nn.Sequential``, which is cut into ``pp * chunks`` stages of similar numbers of
            parameters.
        plan: of ``world.size`` ranks.
        world: whose mesh it becomes.
        loss_fn: for a pipeline, called with output and target of a microbatch.
        units: which modules FSDP gathers at once, with ``plan.shard`` > 1.

    Returns:
        a ``DDP``, an ``FSDP``, or a ``Pipeline`` of stages that are, where they are shared.

    Raises:
        ArgumentError: the plan is for another number of ranks, or does not fit the model.
        UnsupportedError: stages share a parameter, and are sharded, or replicated on one rank.

    Example:
        >>> import torch
        >>> def main(world):
        ...     torch.manual_seed(0)
        ...     model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        ...     plan = Plan(pp=2, dp=2, microbatches=2)
        ...     pipe = parallelize(model, plan, world, loss_fn=nn.MSELoss())
        ...     loss = pipe.step(torch.ones(8, 4), target=torch.zeros(8, 1), loss_everywhere=True)
        ...     return round(loss.item(), 4)
        >>> from echelon.world.run import run
        >>> run(main, ranks=4)
        [0.2139, 0.2139, 0.2139, 0.2139]
    """
    _check(model, plan, world, loss_fn, units)
    mesh = world.mesh(pp=plan.pp, dp=plan.dp, shard=plan.shard)
    share = partial(_share, plan=plan, mesh=mesh, units=units)
    if plan.pp == 1:
        assert isinstance(model, nn.Module)
        return share(model)
    return _pipeline(_stages_of(model, plan), plan, mesh, share, loss_fn)


def _check(
    model: object,
    plan: Plan,
    world: World,
    loss_fn: Callable[..., Any] | None,
    units: Rule | None,
) -> None:
    if not isinstance(plan, Plan):
        raise ArgumentError(f"plan is {plan!r:.80}; give an ec.Plan, such as ec.Plan(dp=2)")
    if not isinstance(world, World):
        raise ArgumentError(f"world is {world!r:.80}; give the World that main() got")
    if plan.num_ranks != world.size:
        raise ArgumentError(
            f"the plan is for pp * dp * shard = {plan.pp} * {plan.dp} * {plan.shard} = "
            f"{plan.num_ranks} ranks, and there are {world.size}"
        )
    if units is not None and plan.shard == 1:
        raise ArgumentError("units are what FSDP gathers, and shard is 1: use shard > 1")
    if loss_fn is not None and plan.pp == 1:
        raise ArgumentError("loss_fn is for pipelines, and pp is 1: call it on the model's output")
    if plan.pp == 1 and not isinstance(model, nn.Module):
        raise ArgumentError(f"model is {model!r:.80}; with pp=1, give a torch.nn.Module")


def _share(module: nn.Module, *, plan: Plan, mesh: Mesh, units: Rule | None) -> nn.Module:
    """The module, or a stage of it, as the ranks of one stage have it."""
    if plan.pp > 1 and not any(param.requires_grad for param in module.parameters()):
        return module  # such a stage stays as it is on every rank
    if plan.shard > 1:
        strategy = plan.strategy or Strategy.FULL_SHARD
        if plan.dp == 1:
            return FSDP(module, mesh["shard"], units=units, strategy=strategy)
        across = _ACROSS[strategy]
        replicas = mesh["dp"]
        return FSDP(module, mesh["shard"], units=units, strategy=across, replicate=replicas)
    if plan.dp > 1 or plan.pp == 1:
        return DDP(module, mesh["dp"])
    return module


def _stages_of(model: nn.Module | Sequence[nn.Module], plan: Plan) -> list[nn.Module]:
    """The stages that the user has made, or those that the model is cut into."""
    count = plan.pp * plan.chunks
    if isinstance(model, nn.Sequential):
        numels = [sum(param.numel() for param in block.parameters()) for block in model]
        return [model[blocks.start : blocks.stop] for blocks in partition(numels, count)]
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        raise ArgumentError(
            f"model is a {type(model).__name__}, and pp is {plan.pp}: give a list of its stages, "
            "or an nn.Sequential, which is cut"
        )
    stages = list(model)
    if len(stages) != count or not all(isinstance(stage, nn.Module) for stage in stages):
        raise ArgumentError(
            f"model is a list of {len(stages)}; the plan needs pp * chunks = {plan.pp} * "
            f"{plan.chunks} = {count} modules"
        )
    return stages


def _pipeline(
    stages: list[nn.Module],
    plan: Plan,
    mesh: Mesh,
    share: Callable[[nn.Module], nn.Module],
    loss_fn: Callable[[Any, Any], Tensor] | None,
) -> Pipeline:
    assert plan.microbatches is not None, "Plan has checked it"
    schedule = plan.schedule or "1f1b"
    if isinstance(schedule, str):
        schedule = make_schedule(schedule, len(stages), plan.microbatches, plan.pp)
    if plan.dp * plan.shard > 1:
        _check_ties(stages, schedule, is_sharded=plan.shard > 1)
    own = schedule.stages_of(mesh.coordinates["pp"])
    shared = [share(stage) if index in own else stage for index, stage in enumerate(stages)]
    return Pipeline(
        shared,
        mesh["pp"],
        microbatches=plan.microbatches,
        schedule=schedule,
        loss_fn=loss_fn,
        reduce_every=plan.reduce_every,
        window_nbytes=plan.window_nbytes,
    )


def _check_ties(stages: Sequence[nn.Module], schedule: Schedule, *, is_sharded: bool) -> None:
    """Refuse what no wrapper can do; every rank has all stages, so all ranks refuse."""
    first: dict[nn.Parameter, tuple[int, str]] = {}
    for index, stage in enumerate(stages):
        for name, param in stage.named_parameters():
            other, other_name = first.setdefault(param, (index, name))
            if other == index:
                continue
            names = f"stage {other} ({other_name!r}) and stage {index} ({name!r})"
            if is_sharded:
                raise UnsupportedError(
                    f"{names} share a parameter, and shard is > 1: each stage would cut it in its "
                    "own way. Use dp instead of shard, or give each stage a parameter of its own"
                )
            if schedule.placement[other] == schedule.placement[index]:
                raise UnsupportedError(
                    f"{names} share a parameter and are on one rank, where two replicas would "
                    "reduce it: use a schedule that puts them on different ranks, such as 1f1b"
                )
