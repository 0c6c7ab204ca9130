"""Checks of the arguments of collectives and messages, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast, final

import torch
from torch import Tensor

from echelon import checks
from echelon.comm.buffers import is_expanded
from echelon.comm.streams import device_of
from echelon.errors import ArgumentError

_QUANTIZED = "torch.q"  # qint8, quint4x2, …
_STRIDED = torch.strided
_CPU = torch.device("cpu")


class PartOfATensor:
    """A base of classes of tensors whose memory is a part of what they stand for.

    Collectives refuse them: what would be summed or sent is other elements on each rank.
    """

    __slots__ = ()

    def describe_part(self) -> str:
        """Which part of what this rank holds."""
        raise NotImplementedError


@final
class Arguments:
    """Checks the arguments of the calls of one rank.

    ``rank`` and ``size`` are those of the group, and ``device`` holds its tensors; ``on_host`` says
    whether in the memory of the host.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.on_host = device_of(device).is_host

    def check_call(
        self,
        op: str,
        label: object,
        read: Sequence[Tensor] = (),
        written: Sequence[Tensor] = (),
    ) -> torch.dtype:
        """Check the label and all tensors of a call, and return the common dtype of these."""
        if label is not None:
            self.check_label(label)
        dtype: torch.dtype | None = None
        for tensor in (*read, *written):
            if (
                not isinstance(tensor, Tensor)
                or isinstance(tensor, PartOfATensor)
                or tensor.is_nested
                or tensor.is_quantized
                or tensor.layout is not _STRIDED
                or tensor.device != self.device
            ):
                raise self._refusal(op, tensor)
            if dtype is None:
                dtype = tensor.dtype
            elif tensor.dtype is not dtype:
                raise ArgumentError(
                    f"{op} got tensors of {dtype} and {tensor.dtype}; use one dtype"
                )
        for tensor in written:
            if not tensor.is_contiguous() and is_expanded(tensor):
                raise ArgumentError(
                    f"{op} cannot write to a tensor of shape {tuple(tensor.shape)} and strides "
                    f"{tensor.stride()}: several of its elements are one place in memory (it was "
                    "expanded). Call .contiguous() on it first"
                )
        assert dtype is not None
        return dtype

    def _refusal(self, op: str, tensor: object) -> ArgumentError:
        """The error for what no call takes."""
        if not isinstance(tensor, Tensor):
            return ArgumentError(f"{op} got {tensor!r:.80}; give a tensor")
        if isinstance(tensor, PartOfATensor):
            return ArgumentError(
                f"{op} would take the parts of ranks for one tensor: of {tensor.describe_part()}. "
                "FSDP sends rank 0's values when it wraps a model, and reduces gradients itself; "
                "ec.local_shard(tensor) is this rank's part, if that is meant"
            )
        if tensor.is_nested or tensor.is_quantized:
            kind = "nested" if tensor.is_nested else "quantized"
            return ArgumentError(f"{op} got a {kind} tensor; give a dense one, such as its values")
        if tensor.layout != _STRIDED:
            return ArgumentError(
                f"{op} takes dense tensors, not {tensor.layout}: call .to_dense() first"
            )
        return ArgumentError(
            f"{op} got a tensor on {tensor.device}; this group is on {self.device}"
        )

    def check_label(self, label: object) -> None:
        """Refuse a label that is no text."""
        if not isinstance(label, str):
            raise ArgumentError(f"label is {label!r:.80}; give a str, or None")

    def check_rank(self, what: str, rank: object) -> None:
        """Refuse anything but a rank of the group."""
        checks.rank(what, rank, self.size)

    def check_peer(self, op: str, what: str, peer: int, tag: int) -> None:
        """Refuse a message to this rank itself, or with a tag that is no 31-bit integer."""
        self.check_rank(what, peer)
        if peer == self.rank:
            raise ArgumentError(f"rank {peer} cannot {op} to itself: copy the tensor instead")
        if not isinstance(tag, int) or not 0 <= tag < 2**31:
            raise ArgumentError(f"{op} got tag {tag!r:.80}: use an integer with 0 <= tag < 2**31")

    def check_numel(self, what: str, tensor: Tensor, numel: int, meaning: str) -> None:
        """Refuse a tensor that does not have ``numel`` elements."""
        if tensor.numel() != numel:
            raise ArgumentError(
                f"{what} has {tensor.numel()} elements; it needs {meaning} = {numel}"
            )

    def outputs_of_ranks(
        self, op: str, label: object, outputs: Sequence[Tensor], input: Tensor
    ) -> None:
        """Check a list with one output for each rank, and the input of this rank."""
        _check_list(op, "outputs", outputs)
        self.check_call(op, label, [input], outputs)
        if len(outputs) != self.size:
            raise ArgumentError(f"{op} got {len(outputs)} outputs for {self.size} ranks")
        self.check_numel(
            "input", input, outputs[self.rank].numel(), f"outputs[{self.rank}].numel()"
        )

    def list_of_root(
        self, op: str, what: str, tensors: Sequence[Tensor] | None, root: int
    ) -> Sequence[Tensor]:
        """Check the list that only ``root`` passes; it is empty on other ranks."""
        tensors = () if tensors is None else tensors
        _check_list(op, what, tensors)
        if self.rank != root and len(tensors):
            raise ArgumentError(f"{op}: only rank {root} gives {what}, this is rank {self.rank}")
        if self.rank == root and len(tensors) != self.size:
            raise ArgumentError(
                f"{op}: rank {root} must give {self.size} {what}, got {len(tensors) or 'none'}"
            )
        return tensors

    def check_numels(self, op: str, what: str, tensors: Sequence[Tensor], like: Tensor) -> None:
        """Refuse tensors that do not have as many elements as ``like``."""
        for i, tensor in enumerate(tensors):
            self.check_numel(f"{op}: {what}[{i}]", tensor, like.numel(), "tensor.numel()")

    def splits(self, what: str, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """Check splits in elements, and return them as a list."""
        lengths = checks.integers("splits", splits)
        if len(lengths) != self.size or sum(lengths) != tensor.numel():
            raise ArgumentError(
                f"splits {lengths} do not cut the {tensor.numel()} elements of {what} "
                f"for {self.size} ranks"
            )
        return lengths

    def rows(self, what: str, tensor: Tensor, splits: Sequence[int] | None) -> list[int]:
        """Check splits in rows of dim 0 (None: equal parts), and return them in elements."""
        op = "all_to_all_single"
        if not tensor.dim():
            raise ArgumentError(
                f"{op}: {what} has no dim 0 to cut into parts: give at least one dim"
            )
        rows = tensor.shape[0]
        row = tensor.numel() // rows if rows else 0
        if splits is None:
            if rows % self.size:
                raise ArgumentError(
                    f"{op}: {what} has {rows} rows, not a multiple of {self.size} ranks; "
                    f"give {what}_splits"
                )
            return [rows // self.size * row] * self.size
        lengths = checks.integers(f"{what}_splits", splits)
        if len(lengths) != self.size or sum(lengths) != rows:
            raise ArgumentError(
                f"{op}: {what}_splits {lengths} do not cut {rows} rows for {self.size} ranks"
            )
        return [length * row for length in lengths]

    def memory(self, op: str, numel: object, dtype: object) -> int:
        """Check the dtype and the number of elements of new memory, and return the number."""
        if not isinstance(dtype, torch.dtype) or str(dtype).startswith(_QUANTIZED):
            raise ArgumentError(f"{op}: dtype is {dtype!r:.80}; give a dtype of plain numbers")
        return checks.integer(f"{op}: numel", numel)

    def members(self, ranks: object) -> list[int]:
        """Check the ranks of a subgroup, and return them sorted and without repetitions."""
        if isinstance(ranks, str) or not isinstance(ranks, Iterable):
            raise ArgumentError(f"ranks is {ranks!r:.80}; give a list of ranks of this group")
        members = list(ranks)
        if not members:
            raise ArgumentError("a subgroup needs at least one rank")
        for member in members:
            self.check_rank("a member of the subgroup", member)
        return sorted(set(members))

    def device_of_subgroup(self, device: object) -> torch.device | None:
        """Check the device of a new group, and return it; None for that of this group."""
        if device is None:
            return None
        try:
            place = torch.device(device)  # type: ignore[call-overload]
        except (TypeError, RuntimeError) as error:
            raise ArgumentError(f"device is {device!r:.80}, which torch does not know") from error
        if place not in (self.device, _CPU):
            raise ArgumentError(
                f"device is {device!r:.80}: a subgroup has the device of its group, {self.device}, "
                "or 'cpu'"
            )
        return cast(torch.device, place)


def _check_list(op: str, what: str, tensors: object) -> None:
    """Refuse anything but a list; ``check_call`` checks its items."""
    if not isinstance(tensors, list | tuple):
        raise ArgumentError(f"{op}: {what} is {tensors!r:.80}; give a list of tensors, one a rank")
