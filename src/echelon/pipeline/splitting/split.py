"""``split``: a model cut into stages, each with the names of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from echelon.checks import number, whole
from echelon.comm.group import Group
from echelon.errors import ArgumentError
from echelon.pipeline.schedules.ir import Schedule, check_type
from echelon.pipeline.splitting import huggingface
from echelon.pipeline.splitting.block_costs import dry_run, num_parameters, seconds
from echelon.pipeline.splitting.blocks import TrunkRow, find_trunk
from echelon.pipeline.splitting.partition import Cut, most_alive, partition, refine
from echelon.pipeline.splitting.submodule import LayerRow, Row

_STATES = 4  # of a parameter: itself, its gradient, the two moments of Adam


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
    which each takes what the one before gave; else the children of an ``nn.Sequential``; else the
    blocks of a Llama, Mistral, Mixtral, Qwen 2 or 3 or GPT-2 of ``transformers``, also with
    adapters of ``peft``; else the blocks of its
    longest ``nn.ModuleList``, where every stage runs the model's own ``forward``.

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
    make_row = partial(_row_of, prefix=prefix, suffix=suffix)
    row = make_row(module)
    _check_stages(module, row, num_stages, schedule)
    args = example if isinstance(example, tuple) else None if example is None else (example,)
    costs = _costs(module, row, make_row, cost, args, group)
    cut = _cut(module, row, make_row, costs, num_stages, schedule, memory_cap, args)
    return [row.part(blocks.start, blocks.stop) for blocks in cut]


def _check_stages(module: nn.Module, row: Row, num_stages: int, schedule: Schedule | None) -> None:
    whole("num_stages", num_stages, 1)
    if schedule is not None:
        check_type(schedule)
    if num_stages > row.num_atoms:
        raise ArgumentError(
            f"{type(module).__name__} has {row.num_atoms} layers to cut between, fewer than the "
            f"{num_stages} stages: use at most {row.num_atoms} stages"
        )
    if schedule is not None and schedule.num_stages != num_stages:
        raise ArgumentError(
            f"schedule has {schedule.num_stages} stages and the split {num_stages}: make them equal"
        )


def _row_of(module: nn.Module, prefix: Sequence[str] | None, suffix: Sequence[str] | None) -> Row:
    layers = getattr(module, "pipeline_layers", None)
    row: Row | None = None
    if callable(layers):
        row = LayerRow(module, layers())
    elif isinstance(module, nn.Sequential):
        row = LayerRow(module, list(module.children()))
    elif (known := huggingface.find_known(module)) is not None:
        path, inner = known
        row = huggingface.CausalRow(inner, path)
    if row is None:
        trunk = find_trunk(module)
        if trunk is None:
            raise ArgumentError(
                f"{type(module).__name__} is no nn.Sequential and has no nn.ModuleList of blocks: "
                "give it a method pipeline_layers() that returns its layers in order, each of "
                "which takes what the one before gave, or give ec.Pipeline a list of stages"
            )
        return TrunkRow(module, trunk, prefix, suffix)
    for name, given in (("prefix", prefix), ("suffix", suffix)):
        if given is not None:
            raise ArgumentError(
                f"{name} is for models with an nn.ModuleList of blocks; how "
                f"{type(module).__name__} is cut is known without it"
            )
    return row


def _costs(
    module: nn.Module,
    row: Row,
    make_row: Any,
    cost: str | Sequence[float],
    example: tuple[Any, ...] | None,
    group: Group | None,
) -> list[float]:
    """The cost of each atom; the same on all ranks."""
    if not isinstance(cost, str):
        if isinstance(cost, Tensor) or not isinstance(cost, Sequence):
            raise ArgumentError(f"cost is {cost!r:.80}; give its name or a list of numbers")
        if len(cost) != row.num_atoms:
            raise ArgumentError(
                f"cost has {len(cost)} numbers and {type(module).__name__} {row.num_atoms} layers "
                "to cut between: give one for each"
            )
        return [number(f"cost[{i}]", one, 0.0) for i, one in enumerate(cost)]
    if cost == "parameters":
        return [float(one) for one in num_parameters(row)]
    if cost not in ("flops", "time"):
        raise ArgumentError(
            f"cost is {cost!r}; give 'time', 'parameters', 'flops' or a list of numbers"
        )
    if example is None:
        raise ArgumentError(f"cost={cost!r} needs example=..., the arguments of one microbatch")
    if cost == "flops":
        return [float(dry.flops) for dry in dry_run(module, make_row, example)]
    if group is None:
        raise ArgumentError(
            "cost='time' needs group=..., such as world.group: one rank measures for all, since "
            "ranks that measured each for itself would cut differently"
        )
    return _measured(row, example, group)


def _measured(row: Row, example: tuple[Any, ...], group: Group) -> list[float]:
    found: list[float] | str | None = None
    failure: Exception | None = None
    if group.rank == 0:
        try:
            found = seconds(row, example, group.device)
        except Exception as error:  # told to the others, who would wait for ever, and raised below
            found, failure = f"{type(error).__name__}: {error}", error
    told = group.broadcast_object(found, 0)
    if failure is not None:
        raise failure
    if isinstance(told, str):
        raise ArgumentError(f"rank 0 could not measure the layers of the model: {told}")
    times: list[float] = told
    return times


def _cut(
    module: nn.Module,
    row: Row,
    make_row: Any,
    costs: Sequence[float],
    num_stages: int,
    schedule: Schedule | None,
    memory_cap: float | None,
    example: tuple[Any, ...] | None,
) -> Cut:
    if memory_cap is None:
        cut = partition(costs, num_stages)
        return cut if schedule is None else refine(cut, costs, schedule, lambda _: True)
    if schedule is None or example is None:
        raise ArgumentError(
            "memory_cap needs schedule=..., which says how many microbatches are alive, and "
            "example=..., a microbatch"
        )
    cap = number("memory_cap", memory_cap, 0.0)
    kept = [
        _STATES * sum(param.numel() * param.itemsize for param in row.parameters(i))
        for i in range(row.num_atoms)
    ]
    activations = [dry.activations for dry in dry_run(module, make_row, example)]
    alive = most_alive(schedule)

    def fits(cut: Cut) -> bool:
        return all(
            sum(kept[i] + alive[stage] * activations[i] for i in blocks) <= cap
            for stage, blocks in enumerate(cut)
        )

    cut = partition(costs, num_stages, nbytes=kept, activations=activations, alive=alive, cap=cap)
    return refine(cut, costs, schedule, fits)
