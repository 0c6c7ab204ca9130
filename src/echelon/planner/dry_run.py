"""A dry run: a step of a plan with all its allocations, on a cluster that is not here.

The wrappers, the schedule, autograd and the optimizer run as they do in training, so what is said
of a plan is what it allocates. One rank of each stage runs, on a thread, and the ranks beside it
on ``dp`` and ``shard`` are taken to be like it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from echelon import checks, events
from echelon.comm.lone.group import LoneGroup
from echelon.comm.mesh import axis_ranks
from echelon.comm.primitives import Primitive
from echelon.comm.torch_dist.algorithms import scratch_nbytes
from echelon.comm.world import World
from echelon.diagnosis.rank_monitor import StepCounter
from echelon.errors import ArgumentError
from echelon.fsdp import FSDP
from echelon.fsdp.units import Rule
from echelon.laboratory.allocations import Allocations
from echelon.laboratory.step_record import SENDS_NOTHING
from echelon.launch.run import run
from echelon.modules.sharded_tensor import local_shard
from echelon.observe.meters import tensor_bytes
from echelon.pipeline.api import Pipeline
from echelon.planner.shapes_only import LARGE, ShapesOnly
from echelon.plans.parallelize import parallelize
from echelon.plans.plans import Plan

# The optimizer makes its state in the first step, and DDP its final buckets in the second.
_WARM_UP = 2


@final
@dataclass(frozen=True, kw_only=True)
class DryStep:
    """What a rank of one stage allocates and sends in a step.

    Attributes:
        stage: the position on ``pp``.
        num_parameters: elements of the parameters that the rank keeps; of sharded ones its part,
            with the padding that makes all parts equal.
        parameter_bytes: of these.
        peak: the most bytes of tensors at a time.
        after: the last action of the pipeline that was complete at the peak; "" without one.
        categories: what the bytes of the peak are of; they add up to ``peak``.
        sent: the bytes of the calls of a step, by what they do.
    """

    stage: int
    num_parameters: int
    parameter_bytes: int
    peak: int
    after: str
    categories: Mapping[str, int]
    sent: Mapping[str, int]


@final
@dataclass(frozen=True, kw_only=True)
class DryRunOptions:
    """How a step is taken.

    Attributes:
        units: what FSDP gathers at once, with ``shard`` > 1.
        optimizer: is called with the parameters of a rank.
        shares_memory: whether all ranks are processes of one host, whose FSDP shares memory.
        over_gloo: whether ranks communicate by gloo, with groups that keep scratch memory.
        data_rank: which rank of a stage runs, of those on ``dp`` and ``shard``; 0 has the largest
            parts.
        rounding: an allocation takes a multiple of so many bytes; PyTorch's of CUDA takes 512.
    """

    units: Rule | None = None
    optimizer: Callable[[Sequence[nn.Parameter]], Optimizer] = AdamW
    shares_memory: bool = False
    over_gloo: bool = False
    data_rank: int = 0
    rounding: int = 1

    def __post_init__(self) -> None:
        checks.instance("units", self.units, Rule, or_none=True)
        checks.flag("shares_memory", self.shares_memory)
        checks.flag("over_gloo", self.over_gloo)
        checks.integer("data_rank", self.data_rank, low=0)
        checks.integer("rounding", self.rounding, low=1)


def dry_run(
    model: nn.Module | Sequence[nn.Module],
    plan: Plan,
    inputs: Any,
    target: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    options: DryRunOptions | None = None,
) -> list[DryStep]:
    """The step of one rank of each stage, with the memory of its peak.

    Args:
        model: what ``ec.parallelize`` takes; may be on the meta device, and stays as it is.
        inputs: the batch of a rank, or a tuple of arguments; only shapes and dtypes count.
        target: what ``loss_fn`` takes beside the output.

    Raises:
        UnsupportedError: the model looks at values of large tensors, which are not computed.

    Example:
        >>> from torch.nn.functional import mse_loss
        >>> model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))
        >>> x = torch.zeros(8, 1000)
        >>> [step] = dry_run(model, Plan(shard=100), x, x, mse_loss)
        >>> step.num_parameters, step.categories["optimizer"] >= 2 * step.parameter_bytes
        (20032, True)
    """
    checks.instance("plan", plan, Plan)
    options = DryRunOptions() if options is None else options
    checks.rank("data_rank", options.data_rank, plan.data_size)
    job = partial(_step_of, model, plan, inputs, target, loss_fn, options)
    steps: list[DryStep] = run(job, plan.pp)
    return steps


def _step_of(
    model: nn.Module | Sequence[nn.Module],
    plan: Plan,
    inputs: Any,
    target: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    options: DryRunOptions,
    stages: World,
) -> DryStep:
    """What a rank of this stage does."""
    scratch = _Scratch()
    world = fake_world(plan, stages, options, issued=scratch.note if options.over_gloo else None)
    peak = _Peak()
    memory = Allocations(peak.after_operation, rounding=options.rounding)
    shapes = ShapesOnly()
    with shapes:
        copied, inputs, target = with_memory((model, inputs, target))
    with shapes, memory:
        shared = parallelize(copied, plan, world, units=options.units, loss_fn=loss_fn)
        del copied
        optimizer = options.optimizer(list(shared.parameters()))
        step = partial(_step, shared, optimizer, inputs, target, loss_fn)
        for _ in range(_WARM_UP):
            step()
        calls = _Calls(world.rank)
        with events.listen(calls.hear):
            peak.restart(memory.nbytes)
            step()
        nbytes, at = peak.nbytes, peak.at
        # The same step again, to look around in the moment of its peak.
        moment = _Calls(world.rank)
        with events.listen(moment.hear):
            peak.restart(memory.nbytes)
            peak.look = at, lambda: (moment.last_action, _held(shared, optimizer))
            step()
    after, held = peak.seen
    parts = [local_shard(param) for param in shared.parameters()]
    return DryStep(
        stage=stages.rank,
        num_parameters=sum(part.numel() for part in parts),
        parameter_bytes=sum(part.nbytes for part in parts),
        peak=nbytes + scratch.nbytes,
        after=after,
        categories={
            **held,
            "activations": nbytes - sum(held.values()),
            **({"communication": scratch.nbytes} if options.over_gloo else {}),
        },
        sent=calls.sent,
    )


def _step(
    shared: nn.Module,
    optimizer: Optimizer,
    inputs: Any,
    target: Any,
    loss_fn: Callable[[Any, Any], Tensor],
) -> None:
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    if isinstance(shared, Pipeline):
        shared.step(*given, target=target)
    else:
        loss_fn(shared(*given), target).backward()
    optimizer.step()
    optimizer.zero_grad()


def _held(shared: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """The bytes of all but activations, by category, now."""
    plain = tensor_bytes(shared, optimizer)
    state = plain["optimizer state"]
    wrappers = [module for module in shared.modules() if isinstance(module, FSDP)]
    if not wrappers:
        return {
            "parameters": plain["parameters"] + plain["buffers"],
            "gradients": plain["gradients"],
            "optimizer": state,
        }
    stats = [wrapper.memory_stats() for wrapper in wrappers]
    return {
        "parameters": sum(each.shards for each in stats),
        "gathered": sum(each.gathered for each in stats),
        "gradients": sum(each.gradients + each.slots for each in stats),
        "optimizer": state,
    }


@final
class _Peak:
    """The most bytes so far, and when that was.

    Attributes:
        nbytes: the most bytes since the restart.
        at: after how many operations.
        look: what to ask after how many operations.
        seen: the answer.
    """

    nbytes = at = _count = 0
    look: tuple[int, Callable[[], Any]] | None = None
    seen: Any = None

    def restart(self, nbytes: int) -> None:
        self.nbytes, self.at, self._count = nbytes, 0, 0

    def after_operation(self, nbytes: int) -> None:
        self._count += 1
        if nbytes > self.nbytes:
            self.nbytes, self.at = nbytes, self._count
        if self.look is not None and self._count == self.look[0]:
            (_, look), self.look = self.look, None
            self.seen = look()


@final
class _Scratch:
    """What groups over gloo keep to reduce in: each the most that one of its operations needs."""

    def __init__(self) -> None:
        self._most: dict[LoneGroup, int] = {}

    @property
    def nbytes(self) -> int:
        return sum(self._most.values())

    def note(self, group: LoneGroup, operation: Primitive) -> None:
        nbytes = scratch_nbytes(operation, group.rank, group.size)
        self._most[group] = max(nbytes, self._most.get(group, 0))


@final
class _Calls:
    """What a rank sends, and the last action of its pipeline."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.sent: dict[str, int] = {}
        self.last_action = ""

    def hear(self, event: events.Event) -> None:
        """Take an event of this rank."""
        facts = event.facts
        if facts.get("rank") != self._rank:
            return
        if event.name == "pipeline.action":
            self.last_action = facts["action"]
        elif event.name == "collective.issue" and facts["op"] not in SENDS_NOTHING:
            self.sent[facts["op"]] = self.sent.get(facts["op"], 0) + facts["nbytes"]


def with_memory(given: tuple[Any, Any, Any]) -> Any:
    """A copy of model, inputs and target whose tensors have memory; what is tied stays tied."""
    modules = [given[0]] if isinstance(given[0], nn.Module) else given[0]
    tensors: list[Any] = [leaf for leaf in tree_leaves(given[1:]) if isinstance(leaf, Tensor)]
    for module in modules:
        require_copyable(module)
        tensors += [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(tensor): _real(tensor) for tensor in tensors}
    return copy.deepcopy(given, memo)


def require_copyable(module: nn.Module) -> None:
    """Refuse a module whose shapes are not known, or which cannot be copied."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ArgumentError(
            f"the module is a {type(module).__name__}, which takes no hooks: give the module that "
            "was compiled by TorchScript"
        )
    for name, param in module.named_parameters():
        if nn.parameter.is_lazy(param):
            raise ArgumentError(
                f"parameter {name!r} has no shape before the first forward: run the module once "
                "with a batch, or give a layer with its sizes"
            )


def _real(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device="cpu", requires_grad=False)
    if made.numel() <= LARGE:  # it is computed with, and an index must lie in its table
        made.zero_() if tensor.is_meta else made.copy_(tensor.detach())
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(made, tensor.requires_grad) if is_parameter else made


def fake_world(
    plan: Plan,
    stages: World,
    options: DryRunOptions,
    steps: StepCounter | None = None,
    issued: Callable[[LoneGroup, Primitive], None] | None = None,
) -> World:
    """The job as a rank of this stage sees it: of all others, the other stages are there.

    Args:
        stages: one rank of each stage, as simulated ranks.
        steps: counts the steps of this rank.
        issued: is called with each operation of a group whose other ranks are not there.
    """
    lengths = {"pp": plan.pp, "dp": plan.dp, "shard": plan.shard}
    line = axis_ranks("pp", options.data_rank, lengths)
    stages.group.shares_memory = options.shares_memory  # a pipeline over other memory keeps sends
    group = LoneGroup(
        line[stages.rank],
        range(plan.num_ranks),
        present=stages.group,
        present_ranks=line,
        shares_memory=options.shares_memory,
        issued=issued,
    )
    return World(group, backend="fake", steps=steps)
