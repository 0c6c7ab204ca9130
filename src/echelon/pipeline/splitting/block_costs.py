"""What the atoms of a model cost: operations and bytes by shapes alone, or seconds."""

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

from echelon.comm import streams
from echelon.errors import ArgumentError
from echelon.pipeline.splitting.submodule import Row, Submodule
from echelon.pipeline.stage import Stage

_RUNS = 3  # of which the median counts, after one to warm up

_MakeRow = Callable[[nn.Module], Row]


@final
@dataclass(frozen=True)
class Dry:
    """What one atom does with the example, by shapes alone.

    Attributes:
        flops: of its forward.
        activations: bytes that its backward needs of it, parameters not counted.
    """

    flops: int
    activations: int


def num_parameters(row: Row) -> list[int]:
    """Elements of the parameters of each atom; a shared one counts in every atom that has it."""
    return [sum(param.numel() for param in row.parameters(i)) for i in range(row.num_atoms)]


def dry_run(model: nn.Module, make_row: _MakeRow, example: tuple[Any, ...]) -> list[Dry]:
    """Run each atom once on the meta device."""
    row = make_row(_on_meta(model))
    value: Any = pytree.tree_map(_to_meta, example)
    found = []
    for index in range(row.num_atoms):
        part = row.part(index, index + 1)
        known = {id(tensor) for tensor in [*part.parameters(), *part.buffers()]}
        saved: dict[int, Tensor] = {}

        def keep(
            tensor: Tensor, known: set[int] = known, saved: dict[int, Tensor] = saved
        ) -> Tensor:
            base = tensor if tensor._base is None else tensor._base
            if id(base) not in known:
                saved[id(base)] = base
            return tensor

        with (
            FlopCounterMode(display=False) as counter,
            saved_tensors_hooks(keep, lambda x: x),
            _ByShapes(),  # type: ignore[no-untyped-call]
        ):
            value = _call_by_shapes(index, part, value)
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in saved.values())
        found.append(Dry(counter.get_total_flops(), nbytes))
        value = _handed_on(value)
    return found


def seconds(row: Row, example: tuple[Any, ...], device: torch.device) -> list[float]:
    """Time a forward and backward of each atom on ``device``; atoms that are alike, once.

    The model is left as it was: copies run, and so do random numbers.
    """
    value: Any = pytree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, example
    )
    known: dict[Any, tuple[float, Any]] = {}
    found = []
    for index in range(row.num_atoms):
        part = row.part(index, index + 1)
        key = _likeness(part, value)
        if key not in known:
            with streams.seeded(device, 0):
                known[key] = _timed(_copy_on(part, device), value, device)
        spent, value = known[key]
        found.append(spent)
    return found


def _timed(part: nn.Module, value: Any, device: torch.device) -> tuple[float, Any]:
    """The time of a microbatch that is not the first, and what the next atom gets of it."""
    stage = Stage(part, 0)
    times = []
    for _ in range(_RUNS + 1):
        streams.synchronize(device)
        start = time.perf_counter()
        with torch.enable_grad():
            output = stage.forward(0, value, {})
        output.require_grad()
        stage.backward(0, [torch.ones_like(one) for one in output.tensors if one.requires_grad])
        streams.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), output.unflatten()


def _call_by_shapes(index: int, part: nn.Module, value: Any) -> Any:
    try:
        with torch.enable_grad():
            return part(*value) if isinstance(value, tuple) else part(value)
    except Exception as error:
        raise ArgumentError(
            f"layer {index} of the model cannot run by shapes alone, which cost='flops' and "
            f"memory_cap need: {type(error).__name__}: {error}. If it looks at values, give "
            "cost='time' or cost='parameters'"
        ) from error


@final
class _ByShapes(TorchDispatchMode):
    """Takes the shape only of what a model makes for itself, once it meets the model's values.

    Operations on such tensors alone, such as on a table of positions, have their values.
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
        if len(on_meta) > 1:
            args, kwargs = pytree.tree_map(_to_meta, (args, kwargs))
        return func(*args, **kwargs)


def _handed_on(value: Any) -> Any:
    """As the next stage gets it: leaves that need a gradient if one comes back."""
    return pytree.tree_map(
        lambda leaf: (
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        ),
        value,
    )


def _likeness(part: Submodule, value: Any) -> Any:
    """What two atoms have in common that take the same time."""
    own = tuple(
        (type(module).__name__, tuple((name, tuple(p.shape), p.dtype) for name, p in _own(module)))
        for module in part.modules()
    )
    leaves, spec = pytree.tree_flatten(value)
    forms = tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    )
    return own, forms, spec


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False))


def _copy_on(part: Submodule, device: torch.device) -> nn.Module:
    """A copy with values: zeros where the model is on meta."""
    memo: dict[int, Any] = {}
    for tensor in [*part.parameters(), *part.buffers()]:
        value = (
            torch.zeros_like(tensor, device=device)
            if tensor.is_meta
            else tensor.detach().to(device, copy=True)
        )
        memo[id(tensor)] = _as(tensor, value)
    return copy.deepcopy(part, memo)


def _on_meta(model: nn.Module) -> nn.Module:
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(one): _as(one, one.detach().to("meta")) for one in tensors}
    return copy.deepcopy(model, memo)


def _to_meta(leaf: Any) -> Any:
    return leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf


def _as(tensor: Tensor, value: Tensor) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(value, tensor.requires_grad) if is_parameter else value
