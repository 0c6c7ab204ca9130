"""``split`` cuts a model into stages, each with the names of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from echelon.checks import instance, integer, number
from echelon.comm.group import Group
from echelon.errors import ArgumentError
from echelon.pipeline.schedules.ir import Schedule, check_type
from echelon.pipeline.splitting.block_costs import MakeBlocks, dry_run, num_parameters, seconds
from echelon.pipeline.splitting.module_list import ModuleListBlocks, find_module_list
from echelon.pipeline.splitting.partition import Partition, most_alive, partition, refine
from echelon.pipeline.splitting.submodule import Blocks, SequentialBlocks

_NUM_COPIES = 4  # of a parameter: itself, its gradient, the two moments of Adam


def split(
    module: nn.Module,
    num_stages: int,
    *,
    cost: Literal["time", "parameters", "flops"] | Sequence[float] = "parameters",
    example: Any = None,
    schedule: Schedule | None = None,
    memory_cap: float | None = None,
    group: Group | None = None,
    prefix: Sequence[str] | None = None,
    suffix: Sequence[str] | None = None,
) -> list[nn.Module]:
    """Cut a model into stages whose slowest is as fast as possible. Nothing is traced.

    A model is cut between its layers: those that its method ``pipeline_layers()`` returns, of
    which each takes what the one before gave, and a tuple as positional arguments; else the
    children of an ``nn.Sequential``, which take a tuple as one argument, as there; else the
    blocks of its longest ``nn.ModuleList``, as models of ``transformers`` have one, also inside a
    wrapper of ``peft``. Then every stage runs the model's own ``forward``.

    Law: the stages, one after the other, compute what the model does, and their states together
    are its state, name by name. They share its parameters and modules.

    Args:
        module: the same on all ranks; may be on the meta device.
        num_stages: how many; each gets at least one layer.
        cost: what to balance. ``"parameters"``: their number; ``"flops"``: operations of a forward
            of ``example``; ``"time"``: of a forward and backward of ``example``, measured on rank 0
            of ``group``; or a number for each layer.
        example: an argument of the model, or a tuple of them: a microbatch.
        schedule: which the stages will run on: layers are then moved while its simulation ends
            earlier for it.
        memory_cap: most bytes of a stage: its parameters, their gradients and two moments of Adam,
            and the activations that ``schedule`` keeps alive. Needs ``schedule`` and ``example``.
        group: for ``"time"``; all its ranks call this.
        prefix: names of modules and parameters that run before the blocks of a ModuleList; those
            registered before it if None.
        suffix: the same for what runs after them. A name may be in both.

    Returns:
        one module for each stage, for ``ec.Pipeline``.

    Raises:
        ArgumentError: the model cannot be cut so, or an argument is missing for the cost.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1))
        >>> [sorted(stage.state_dict()) for stage in split(model, 2)]
        [['0.bias', '0.weight'], ['2.bias', '2.weight', '3.bias', '3.weight']]
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"module is {module!r:.80}; give a torch.nn.Module")
    instance("group", group, Group, or_none=True)
    make_blocks = partial(blocks_of, prefix=prefix, suffix=suffix)
    blocks = make_blocks(module)
    _check_num_stages(module, blocks, num_stages, schedule)
    args = example if isinstance(example, tuple) else None if example is None else (example,)
    costs = _costs(module, blocks, make_blocks, cost, args, group)
    stages = _stages(module, blocks, make_blocks, costs, num_stages, schedule, memory_cap, args)
    _check_buffers(blocks, stages)
    submodules: list[nn.Module] = [blocks.submodule(part.start, part.stop) for part in stages]
    _check_state(module, submodules)
    return submodules


def _check_num_stages(
    module: nn.Module, blocks: Blocks, num_stages: int, schedule: Schedule | None
) -> None:
    integer("num_stages", num_stages, 1)
    if schedule is not None:
        check_type(schedule)
    if num_stages > blocks.num_blocks:
        raise ArgumentError(
            f"{type(module).__name__} has {blocks.num_blocks} layers to cut between, fewer than "
            f"the {num_stages} stages: use at most {blocks.num_blocks} stages"
        )
    if schedule is not None and schedule.num_stages != num_stages:
        raise ArgumentError(
            f"schedule has {schedule.num_stages} stages and the split {num_stages}: make them equal"
        )


def _check_runs_its_layers(module: nn.Module) -> None:
    """Refuse a model whose call does more than to run its layers, which is all that stages do."""
    forward = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
    backward = *module._backward_hooks.values(), *module._backward_pre_hooks.values()
    has_hooks = any(map(_is_of_user, (*forward, *backward)))
    runs_layers = callable(getattr(module, "pipeline_layers", None)) or (
        type(module).forward is nn.Sequential.forward and "forward" not in vars(module)
    )
    what = "hooks" if has_hooks else None if runs_layers else "a forward of its own"
    if what is not None:
        raise ArgumentError(
            f"the model, a {type(module).__name__}, has {what}, and stages run its layers alone: "
            "put that into a layer, or give it a method pipeline_layers() that returns its layers"
        )


def _is_of_user(hook: Callable[..., Any]) -> bool:
    """Whether a hook is not one of ours, which record what modules give where these are called."""
    return not getattr(hook, "__module__", "").startswith("echelon.")


def _check_state(module: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Refuse a model with state that is in no layer, so that no stage would have it."""
    in_stages = [stage.state_dict(keep_vars=True).values() for stage in stages]
    known = {id(value) for values in in_stages for value in values}
    state = module.state_dict(keep_vars=True).items()
    lost = [key for key, value in state if isinstance(value, Tensor) and id(value) not in known]
    if lost:
        raise ArgumentError(
            f"{lost[:4]} of the model, a {type(module).__name__}, belong to none of its "
            "layers, so no stage would have them: put them into a layer"
        )


def _check_buffers(blocks: Blocks, stages: Partition) -> None:
    """Refuse a layer with buffers that several stages have: each would change its own."""
    stage_of: dict[nn.Module, int] = {}
    for stage, indices in enumerate(stages):
        for i in indices:
            layer = blocks.modules[i]
            first = stage_of.setdefault(layer, stage)
            if first != stage and any(True for _ in layer.buffers()):
                raise ArgumentError(
                    f"layer {i} of the model, a {type(layer).__name__} with buffers, is also a "
                    f"layer of stage {first}, and each of both stages would change its own: make "
                    "two modules of it, or a cost= by which they are in one stage"
                )


def blocks_of(
    module: nn.Module, prefix: Sequence[str] | None = None, suffix: Sequence[str] | None = None
) -> Blocks:
    """The blocks of a model, by the first way of cutting it that applies."""
    layers = getattr(module, "pipeline_layers", None)
    blocks: Blocks
    if callable(layers) or isinstance(module, nn.Sequential):
        _check_runs_its_layers(module)
    if callable(layers):
        blocks = SequentialBlocks(module, layers(), spread_tuples=True)
    elif isinstance(module, nn.Sequential):
        blocks = SequentialBlocks(module, list(module), spread_tuples=False)
    elif (list_name := find_module_list(module)) is not None:
        return ModuleListBlocks(module, list_name, prefix, suffix)
    else:
        raise ArgumentError(
            f"{type(module).__name__} is no nn.Sequential and has no nn.ModuleList of blocks: "
            "give it a method pipeline_layers() that returns its layers in order, each of "
            "which takes what the one before gave (of a tuple, as positional arguments), or give "
            "ec.Pipeline a list of stages"
        )
    for name, option in (("prefix", prefix), ("suffix", suffix)):
        if option is not None:
            raise ArgumentError(
                f"{name} is for models with an nn.ModuleList of blocks; how "
                f"{type(module).__name__} is cut is known without it"
            )
    return blocks


def _costs(
    module: nn.Module,
    blocks: Blocks,
    make_blocks: MakeBlocks,
    cost: str | Sequence[float],
    example: tuple[Any, ...] | None,
    group: Group | None,
) -> list[float]:
    """The cost of each block; the same on all ranks."""
    if not isinstance(cost, str):
        if isinstance(cost, Tensor) or not isinstance(cost, Sequence):
            raise ArgumentError(f"cost is {cost!r:.80}; give its name or a list of numbers")
        if len(cost) != blocks.num_blocks:
            raise ArgumentError(
                f"cost has {len(cost)} numbers and {type(module).__name__} {blocks.num_blocks} "
                "layers to cut between: give one for each"
            )
        return [number(f"cost[{i}]", value, 0.0) for i, value in enumerate(cost)]
    if cost == "parameters":
        return [float(numel) for numel in num_parameters(blocks)]
    if cost not in ("flops", "time"):
        raise ArgumentError(
            f"cost is {cost!r}; give 'time', 'parameters', 'flops' or a list of numbers"
        )
    if example is None:
        raise ArgumentError(f"cost={cost!r} needs example=..., the arguments of one microbatch")
    if cost == "flops":
        return [float(run.flops) for run in dry_run(module, make_blocks, example)]
    if group is None:
        raise ArgumentError(
            "cost='time' needs group=..., such as world.group: one rank measures for all, since "
            "ranks that measured each for itself would cut differently"
        )
    return _measured_on_rank_0(blocks, example, group)


def _measured_on_rank_0(blocks: Blocks, example: tuple[Any, ...], group: Group) -> list[float]:
    times: list[float] | None = None
    failure: Exception | None = None
    if group.rank == 0:
        try:
            times = seconds(blocks, example, group.device)
        except Exception as error:  # raised below, after the other ranks know of it
            failure = error
    problem = None if failure is None else f"{type(failure).__name__}: {failure}"
    times, problem = group.broadcast_object((times, problem), 0)
    if failure is not None:
        raise failure
    if problem is not None:
        raise ArgumentError(f"rank 0 could not measure the layers of the model: {problem}")
    assert times is not None
    return times


def _stages(
    module: nn.Module,
    blocks: Blocks,
    make_blocks: MakeBlocks,
    costs: Sequence[float],
    num_stages: int,
    schedule: Schedule | None,
    memory_cap: float | None,
    example: tuple[Any, ...] | None,
) -> Partition:
    """The blocks of each stage."""
    if memory_cap is None:
        stages = partition(costs, num_stages)
        return stages if schedule is None else refine(stages, costs, schedule, lambda _: True)
    if schedule is None or example is None:
        raise ArgumentError(
            "memory_cap needs schedule=..., which says how many microbatches are alive, and "
            "example=..., a microbatch"
        )
    cap = number("memory_cap", memory_cap, 0.0)
    nbytes = [
        _NUM_COPIES * sum(param.numel() * param.itemsize for param in blocks.parameters(i))
        for i in range(blocks.num_blocks)
    ]
    activations = [run.activation_nbytes for run in dry_run(module, make_blocks, example)]
    alive = most_alive(schedule)

    def fits(stages: Partition) -> bool:
        return all(
            sum(nbytes[i] + alive[stage] * activations[i] for i in indices) <= cap
            for stage, indices in enumerate(stages)
        )

    stages = partition(
        costs, num_stages, nbytes=nbytes, activations=activations, alive=alive, cap=cap
    )
    return refine(stages, costs, schedule, fits)
