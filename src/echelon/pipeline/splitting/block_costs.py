"""The costs of the blocks of a model: operations and bytes by shapes alone, or seconds."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from echelon.comm.streams import device_of
from echelon.errors import ArgumentError
from echelon.pipeline.splitting.submodule import Blocks, Submodule
from echelon.pipeline.stage import Stage

_META = torch.device("meta")
_RUNS = 3  # after one to warm up; the median counts

MakeBlocks = Callable[[nn.Module], Blocks]


@final
@dataclass(frozen=True)
class DryRun:
    """What the forward of one block costs for the example, by shapes alone.

    Attributes:
        flops: its operations.
        activation_nbytes: bytes that it saves for its backward, without parameters.
    """

    flops: int
    activation_nbytes: int


def num_parameters(blocks: Blocks) -> list[int]:
    """Elements of the parameters of each block; shared parameters count in each of theirs."""
    return [sum(param.numel() for param in blocks.parameters(i)) for i in range(blocks.num_blocks)]


def dry_run(model: nn.Module, make_blocks: MakeBlocks, example: tuple[Any, ...]) -> list[DryRun]:
    """Run each block once on the meta device."""
    blocks = make_blocks(_copied(model, _to_meta))
    value: Any = pytree.tree_map(_to_meta, example)
    runs = []
    for index in range(blocks.num_blocks):
        submodule = blocks.submodule(index, index + 1)
        parameters = {id(tensor) for tensor in [*submodule.parameters(), *submodule.buffers()]}
        saved: dict[int, Tensor] = {}

        def keep(
            tensor: Tensor, parameters: set[int] = parameters, saved: dict[int, Tensor] = saved
        ) -> Tensor:
            base = tensor if tensor._base is None else tensor._base
            if id(base) not in parameters:
                saved[id(base)] = base
            return tensor

        with (
            FlopCounterMode(display=False) as counter,
            saved_tensors_hooks(keep, lambda x: x),
            _ByShapes(),  # type: ignore[no-untyped-call]
        ):
            value = _call_by_shapes(index, submodule, value)
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in saved.values())
        runs.append(DryRun(counter.get_total_flops(), nbytes))
        value = _as_input(value)
    return runs


def seconds(blocks: Blocks, example: tuple[Any, ...], device: torch.device) -> list[float]:
    """Time a forward and backward of each block on ``device``; equal blocks only once.

    The model is left as it was: copies run, and so do random numbers.
    """
    value: Any = pytree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, example
    )
    timed: dict[Any, tuple[float, Any]] = {}
    times = []
    for index in range(blocks.num_blocks):
        submodule = blocks.submodule(index, index + 1)
        key = _cost_key(submodule, value)
        if key not in timed:
            with device_of(device).seeded(0):
                timed[key] = _time(_copy_on(submodule, device), value, device)
        seconds_of_block, value = timed[key]
        times.append(seconds_of_block)
    return times


def _time(submodule: nn.Module, value: Any, device: torch.device) -> tuple[float, Any]:
    """The time of a later microbatch, and the input of the next block."""
    stage = Stage(submodule, 0)
    times = []
    for _ in range(_RUNS + 1):
        device_of(device).synchronize()
        start = time.perf_counter()
        with torch.enable_grad():
            output = stage.forward(0, value, {})
        output.require_grad()
        stage.backward(0, [torch.ones_like(y) for y in output.tensors if y.requires_grad])
        device_of(device).synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), output.unflatten()


def _call_by_shapes(index: int, submodule: nn.Module, value: Any) -> Any:
    try:
        with torch.enable_grad():
            return submodule(*value) if isinstance(value, tuple) else submodule(value)
    except Exception as error:
        raise ArgumentError(
            f"layer {index} of the model cannot run by shapes alone, which cost='flops' and "
            f"memory_cap need: {type(error).__name__}: {error}. If it looks at values, give "
            "cost='time' or cost='parameters'"
        ) from error


@final
class _ByShapes(TorchDispatchMode):
    """Moves a tensor that the model makes itself to meta when it meets a tensor on meta.

    Operations on such tensors alone, such as on a table of positions, have values, also where the
    model makes them on the device of its input.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        on_meta = {
            leaf.is_meta for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        is_made = not on_meta and kwargs.get("device") == _META
        if is_made and torch.Tag.nondeterministic_seeded not in func.tags:  # type: ignore[attr-defined]
            kwargs["device"] = torch.device("cpu")
        if len(on_meta) > 1:
            args, kwargs = pytree.tree_map(_to_meta, (args, kwargs))
        return func(*args, **kwargs)


def _as_input(value: Any) -> Any:
    """The value as the next stage receives it: with leaves that require the same gradients."""
    return pytree.tree_map(
        lambda leaf: (
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        ),
        value,
    )


def _cost_key(submodule: Submodule, value: Any) -> Any:
    """A key that is equal for two blocks that take the same time."""
    modules = tuple(
        (
            type(module).__name__,
            tuple(
                (name, tuple(param.shape), param.dtype)
                for name, param in module.named_parameters(recurse=False)
            ),
        )
        for module in submodule.modules()
    )
    leaves, treespec = pytree.tree_flatten(value)
    specs = tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    )
    return modules, specs, treespec


def _copy_on(submodule: Submodule, device: torch.device) -> nn.Module:
    """A copy with values, which are zeros if the model is on meta."""
    return _copied(
        submodule,
        lambda tensor: (
            torch.zeros_like(tensor, device=device)
            if tensor.is_meta
            else tensor.detach().to(device, copy=True)
        ),
    )


def _copied(module: nn.Module, moved: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy with ``moved`` of each tensor; those of parameters are parameters."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        is_parameter, value = isinstance(tensor, nn.Parameter), moved(tensor)
        memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    return copy.deepcopy(module, memo)


def _to_meta(leaf: Any) -> Any:
    return leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf
