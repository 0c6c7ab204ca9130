"""The rows of all ranks in one tensor, through which gradients flow back to the rank of each."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from echelon import checks
from echelon.comm.group import Group
from echelon.errors import ArgumentError


def all_gather_rows(tensor: Tensor, group: Group) -> Tensor:
    """The rows of all ranks, end to end in rank order: a differentiable all-gather.

    For losses over the outputs of all ranks, as in contrastive training. All ranks of ``group``
    call it, and all call backward or none does.

    Law: the gradient of a row is the sum over ranks of the gradients that their losses give it.
    ``DDP``, ``FSDP`` and ``Pipeline`` average gradients over ranks, so what is trained is the mean
    of the losses of the ranks: with the same loss on all ranks it is that loss, and with the rows
    of this rank against those of all it is the loss over all rows. No factor is needed.

    Args:
        tensor: rows along dim 0; ranks may have different numbers of rows, and also none.
        group: the ranks whose rows are gathered, such as ``world.group``.

    Returns:
        A tensor of ``[all rows, ...]``, with the same bits on every rank.

    Raises:
        ArgumentError: ``tensor`` is no tensor with rows, or ``group`` is no group.
        CollectiveMismatch: the rows of ranks differ in shape or dtype.

    Example:
        >>> import echelon as ec
        >>> def main(world):
        ...     x = torch.full((1, 2), float(world.rank + 1), requires_grad=True)
        ...     similar = x @ ec.all_gather_rows(x, world.group).T
        ...     similar.sum().backward()
        ...     return similar.tolist(), x.grad.tolist()
        >>> ec.run(main, 2)
        [([[2.0, 4.0]], [[6.0, 6.0]]), ([[4.0, 8.0]], [[6.0, 6.0]])]
    """
    checks.instance("tensor", tensor, Tensor)
    checks.instance("group", group, Group)
    if not tensor.dim():
        raise ArgumentError("tensor is one number; give a tensor with rows along dim 0")
    rows: Tensor = _GatheredRows.apply(tensor, group)  # type: ignore[no-untyped-call]
    return rows


class _GatheredRows(torch.autograd.Function):
    """Forward all-gathers rows; backward sums their gradients over ranks, each where it belongs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        row_shape = tuple(tensor.shape[1:])
        num_rows = torch.empty(group.size, dtype=torch.int64, device=group.device)
        group.all_gather_single(
            num_rows,
            torch.tensor([tensor.shape[0]], device=group.device),
            label=f"numbers of rows of shape {list(row_shape)}",
        )
        row_numel = math.prod(row_shape)
        ctx.group, ctx.device, ctx.num_rows = group, tensor.device, tensor.shape[0]
        ctx.splits = [count * row_numel for count in num_rows.tolist()]
        flat = torch.empty(sum(ctx.splits), dtype=tensor.dtype, device=group.device)
        source = tensor.detach().to(group.device).reshape(-1).contiguous()
        group.all_gather(flat.split(ctx.splits), source, label="rows of all ranks")
        return flat.view(int(num_rows.sum()), *row_shape).to(tensor.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        group, splits = ctx.group, ctx.splits
        source = grad.to(group.device).reshape(-1).contiguous()
        part = torch.empty(splits[group.rank], dtype=grad.dtype, device=group.device)
        group.reduce_scatter_single(
            part, source, splits=splits, label="gradients of rows of all ranks"
        )
        return part.view(ctx.num_rows, *grad.shape[1:]).to(ctx.device), None
