"""A sum of sparse tensors over ranks, whose non-zero places differ from rank to rank."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from echelon.comm.group import Group
from echelon.errors import UnsupportedError


@final
class SparseAllReduce:
    """An all-reduce of one sparse COO tensor.

    The ranks tell each other how many entries they have, then exchange the entries, and each adds
    them up in rank order. The entries travel in two collectives, of places and of values.

    Args:
        group: of ranks that all call it.
        tensor: gets the sum.
        op: ``"sum"`` or ``"mean"``.
    """

    def __init__(self, group: Group, tensor: Tensor, op: str) -> None:
        if tensor.layout != torch.sparse_coo or op not in ("sum", "mean"):
            raise UnsupportedError(
                f"all_reduce({op}) of {tensor.layout} tensors: ranks reduce dense tensors, and of "
                "torch.sparse_coo sums and means; call .to_dense(), or .to_sparse_coo()"
            )
        self._group, self._tensor, self._op = group, tensor, op
        with torch.no_grad():
            self._local = tensor.detach().coalesce()

    def run(self, in_background: bool = False) -> None:
        """Do it, up to its end, also where it may be done in the background."""
        group, local = self._group, self._local
        indices, values = local.indices(), local.values()
        num_entries = torch.tensor([values.shape[0]], device="cpu")
        numbers = torch.empty(group.size, dtype=num_entries.dtype, device="cpu")
        group.all_gather_single(numbers, num_entries, label="entries of a sparse tensor")
        places = [indices.new_empty((indices.shape[0], n)) for n in numbers.tolist()]
        entries = [values.new_empty((n, *values.shape[1:])) for n in numbers.tolist()]
        group.all_gather(places, indices.contiguous())
        group.all_gather(entries, values.contiguous())
        with torch.no_grad():
            total = torch.sparse_coo_tensor(
                torch.cat(places, dim=1), torch.cat(entries), local.shape, check_invariants=False
            ).coalesce()
            if self._op == "mean":
                total = total / group.size
            self._tensor.copy_(total)  # of a detached tensor, only the copy would get the entries
