"""``LoneGroup``: one rank, whose peers, if it has any, are taken to be like it.

A script that runs by itself has no peers. With them, a program runs as one rank of thousands, to
see what it allocates and calls: what it computes has no meaning beyond shapes. Groups of PyTorch's
backend ``"fake"`` do the same for programs of ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from echelon.comm.buffers import zeros
from echelon.comm.group import Group
from echelon.comm.primitives import (
    AllGather,
    AllReduce,
    Derived,
    Exchange,
    Primitive,
    ReduceScatter,
)
from echelon.comm.work import CompletedWork, Window, Work
from echelon.diagnosis.collective_call import CollectiveCall


@final
class LoneGroup(Group):
    """One rank of a group, without the others.

    A collective has the result that it had if the other ranks gave the same values; a message is
    neither sent nor waited for.

    Args:
        rank: this rank in the group.
        ranks: the ranks of the members in the job.
        device: of the tensors; None: the CPU.
        timeout: the seconds that a rank is said to wait for others; nobody is waited for.
        present: a group of those ranks that are there, which is what a subgroup of all of them is.
        present_ranks: their ranks in the job.
        shares_memory: whether the group is to behave as one whose ranks share memory.
        issued: is called with each operation, by this group and its subgroups.

    Example:
        >>> group = LoneGroup(3, range(1000))
        >>> value = torch.ones(2)
        >>> group.all_reduce(value)
        >>> value.tolist(), len(group.all_gather_object("text"))
        ([1000.0, 1000.0], 1000)
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        *,
        device: torch.device | None = None,
        timeout: float = 300.0,
        present: Group | None = None,
        present_ranks: Sequence[int] = (),
        shares_memory: bool = False,
        name: str = "world",
        issued: Callable[[LoneGroup, Primitive], None] | None = None,
    ) -> None:
        super().__init__(
            name,
            rank,
            ranks,
            device or torch.device("cpu"),
            timeout,
            shares_memory=shares_memory,
            note=lambda call: None,
        )
        self._present, self._present_ranks = present, present_ranks
        self._issued = issued

    def _use_timeout(self, seconds: float) -> None:
        """Nobody is waited for."""

    def _start(self, call: CollectiveCall, operation: Primitive | Derived) -> Work | None:
        if isinstance(operation, Derived):
            operation = operation.primitive(self.rank, self.size)
        if self._issued is not None:
            self._issued(self, operation)
        if type(operation) is not AllReduce or self.size > 1:
            with torch.inference_mode():  # inference tensors can be written only in it
                _act(operation, self.rank, self.size)
        return None if call.blocking else CompletedWork(call)

    def _subgroup(
        self, call: CollectiveCall, name: str, members: Sequence[int], device: torch.device | None
    ) -> Any:
        if self.rank not in members:
            return None
        ranks = [self.ranks[member] for member in members]
        if self._present is not None and ranks == list(self._present_ranks):
            return self._present
        return LoneGroup(
            ranks.index(self.ranks[self.rank]),
            ranks,
            present=self._present,
            present_ranks=self._present_ranks,
            shares_memory=self.shares_memory,
            name=name,
            issued=self._issued,
            device=device or self.device,
            timeout=self.timeout,
        )

    def _window(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Window:
        local = zeros(numel, dtype, self.device, what=f"a window of {numel} elements")
        return Window(local, (local,) * self.size, shared=self.shares_memory)

    def _shared(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Tensor:
        return zeros(numel, dtype, self.device, what=f"a shared tensor of {numel} elements")


def _act(operation: Primitive, rank: int, size: int) -> None:
    """Write what the operation gives if all ranks have the values of this one."""
    match operation:
        case AllReduce(tensor=tensor, op=op):
            _reduce(tensor, op, size)
        case ReduceScatter(output=output, input=input, splits=splits, op=op):
            output.copy_(input.split(splits)[rank])
            _reduce(output, op, size)
        case AllGather(outputs=outputs, input=input):
            for output in outputs:
                _copy(output, input)
        case Exchange(outputs=outputs, inputs=inputs):
            for output in outputs:
                _copy(output, inputs[rank])
        case _:  # a broadcast has this rank's values, and messages have none
            pass


def _reduce(tensor: Tensor, op: str, size: int) -> None:
    """The reduction of so many equal tensors; all but two kinds are the tensor itself."""
    if op == "sum":
        tensor *= size
    elif op == "product":
        tensor **= size
    elif op == "bxor" and size % 2 == 0:
        tensor.zero_()


def _copy(output: Tensor, input: Tensor) -> None:
    """Copy as much as there is: another rank may have more or less than this one."""
    numel = min(output.numel(), input.numel())
    output[:numel].copy_(input[:numel])
