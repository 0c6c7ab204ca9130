"""What a backend of ``Group`` writes, and the checks that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from echelon import checks, events
from echelon.comm.flat import is_expanded
from echelon.comm.group_tree import GroupTree
from echelon.comm.work import Window, Work, emit_issue
from echelon.diagnosis.collective_call import CallSignature, CollectiveCall, caller
from echelon.errors import ArgumentError
from echelon.process.forks import disown_in_forks, keep_alive, refused

if TYPE_CHECKING:
    from echelon.comm.group import Group

_QUANTIZED = "torch.q"  # qint8, quint4x2, …


class Backend(GroupTree, ABC):
    """The part of a ``Group`` that differs between worlds.

    Tensors that reach the abstract methods are 1D, contiguous and on ``device``. Each method starts
    the operation and returns at once; if ``call.blocking``, the caller waits next and the backend
    may use its thread.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        ranks: Sequence[int],
        device: torch.device,
        timeout: float,
        *,
        shares_memory: bool,
        note: Callable[[CollectiveCall], None],
    ) -> None:
        super().__init__()
        self.name = name
        self.rank = rank
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.device = device
        self.timeout = timeout
        self.shares_memory = shares_memory
        self._note = note  # of each call, for whoever reports that this rank died or hangs
        self._position = 0
        self._p2p_position = 0
        self._num_subgroups = 0
        disown_in_forks(self)

    @final
    def disown(self) -> None:
        """Refuse all calls of this process, which the rank has forked."""
        for item in self._kept_in_forks():
            keep_alive(item)

        def refuse(call: CollectiveCall) -> None:
            raise refused(f"{call.signature} of group {call.group!r} at {call.place}", call.rank)

        self._note = refuse

    def _kept_in_forks(self) -> Sequence[object]:
        """What a forked process must not take apart."""
        return ()

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.size}, on {self.device}"
        return f"{type(self).__name__}({self.name!r}, {place})"

    # What a backend writes -------------------------------------------------------------------

    @abstractmethod
    def _all_reduce(self, call: CollectiveCall, tensor: Tensor, op: str) -> Work: ...

    @abstractmethod
    def _reduce_scatter(
        self, call: CollectiveCall, output: Tensor, input: Tensor, splits: Sequence[int], op: str
    ) -> Work: ...

    @abstractmethod
    def _all_gather(
        self, call: CollectiveCall, outputs: Sequence[Tensor], input: Tensor
    ) -> Work: ...

    @abstractmethod
    def _broadcast(self, call: CollectiveCall, tensor: Tensor, src: int) -> Work: ...

    @abstractmethod
    def _reduce(self, call: CollectiveCall, tensor: Tensor, dst: int, op: str) -> Work: ...

    @abstractmethod
    def _gather(
        self, call: CollectiveCall, outputs: Sequence[Tensor], tensor: Tensor, dst: int
    ) -> Work: ...

    @abstractmethod
    def _scatter(
        self, call: CollectiveCall, tensor: Tensor, inputs: Sequence[Tensor], src: int
    ) -> Work: ...

    @abstractmethod
    def _all_to_all(
        self, call: CollectiveCall, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Work: ...

    @abstractmethod
    def _barrier(self, call: CollectiveCall) -> Work: ...

    @abstractmethod
    def _send(self, call: CollectiveCall, tensor: Tensor, dst: int, tag: int) -> Work: ...

    @abstractmethod
    def _recv(self, call: CollectiveCall, tensor: Tensor, src: int, tag: int) -> Work: ...

    @abstractmethod
    def _subgroup(
        self, call: CollectiveCall, name: str, members: Sequence[int]
    ) -> Group | None: ...

    @abstractmethod
    def _window(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Window: ...

    def _shared(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Tensor:
        """Only where the group ``shares_memory``."""
        raise NotImplementedError

    # Checks ----------------------------------------------------------------------------------

    def _number(self, signature: CallSignature, async_op: bool) -> CollectiveCall:
        if signature.label is not None and not isinstance(signature.label, str):
            raise ArgumentError(f"label is {signature.label!r:.80}; give a str, or None")
        call = CollectiveCall(
            signature, caller(), self._position, self.name, self.ranks[self.rank], not async_op
        )
        self._position += 1
        self._note(call)
        if events.listening():
            emit_issue(call)
        return call

    def _number_message(
        self, op: str, tensor: Tensor, peer: int, tag: int, *, blocking: bool
    ) -> CollectiveCall:
        self._check(op, *([tensor], ()) if op == "send" else ((), [tensor]))
        self._check_rank("dst" if op == "send" else "src", peer)
        if peer == self.rank:
            raise ArgumentError(f"rank {peer} cannot {op} to itself: copy the tensor instead")
        if not isinstance(tag, int) or not 0 <= tag < 2**31:
            raise ArgumentError(f"{op} got tag {tag!r:.80}: use an integer with 0 <= tag < 2**31")
        signature = _message(op, tensor.dtype, tensor.numel(), peer, tag)
        call = CollectiveCall(
            signature, caller(), self._p2p_position, self.name, self.ranks[self.rank], blocking
        )
        self._p2p_position += 1
        self._note(call)
        if events.listening():
            emit_issue(call)
        return call

    def _started(self, work: Work, *restores: Callable[[], None] | None) -> Work | None:
        for restore in restores:
            if restore is not None:
                work.then(restore)
        if work.call.blocking:
            work.wait()
            return None
        return work

    def _check(
        self, op: str, read: Sequence[Tensor] = (), written: Sequence[Tensor] = ()
    ) -> torch.dtype:
        """The dtype that all tensors of a call have."""
        first, *_ = tensors = (*read, *written)
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise ArgumentError(f"{op} got {tensor!r:.80}; give a tensor")
            if tensor.is_nested or tensor.is_quantized:
                kind = "nested" if tensor.is_nested else "quantized"
                raise ArgumentError(
                    f"{op} got a {kind} tensor; give a dense one, such as its values"
                )
            if tensor.layout != torch.strided:
                raise ArgumentError(
                    f"{op} takes dense tensors, not {tensor.layout}: call .to_dense() first"
                )
            if tensor.dtype != first.dtype:
                raise ArgumentError(
                    f"{op} got tensors of {first.dtype} and {tensor.dtype}; use one dtype"
                )
            if tensor.device != self.device:
                raise ArgumentError(
                    f"{op} got a tensor on {tensor.device}; this group is on {self.device}"
                )
        for tensor in written:
            _check_writable(op, tensor)
        return first.dtype

    def _check_rank(self, what: str, rank: object) -> None:
        checks.rank(what, rank, self.size)

    def _check_numel(self, what: str, tensor: Tensor, numel: int, meaning: str) -> None:
        if tensor.numel() != numel:
            raise ArgumentError(
                f"{what} has {tensor.numel()} elements; it needs {meaning} = {numel}"
            )

    def _check_list(
        self, op: str, what: str, tensors: Sequence[Tensor] | None, root: int
    ) -> Sequence[Tensor]:
        """The list that only ``root`` gives; empty on other ranks."""
        given = () if tensors is None else tensors
        check_tensors(op, what, given)
        if self.rank != root and len(given):
            raise ArgumentError(f"{op}: only rank {root} gives {what}, this is rank {self.rank}")
        if self.rank == root and len(given) != self.size:
            raise ArgumentError(
                f"{op}: rank {root} must give {self.size} {what}, got {len(given) or 'none'}"
            )
        return given

    def _check_numels(self, op: str, what: str, tensors: Sequence[Tensor], like: Tensor) -> None:
        for i, tensor in enumerate(tensors):
            self._check_numel(f"{op}: {what}[{i}]", tensor, like.numel(), "tensor.numel()")

    def _check_memory(self, op: str, numel: object, dtype: object) -> int:
        """What a window or a shared tensor is made of."""
        if not isinstance(dtype, torch.dtype) or str(dtype).startswith(_QUANTIZED):
            raise ArgumentError(f"{op}: dtype is {dtype!r:.80}; give a dtype of plain numbers")
        return checks.whole(f"{op}: numel", numel)

    def _check_splits(self, what: str, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """Parts of a tensor for all ranks, in elements."""
        lengths = checks.wholes("splits", splits)
        if len(lengths) != self.size or sum(lengths) != tensor.numel():
            raise ArgumentError(
                f"splits {lengths} do not cut the {tensor.numel()} elements of {what} "
                f"for {self.size} ranks"
            )
        return lengths

    def _split_numels(self, what: str, tensor: Tensor, splits: Sequence[int] | None) -> list[int]:
        if not tensor.dim():
            raise ArgumentError(
                f"all_to_all_single: {what} has no dim 0 to cut into parts: give at least one dim"
            )
        rows = tensor.shape[0]
        if splits is None:
            if rows % self.size:
                raise ArgumentError(
                    f"all_to_all_single: {what} has {rows} rows, "
                    f"not a multiple of {self.size} ranks; "
                    f"give {what}_splits"
                )
            splits = [rows // self.size] * self.size
        lengths = checks.wholes(f"{what}_splits", splits)
        if len(lengths) != self.size or sum(lengths) != rows:
            raise ArgumentError(
                f"all_to_all_single: {what}_splits {lengths} "
                f"do not cut {rows} rows for {self.size} ranks"
            )
        row = tensor[0].numel() if rows else 0
        return [length * row for length in lengths]


@lru_cache(maxsize=4096)
def _message(op: str, dtype: torch.dtype, numel: int, peer: int, tag: int) -> CallSignature:
    """A call that a program makes in every step."""
    return CallSignature(op, dtype, (numel,), None, peer, f"tag {tag}")


def check_tensors(op: str, what: str, tensors: object) -> None:
    """Refuse what is no list of tensors; what its items are is checked later."""
    if not isinstance(tensors, list | tuple):
        raise ArgumentError(f"{op}: {what} is {tensors!r:.80}; give a list of tensors, one a rank")


def _check_writable(op: str, tensor: Tensor) -> None:
    """Refuse an output whose elements share memory, as after ``expand``."""
    if is_expanded(tensor):
        raise ArgumentError(
            f"{op} cannot write to a tensor of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}: several of its elements are one place in memory (it was "
            "expanded). Call .contiguous() on it first"
        )
