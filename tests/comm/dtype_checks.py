"""Every collective for every dtype, and every reduction where it has a meaning. Any group."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from echelon.comm.group import Group
from echelon.comm.reduce_op import OPS, check_op
from echelon.errors import ArgumentError
from tests.comm.checking import refuses, same

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NARROW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)
EVERY = (*FLOATS, *NARROW[2:], *COMPLEX, *INTEGERS, torch.bool)

_INTEGER_OPS: dict[str, Callable[[int, int], int]] = {
    "sum": operator.add,
    "product": operator.mul,
    "min": min,
    "max": max,
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
}


def values(dtype: torch.dtype, seed: int, numel: int = 37) -> Tensor:
    """Random values over the whole range of ``dtype``, the same for one seed everywhere."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(numel, dtype=wide, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    nbytes = numel * dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def reduced(parts: list[Tensor], op: str) -> Tensor:
    """The reduction by its definition: in rank order, narrow floats in float32, integers wrap."""
    dtype = parts[0].dtype
    if dtype == torch.bool:
        combine = operator.or_ if op in ("sum", "max", "bor") else operator.and_
        return reduce(operator.xor if op == "bxor" else combine, parts)
    if dtype in INTEGERS:
        limit, low = 1 << 8 * dtype.itemsize, torch.iinfo(dtype).min
        columns = zip(*(part.tolist() for part in parts), strict=True)
        wide = [reduce(_INTEGER_OPS[op], column) for column in columns]
        return torch.tensor([(value - low) % limit + low for value in wide], dtype=dtype)
    if op in ("min", "max"):
        wide_parts = [part.double() for part in parts]
        return reduce(torch.minimum if op == "min" else torch.maximum, wide_parts).to(dtype)
    if dtype in NARROW:
        parts = [part.float() for part in parts]
    total = reduce(torch.mul if op == "product" else torch.add, parts)
    return (total / len(parts) if op == "mean" else total).to(dtype)


def has_meaning(op: str, dtype: torch.dtype) -> bool:
    """Whether ``check_op`` lets them pass."""
    try:
        check_op(op, dtype)
    except ArgumentError:
        return False
    return True


def check_all_reduce_of_every_dtype_and_operation(group: Group) -> None:
    for dtype in EVERY:
        for number, op in enumerate(OPS):
            parts = [values(dtype, 100 * number + r) for r in range(group.size)]
            mine = parts[group.rank].clone()
            if has_meaning(op, dtype):
                group.all_reduce(mine, op, label=f"{op} of {dtype}")
                same(mine, reduced(parts, op), f"{op} of {dtype}")
            else:
                refuses(ArgumentError, str(dtype), lambda op=op, t=mine: group.all_reduce(t, op))


def check_every_reducing_collective_for_every_dtype(group: Group) -> None:
    n = group.size
    for number, dtype in enumerate(EVERY):
        op = "mean" if dtype.is_floating_point else "sum"
        parts = [values(dtype, number + 50 * r, 5 * n) for r in range(n)]
        output = torch.empty(5, dtype=dtype)
        group.reduce_scatter_single(output, parts[group.rank], op)
        lanes = [part[5 * group.rank : 5 * group.rank + 5] for part in parts]
        same(output, reduced(lanes, op), f"reduce_scatter_single of {dtype}")
        mine, dst = parts[group.rank].clone(), number % n
        group.reduce(mine, dst, op)
        expected = reduced(parts, op) if group.rank == dst else parts[group.rank]
        same(mine, expected, f"reduce of {dtype}")


def check_every_moving_collective_for_every_dtype(group: Group) -> None:
    n, rank = group.size, group.rank
    for number, dtype in enumerate(EVERY):
        root = number % n
        parts = [values(dtype, number + 50 * r, 3 * n) for r in range(n)]
        mine, whole = parts[rank], torch.cat(parts)
        output = torch.empty(3 * n * n, dtype=dtype)
        group.all_gather_single(output, mine)
        same(output, whole, f"all_gather_single of {dtype}")
        outputs = [torch.empty(r, dtype=dtype) for r in range(n)]
        group.all_gather(outputs, mine[:rank])
        same(torch.cat(outputs), torch.cat([parts[r][:r] for r in range(n)]), f"all_gather {dtype}")
        value = mine.clone()
        group.broadcast(value, root)
        same(value, parts[root], f"broadcast of {dtype}")
        output = torch.empty(3 * n, dtype=dtype)
        group.all_to_all_single(output, mine)
        lanes = [part[3 * rank : 3 * rank + 3] for part in parts]
        same(output, torch.cat(lanes), f"all_to_all_single of {dtype}")
        outputs = [torch.empty(3 * n, dtype=dtype) for _ in range(n)]
        group.gather(mine, outputs if rank == root else None, root)
        if rank == root:
            same(torch.cat(outputs), whole, f"gather of {dtype}")
        part = torch.empty(3 * n, dtype=dtype)
        group.scatter(part, parts if rank == root else None, root)
        same(part, parts[rank], f"scatter of {dtype}")


def check_messages_of_every_dtype(group: Group) -> None:
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    if group.size == 1:
        return
    for number, dtype in enumerate(EVERY):
        output = torch.empty(37, dtype=dtype)
        work = group.irecv(output, before, tag=number)
        group.isend(values(dtype, number + group.rank), after, tag=number).wait()
        work.wait()
        same(output, values(dtype, number + before), f"message of {dtype}")


def check_narrow_sums_are_rounded_once(group: Group) -> None:
    # 1 + n * 2^-9 in steps would stay 1 in bfloat16; in float32 the small parts add up.
    for dtype, small in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        mine = torch.full((70_000,), 1.0 if group.rank == 0 else small * 1.5, dtype=dtype)
        group.all_reduce(mine)
        expected = torch.tensor(1.0 + 1.5 * small * (group.size - 1)).to(dtype)
        same(mine, expected.expand(70_000).contiguous(), str(dtype))


def check_special_values(group: Group) -> None:
    inf, nan = float("inf"), float("nan")
    mine = torch.tensor([nan if group.rank == 0 else 1.0, inf, -0.0])
    group.all_reduce(mine)
    assert mine[0].isnan()
    assert mine[1] == inf
    same(mine[2], torch.tensor(-0.0))
    largest = torch.tensor([nan if group.rank == group.size - 1 else 1.0])
    group.all_reduce(largest, "max")
    assert largest.isnan().all()
