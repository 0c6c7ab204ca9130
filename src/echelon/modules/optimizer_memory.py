"""What an optimizer keeps from step to step, and whether parts of a model keep parts of it.

::

    state of w 160 x 132          exp_avg 160 x 132     a number for each element
                                  step, norm            a number for the tensor
                                  row 160, basis 160 x 160, ...    of whole rows or columns
    groups and attributes         lr, d, numerator      a number for all parameters

What an optimizer keeps shows what it has looked at, also where that moves no weight yet: a rate
that has not grown, a preconditioner that is first used at the hundredth step.
"""

from __future__ import annotations

import copy
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from echelon.modules.sharded_tensor import local_shard

_TOLERANCE = 1e-6  # of the largest: some keep moments in float32
_MAX_DEPTH = 6
_NUM_COLUMNS = 16  # of what has several numbers for an element or a row: the others are as these
# What is not a value: hooks, and classes or functions with attributes of their own.
_OPAQUE = (str, bytes, type, FunctionType, MethodType, ModuleType, nn.Module, torch.Generator)

# States of optimizers of torch that are one number for a parameter, as is "step" in all of them.
_NUMBERS: dict[type[Optimizer], set[str]] = {
    torch.optim.NAdam: {"mu_product"},
    torch.optim.ASGD: {"eta", "mu"},
}


def number_keys(
    optimizer: Optimizer, states: Iterable[tuple[tuple[int, ...], str, Any]]
) -> set[str]:
    """The keys of states that are one number for a parameter, and not one for each element.

    Both are tensors without dims if the parameter has none; then the states of other parameters
    under the same key decide.

    Args:
        states: the shape of the parameter, the key and the value of each state.
    """
    with_dims = [(key, value) for shape, key, value in states if shape]
    per_element = {key for key, value in with_dims if isinstance(value, Tensor) and value.dim()}
    of_kind = (keys for kind, keys in _NUMBERS.items() if isinstance(optimizer, kind))
    return {"step"}.union((key for key, _ in with_dims), *of_kind) - per_element


@final
class Memory:
    """The floats that an optimizer keeps, by their names.

    ``params`` has each parameter with its elements among all, and its shape.
    """

    def __init__(
        self, optimizer: Optimizer, params: Sequence[tuple[nn.Parameter, Tensor, tuple[int, ...]]]
    ) -> None:
        self._params = params
        self._places = {id(param): i for i, (param, _, _) in enumerate(params)}
        self._shared: dict[str, Tensor] = {}  # of all parameters together
        self._states: list[dict[str, Tensor]] = [{} for _ in params]
        self._seen: set[int] = set()
        self._keep(optimizer, "", None, 0)

    def difference(self, part: Memory, numel: int) -> str | None:
        """What ``part`` keeps otherwise than as a part of this, by name; None if there is nothing.

        ``numel`` is how many elements all parameters have.
        """
        for name, value in self._shared.items():
            parts = part._shared.get(name)
            if parts is not None and parts.shape == value.shape and not _equal(value, parts):
                return _shown(name)
        whole, kept = self._by_element(numel), part._by_element(numel)
        for name, numbers in kept.items():
            at = ~numbers.isnan()
            if name not in whole or not _equal(whole[name][at], numbers[at]):
                return _shown(name)
        has = torch.cat(
            [torch.zeros(0, dtype=torch.long, device="cpu"), *(e for _, e, _ in part._params)]
        )
        for name, numbers in whole.items():
            at = has[~numbers[has].isnan()]
            if len(at) and (name not in kept or kept[name][at].isnan().any()):
                return _shown(name)
        return None

    # Collecting ------------------------------------------------------------------------------

    def _keep(self, value: Any, name: str, place: int | None, depth: int) -> None:
        """Keep the floats in ``value``, which is of the parameter with number ``place``, if any."""
        if isinstance(value, Tensor):
            if value.is_floating_point() and id(value) not in self._places:
                self._add(value.detach(), name, place)
        elif isinstance(value, float):
            self._add(torch.tensor(value, dtype=torch.float64, device="cpu"), name, place)
        elif depth < _MAX_DEPTH and not isinstance(value, _OPAQUE) and id(value) not in self._seen:
            self._seen.add(id(value))
            for key, item in _items(value):
                if id(key) in self._places:
                    self._keep(item, name, self._places[id(key)], depth + 1)
                elif name and not isinstance(key, str):
                    # Of a list that has something for each parameter, a part's is shorter.
                    self._keep(item, f"{name}[{key!r} of {len(value)}]", place, depth + 1)
                else:
                    self._keep(item, f"{name}[{key!r}]" if name else key, place, depth + 1)

    def _add(self, value: Tensor, name: str, place: int | None) -> None:
        kept = self._shared if place is None else self._states[place]
        kept[name] = local_shard(value).to(torch.float64, copy=True).cpu()

    def _by_element(self, numel: int) -> dict[str, Tensor]:
        """What is kept of parameters, laid at their elements; NaN where nothing is kept."""
        laid: dict[str, Tensor] = {}
        for (_, elements, shape), state in zip(self._params, self._states, strict=True):
            if not len(elements):
                continue
            for name, value in state.items():
                for kind, at, column in _columns(value, elements, shape):
                    key = f"{name}\n{kind}"
                    if key not in laid:
                        laid[key] = torch.full(
                            (numel,), math.nan, dtype=torch.float64, device="cpu"
                        )
                    laid[key][at] = column.nan_to_num(nan=0.5)
        return laid


def _shown(name: str) -> str:
    return re.sub(r" of \d+\]", "]", name.partition("\n")[0])


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple | deque):
        yield from enumerate(value)
    else:
        for name, item in getattr(value, "__dict__", {}).items():
            if name != "defaults" and not name.startswith("_optimizer_"):
                yield name, item


def _columns(
    value: Tensor, elements: Tensor, shape: tuple[int, ...]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """A value kept of a parameter as columns of numbers for some of its elements.

    Of each column the kind, the elements and their numbers. A number for a row stands at the row's
    first element, one for the tensor at each, as do those of a basis or a table of any shape.
    """
    size, rows = len(elements), shape[0] if shape else 1
    if value.numel() == 1:
        columns, kind, at = value.reshape(1).expand(1, size), "number", elements
    elif tuple(value.shape[-len(shape) :]) == shape or value.shape == (size,):
        columns, kind, at = value.reshape(-1, size), "elements", elements
    elif tuple(value.shape[: len(shape)]) == shape:
        columns, kind, at = value.reshape(size, -1).T, "elements", elements
    elif len(shape) > 1 and value.dim() and value.shape[0] == rows:
        columns, at = value.reshape(rows, -1).T, elements.view(rows, -1)[:, 0]
        kind = f"rows of {len(columns)}"
    else:
        columns, at = value.reshape(-1, 1)[:_NUM_COLUMNS].expand(-1, size), elements
        kind = f"shape {tuple(value.shape)}"
    for i, column in enumerate(columns[:_NUM_COLUMNS]):
        yield f"{kind}, {i}", at, column


def _equal(expected: Tensor, actual: Tensor) -> bool:
    finite = expected[expected.isfinite()].abs()
    scale = finite.max().item() if len(finite) else 0.0
    return torch.allclose(actual, expected, rtol=0, atol=_TOLERANCE * scale, equal_nan=True)


# Optimizers that have states before their first step ------------------------------------------


def optimizers_in(value: Any) -> Iterator[Optimizer]:
    """The optimizers that an attribute of an optimizer refers to."""
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for _, item in _items(value):
            yield from optimizers_in(item)


def keep_states(
    value: Any,
    groups: Sequence[Sequence[nn.Parameter]],
    stand_ins: Sequence[Sequence[tuple[nn.Parameter, nn.Parameter]]],
    memo: dict[int, Any],
    depth: int = 0,
) -> None:
    """Enter into ``memo`` what becomes of states where stand-ins take the place of parameters.

    ``groups`` has the parameters of each group, and ``stand_ins`` some of them with a stand-in.
    States are mappings whose keys are parameters, and lists as long as a group that have a tensor
    like each of its parameters, in ``value`` and all that it has.
    """
    if depth > _MAX_DEPTH or isinstance(value, (*_OPAQUE, Tensor)):
        return
    if isinstance(value, Mapping) and any(isinstance(key, nn.Parameter) for key in value):
        ours: Any = copy.copy(value)
        ours.clear()
        pairs = (pair for group in stand_ins for pair in group)
        ours.update((new, _like(value[old], old, new)) for old, new in pairs if old in value)
        memo[id(value)] = ours
        return
    for params, replaced in zip(groups, stand_ins, strict=True):
        if isinstance(value, list) and value and _are_like(value, params):
            by_id = {id(param): item for item, param in zip(value, params, strict=True)}
            memo[id(value)] = [_like(by_id[id(old)], old, new) for old, new in replaced]
            return
    for _, item in _items(value):
        keep_states(item, groups, stand_ins, memo, depth + 1)


def _are_like(values: Sequence[Any], params: Sequence[nn.Parameter]) -> bool:
    return len(values) == len(params) and all(map(_is_like, values, params))


def _is_like(value: Any, param: nn.Parameter) -> bool:
    return (
        isinstance(value, Tensor)
        and not isinstance(value, nn.Parameter)
        and local_shard(value).shape == local_shard(param).shape
    )


def _like(value: Any, param: nn.Parameter, stand_in: nn.Parameter) -> Any:
    """What stands for a state of ``param``: zeros for zeros, else the values of the stand-in."""
    if isinstance(value, dict):
        return {key: _like(item, param, stand_in) for key, item in value.items()}
    if not _is_like(value, param):
        return copy.deepcopy(value)
    dtype = stand_in.dtype if value.dtype == param.dtype else value.dtype
    return stand_in.detach().to(dtype, copy=True) * bool(local_shard(value).any())
