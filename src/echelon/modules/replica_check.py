"""Comparing now and then what several ranks keep equal: whole parameters, or shards of them.

[Note: when parameters are compared]
Replicas stay equal while all ranks take equal steps. A rank that clips alone, or a forward that
writes what it has seen, parts them without a sign. A sum over the bits of all parameters reads
memory once, and finds nearly every difference; it is compared in the reductions 2, 8, 32 and
then in every ``check_replicas``-th one, so that it costs less than a thousandth of a step. If sums
differ, hashes of each parameter say whether, and where, parameters do. All ranks count the same
reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TypeAlias, final

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from echelon.comm.agreement import first_difference
from echelon.comm.group import Group
from echelon.errors import ModelMismatch
from echelon.modules.model_agreement import digest
from echelon.process.this_rank import here

EARLY = (2, 8, 32)  # passes in which there is a comparison all the same

Named: TypeAlias = Callable[[], Sequence[tuple[str, Tensor]]]

_ADVICE = (
    "Replicas part when a rank changes parameters or gradients that the others do not: when it "
    "clips, skips or steps alone, or when forward writes into a parameter what it has seen. Do the "
    "same on all ranks (ec.clip_grad_norm_ is the same everywhere); {remedy} makes them equal "
    "again, and check_replicas=0 leaves them as they are."
)


@contextmanager
def without_replica_checks() -> Iterator[None]:
    """Models that are wrapped in the body compare nothing: what runs them explains differences."""
    before = here.compares_by_itself
    here.compares_by_itself = True
    try:
        yield
    finally:
        here.compares_by_itself = before


def is_turn(n: int, every: int) -> bool:
    """Whether pass ``n``, counted from 1, is one of those that compare: early, then seldom."""
    return n % every == 0 or (n < every and n in EARLY)


@final
class ReplicaCheck:
    """Compares what ranks keep equal; see the note. All ranks call its methods.

    Args:
        whole: the parameters that all ranks keep equal, and their names.
        shards: the shards that this rank and those of ``replicas`` keep equal.
        group: the ranks that share the model.
        replicas: the ranks with the same shards as this one, if there are others.
        every: after how many reductions, once there were as many; 0: never.
        remedy: what makes them equal again, for the message.

    Attributes:
        is_on: whether there is anything to compare.
    """

    def __init__(
        self,
        whole: Named,
        shards: Named,
        group: Group,
        replicas: Group | None,
        *,
        every: int,
        remedy: str,
    ) -> None:
        self._whole, self._shards = whole, shards
        self._group, self._replicas = group, replicas
        self._every, self._advice = every, _ADVICE.format(remedy=remedy)
        self._num_reductions = 0
        copies = group.size > 1 and bool(whole())
        several = replicas is not None and replicas.size > 1
        is_left_out = here.compares_by_itself
        self.is_on = every > 0 and (copies or several) and not is_left_out

    def count_reduction(self) -> None:
        """Compare if it is time to. All ranks call it once in each reduction."""
        self._num_reductions += 1
        if self.is_on and is_turn(self._num_reductions, self._every):
            self.compare()

    @torch.no_grad()
    def compare(self) -> None:
        """Raise a ModelMismatch on all ranks unless all have the same parameters."""
        with DisableTorchFunctionSubclass():
            whole, shards = self._sum(self._whole()), self._sum(self._shards())
            # The largest of the sums, and of their complements, are complements if all are equal.
            sums = torch.stack([whole, ~whole, shards, ~shards])
            if self._replicas is not None:
                self._reduce(self._replicas, sums)
            differ = sums[2:3] != ~sums[3:4]  # those of other ranks of the group may
            sums = torch.cat([sums[:2], differ.to(torch.int64)])
            self._reduce(self._group, sums)
            if bool((sums[0] != ~sums[1]) | (sums[2] != 0)):
                self._name_first()

    def _reduce(self, group: Group, sums: Tensor) -> None:
        if group.size > 1:
            group.all_reduce(sums, "max", label="sums of parameters")

    def _sum(self, named: Iterable[tuple[str, Tensor]]) -> Tensor:
        """The sum of the bits of all tensors, on the device of the group; 0D."""
        total = torch.zeros((), dtype=torch.int64, device=self._group.device)
        for _, tensor in named:
            total += sum_of_bits(tensor.detach()).to(total.device)
        return total

    def _name_first(self) -> None:
        """Compare hashes: one rank's in a dict by name, first those that all ranks keep equal."""
        hashes = tuple(
            {name: digest(tensor) for name, tensor in named()}
            for named in (self._whole, self._shards)
        )
        of_all = self._group.all_gather_object(hashes)
        if self._replicas is not None:
            of_all = [*chain.from_iterable(self._replicas.all_gather_object(of_all))]
        self._compare(dict(enumerate(whole for whole, _ in of_all)))
        for rank in range(self._group.size):
            keeping = range(rank, len(of_all), self._group.size)
            self._compare({other: of_all[other][1] for other in keeping})

    def _compare(self, hashes: dict[int, dict[str, str]]) -> None:
        difference = first_difference([*hashes.values()])
        if difference is not None:
            name, values = difference
            by_rank = dict(zip(hashes, values.values(), strict=True))
            raise ModelMismatch(f"the values of parameter {name!r}", by_rank, self._advice)


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of all 64-bit words of a tensor, 0D: exact, and as fast as memory is read."""
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    end = flat.numel() // 8 * 8
    if flat.data_ptr() % 8 or flat.storage_offset() % 8:
        flat = flat.clone()
    total = flat[:end].view(torch.int64).sum()
    return total + flat[end:].sum() if end < flat.numel() else total
