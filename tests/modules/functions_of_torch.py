"""Calls each function of torch with a part in place of one of its tensors, on two ranks.

The functions and their arguments are those with which torch tests itself. Importing them changes
the process (flags, ``sys.path``), so this is a program of its own: ``python -m
tests.modules.functions_of_torch FIRST STEP LAYOUT`` prints how many calls of every STEP-th function
are right or refused, and what is wrong.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db

import echelon as ec
from echelon.comm.group import Group
from echelon.comm.world import World
from echelon.errors import EchelonError
from echelon.modules.sharded_tensor import is_part, local_shard, sharding_of

DTYPES = (torch.float64, torch.int64, torch.bool)
MAX_NUMEL = 5_000  # of an argument that is sharded
ARBITRARY = ("empty", "new_empty")  # whose values nobody promises
LIMIT = 15  # samples of each

Place = int | str  # the argument that is sharded: "input", a position behind it, or a keyword


class Holder(nn.Module):
    """A model with one parameter."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        is_float = value.dtype.is_floating_point
        self.value = nn.Parameter(value.clone(), requires_grad=is_float)


def is_sharded(value: Any) -> bool:
    """Whether an argument becomes a part."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 1


def may_be_sharded(value: Any) -> bool:
    """Whether an argument, or one in a list, becomes a part, and none cannot."""
    values = value if isinstance(value, list | tuple) else [value]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return any(map(is_sharded, tensors)) and not any(
        tensor.is_complex() or tensor.layout is not torch.strided or tensor.numel() > MAX_NUMEL
        for tensor in tensors
    )


class Call:
    """One call of a function of torch, of which one argument is sharded."""

    def __init__(self, what: str, func: Callable[..., Any], sample: Any, place: Place) -> None:
        self.func, self.sample, self.place = func, sample, place
        self.is_write = what == "in place"
        self.models: list[nn.Module] = []  # as parts belong to a living model

    @property
    def value(self) -> Any:
        if self.place == "input":
            return self.sample.input
        return (self.sample.args if isinstance(self.place, int) else self.sample.kwargs)[self.place]

    def run(self, value: Any) -> Any:
        """The result; of a write, what was written, too."""
        torch.manual_seed(1)
        sample, place = self.sample, self.place
        target = value if place == "input" else copied(sample.input)
        args = [value if place == i else copied(arg) for i, arg in enumerate(sample.args)]
        named = {k: value if place == k else copied(arg) for k, arg in sample.kwargs.items()}
        result = self.func(target, *args, **named)
        return [result, target] if self.is_write else result

    def part(self, value: Any, group: Group, layout: str) -> Any:
        """The argument, sharded."""
        if isinstance(value, list | tuple):
            return type(value)(self.part(item, group, layout) for item in value)
        if not is_sharded(value):
            return copied(value)
        model = ec.FSDP(Holder(value), group, min_num_params=0, layout=layout)
        self.models.append(model)
        part = model.module.value.detach()
        return part.clone() if self.is_write else part


def copied(value: Any) -> Any:
    """The same argument in memory of its own."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map(copied, value))
    return value.detach().clone() if isinstance(value, Tensor) else value


def calls_of(op: Any) -> Iterator[tuple[str, Call]]:
    """Calls with the first samples of a function, each with its name."""
    dtype = next((dtype for dtype in DTYPES if dtype in op.dtypes), None)
    if dtype is None or op.name.startswith(ARBITRARY):
        return
    variants = {"": op.op, "method": op.method_variant, "in place": op.inplace_variant}
    torch.manual_seed(0)
    samples = op.sample_inputs("cpu", dtype, requires_grad=False)
    for number, sample in zip(range(LIMIT), samples, strict=False):
        for place in ("input", *range(len(sample.args)), *sample.kwargs):
            for what, func in variants.items():
                if func is not None:
                    call = Call(what, func, sample, place)
                    if may_be_sharded(call.value):
                        yield f"{op.name} {what}, sample {number}, {place}", call


def whole(result: Any) -> Any:
    """The same without parts."""
    if isinstance(result, list | tuple):
        return [whole(item) for item in result]
    is_any_part = isinstance(result, Tensor) and is_part(result)
    return sharding_of(result).gather(local_shard(result)) if is_any_part else result


def outcome(call: Call, group: Group, layout: str) -> str:
    """How a call with a part ended: ``"right"``, ``"refused"``, or what is wrong."""
    expected = call.run(copied(call.value))
    try:
        result = whole(call.run(call.part(call.value, group, layout)))
    except EchelonError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    try:
        torch.testing.assert_close(result, whole(expected), rtol=1e-9, atol=1e-12, equal_nan=True)
    except (AssertionError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "right"


def is_possible(call: Call) -> bool:
    """Whether torch itself runs it."""
    try:
        call.run(copied(call.value))
    except Exception:
        return False
    return True


def run_ops(world: World, first: int, step: int, layout: str) -> tuple[Counter[str], list[str]]:
    """Counts of outcomes, and what is wrong."""
    counts: Counter[str] = Counter()
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in op_db[first::step]:
            for name, call in calls_of(op):
                if not is_possible(call):
                    continue
                found = set(world.group.all_gather_object(outcome(call, world.group, layout)))
                if len(found) == 1 and found <= {"right", "refused"}:
                    counts.update(found)
                else:
                    wrong.append(f"{name}: {sorted(found)}")
    return counts, wrong


if __name__ == "__main__":
    first, step = map(int, sys.argv[1:3])
    (counts, wrong), _ = ec.run(run_ops, 2, args=(first, step, sys.argv[3]), timeout=200)
    print(json.dumps({"counts": counts, "wrong": wrong}))
