"""A group of this library in the shape of a process group of c10d.

[Note: a process group in Python] c10d dispatches its collectives to a C++ ``Backend`` that Python
cannot subclass (torch 2.13), but a creator may return a whole ``ProcessGroup``, which it can. C++
code (DDP's reducer, functional collectives) reaches such a group through trampolines, and
``torch.distributed`` calls it by name. So it takes the place of all backends of a process group and
cannot share one with NCCL, as in ``"cpu:echelon,cuda:nccl"``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from echelon.c10d.dist_work import C10dWork, ReceiveFromAny
from echelon.c10d.translate import C10dOptions, copy_all, joined, reduction, seconds_of
from echelon.comm.shm import ShmGroup, connect
from echelon.comm.work import Work
from echelon.errors import ArgumentError, StateError, UnsupportedError

BACKEND = "echelon"

# C++ always passes options; who calls a process group from Python may leave them out.
_ALL_REDUCE = c10d.AllreduceOptions()
_ALL_REDUCE_COALESCED = c10d.AllreduceCoalescedOptions()
_REDUCE = c10d.ReduceOptions()
_REDUCE_SCATTER = c10d.ReduceScatterOptions()
_BROADCAST = c10d.BroadcastOptions()
_ALL_GATHER = c10d.AllgatherOptions()
_GATHER = c10d.GatherOptions()
_SCATTER = c10d.ScatterOptions()
_ALL_TO_ALL = c10d.AllToAllOptions()
_BARRIER = c10d.BarrierOptions()

# Issues an operation: in the background, giving its work; or up to its end, giving None.
_Call: TypeAlias = Callable[[bool], Work | None]


class _NoBackendError(UnsupportedError, RuntimeError):
    """There is no backend for a device; c10d asks for some and expects a ``RuntimeError``."""


@final
class ProcessGroupEchelon(dist.ProcessGroup):
    """A group of this library in the shape of a process group of c10d.

    Collectives that c10d asks for asynchronously run in the background, the others on the caller's
    thread. Reductions run in rank order, so results are bitwise equal on all ranks.

    Args:
        group: does the work; closed with this process group.
        store: of c10d, for the ranks of this group.
    """

    def __init__(self, group: ShmGroup, store: c10d.Store) -> None:
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]  # as trampolines need it
        self._group = group
        self._store = store
        self._name: str | None = None
        self._num_issued = 0
        self._kept: set[C10dWork] = set()

    # What c10d wants to know -----------------------------------------------------------------

    def getBackendName(self) -> str:
        """The name under which the backend is registered."""
        return BACKEND

    def getGroupName(self) -> str:
        """The name that c10d gave to this process group."""
        if self._name is None:
            raise StateError("this process group has no name yet; torch.distributed gives it one")
        return self._name

    def setGroupName(self, name: str) -> None:
        """Take the name that c10d gives."""
        self._name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    @property
    def _device_types(self) -> list[torch.device]:
        return [self._group.device]

    def _get_backend(  # type: ignore[override]
        self, device: torch.device
    ) -> ProcessGroupEchelon:
        """The backend for a device: this process group is its own."""
        if torch.device(device) != self._group.device:
            raise _NoBackendError(
                f"the backend {BACKEND!r} communicates tensors on {self._group.device}, not on "
                f"{device}: make another process group for those"
            )
        return self

    @property
    def supports_coalescing(self) -> bool:
        """Whether c10d may bracket calls to issue them as one; nothing is gained from it here."""
        return False

    def get_group_store(self) -> c10d.Store:
        """The store of the ranks of this process group."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._num_issued

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a rank waits for the others by default."""
        self._group.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """End communication in good order; c10d calls it when the process group is destroyed."""
        self._kept.clear()
        self._group.close()

    def abort(self) -> None:
        """End communication at once, and let ranks that wait for this one fail."""
        self._kept.clear()
        self._group.close("aborted its process group")

    def _issue(
        self,
        options: C10dOptions,
        result: Sequence[Tensor],
        calls: Sequence[_Call],
        finish: Callable[[], None] | None = None,
    ) -> dist.Work:
        """Issue ``calls``, and wait for them where c10d wants that."""
        self._num_issued += 1
        seconds = seconds_of(options.timeout)
        in_background = options.asyncOp or seconds is not None
        parts = [part for part in [call(in_background) for call in calls] if part is not None]
        work = C10dWork(parts, result, finish, seconds, kept=self._kept)
        if not options.asyncOp:
            work.wait()
        return work

    # Reductions ------------------------------------------------------------------------------

    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor] | Tensor, opts: c10d.AllreduceOptions = _ALL_REDUCE
    ) -> dist.Work:
        """Replace each tensor by its reduction over all ranks."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        for tensor in tensors:
            if tensor.layout != torch.strided:
                raise UnsupportedError(
                    f"all_reduce of {tensor.layout} tensors: the backend {BACKEND!r} reduces dense "
                    "ones; call .to_dense(), or build the layer without sparse=True"
                )
        op, sources = reduction(opts.reduceOp, tensors)
        calls = [partial(self._group.all_reduce, source, op) for source in sources]
        return self._issue(opts, tensors, calls, partial(copy_all, tensors, sources))

    def allreduce_coalesced(
        self,
        tensors: Sequence[Tensor],
        opts: c10d.AllreduceCoalescedOptions = _ALL_REDUCE_COALESCED,
    ) -> dist.Work:
        """The same for many small tensors: those of one dtype travel as one."""
        op, sources = reduction(opts.reduceOp, tensors)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, source in enumerate(sources):
            by_dtype.setdefault(source.dtype, []).append(i)
        buffers = [joined([sources[i] for i in places]) for places in by_dtype.values()]

        def finish() -> None:
            for buffer, places in zip(buffers, by_dtype.values(), strict=True):
                targets = [tensors[i] for i in places]
                copy_all(targets, buffer.split([target.numel() for target in targets]))

        calls = [partial(self._group.all_reduce, buffer, op) for buffer in buffers]
        return self._issue(opts, tensors, calls, finish)

    def reduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor], opts: c10d.ReduceOptions = _REDUCE
    ) -> dist.Work:
        """Replace each tensor of one rank by its reduction over all ranks."""
        op, sources = reduction(opts.reduceOp, tensors)
        calls = [partial(self._group.reduce, source, opts.rootRank, op) for source in sources]
        is_root = self._group.rank == opts.rootRank
        finish = partial(copy_all, tensors, sources) if is_root else None
        return self._issue(opts, tensors, calls, finish)

    def reduce_scatter(  # type: ignore[override]
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        opts: c10d.ReduceScatterOptions = _REDUCE_SCATTER,
    ) -> dist.Work:
        """Reduce a list of one tensor per rank and leave this rank's; lengths may differ."""
        group = self._group
        calls: list[_Call] = []
        for output, of_ranks in zip(outputs, inputs, strict=True):
            if len(of_ranks) != group.size:
                raise ArgumentError(
                    f"reduce_scatter got {len(of_ranks)} inputs for {group.size} ranks"
                )
            op, parts = reduction(opts.reduceOp, of_ranks)
            if len({part.numel() for part in parts}) == 1:
                calls.append(partial(group.reduce_scatter_single, output, joined(parts), op))
                continue
            copy_all([output], [parts[group.rank]])
            parts[group.rank] = output
            calls += [partial(group.reduce, part, dst, op) for dst, part in enumerate(parts)]
        return self._issue(opts, outputs, calls)

    def reduce_scatter_single(  # type: ignore[override]
        self, output: Tensor, input: Tensor, opts: c10d.ReduceScatterOptions = _REDUCE_SCATTER
    ) -> dist.Work:
        """Reduce one tensor and leave this rank's part of it."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(  # type: ignore[override]
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: c10d.ReduceScatterOptions = _REDUCE_SCATTER,
    ) -> dist.Work:
        """The same for many tensors."""
        op, sources = reduction(opts.reduceOp, inputs)
        calls = [
            partial(self._group.reduce_scatter_single, output, source, op)
            for output, source in zip(outputs, sources, strict=True)
        ]
        return self._issue(opts, outputs, calls)

    # Copies ----------------------------------------------------------------------------------

    def broadcast(  # type: ignore[override]
        self, tensors: Sequence[Tensor], opts: c10d.BroadcastOptions = _BROADCAST
    ) -> dist.Work:
        """Copy each tensor of one rank to all ranks."""
        calls = [partial(self._group.broadcast, tensor, opts.rootRank) for tensor in tensors]
        return self._issue(opts, tensors, calls)

    def allgather(  # type: ignore[override]
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: c10d.AllgatherOptions = _ALL_GATHER,
    ) -> dist.Work:
        """Copy the tensor of each rank into a list of one tensor per rank; lengths may differ."""
        calls = [
            partial(self._group.all_gather, of_ranks, input)
            for of_ranks, input in zip(outputs, inputs, strict=True)
        ]
        return self._issue(opts, [part for of_ranks in outputs for part in of_ranks], calls)

    def allgather_coalesced(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: c10d.AllgatherOptions = _ALL_GATHER,
    ) -> dist.Work:
        """The same for many tensors: for each rank a list of all of them."""
        lengths = [len(of_rank) for of_rank in outputs]
        if lengths != [len(inputs)] * self._group.size:
            raise ArgumentError(
                f"all_gather_coalesced of {len(inputs)} tensors over {self._group.size} ranks got "
                f"output lists of lengths {lengths}"
            )
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: c10d.AllgatherOptions = _ALL_GATHER
    ) -> dist.Work:
        """Put the tensors of all ranks end to end into one."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: c10d.AllgatherOptions = _ALL_GATHER,
    ) -> dist.Work:
        """The same for many tensors."""
        calls = [
            partial(self._group.all_gather_single, output, input)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._issue(opts, outputs, calls)

    def gather(  # type: ignore[override]
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: c10d.GatherOptions = _GATHER,
    ) -> dist.Work:
        """Copy the tensor of each rank into a list of one rank."""
        (input,) = inputs
        parts = outputs[0] if outputs else None
        call = partial(self._group.gather, input, parts, opts.rootRank)
        return self._issue(opts, parts or [], [call])

    def scatter(  # type: ignore[override]
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        opts: c10d.ScatterOptions = _SCATTER,
    ) -> dist.Work:
        """Copy a list of one rank to the tensor of each rank."""
        (output,) = outputs
        parts = inputs[0] if inputs else None
        call = partial(self._group.scatter, output, parts, opts.rootRank)
        return self._issue(opts, outputs, [call])

    def all_to_all_single(  # type: ignore[override]
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: c10d.AllToAllOptions = _ALL_TO_ALL,
    ) -> dist.Work:
        """Send rows of a tensor to each rank and receive rows from each; no splits: equal ones."""
        splits = (output_splits or None, input_splits or None)
        call = partial(self._group.all_to_all_single, output, input, *splits)
        return self._issue(opts, [output], [call])

    def alltoall(  # type: ignore[override]
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: c10d.AllToAllOptions = _ALL_TO_ALL,
    ) -> dist.Work:
        """Send a tensor to each rank and receive one from each."""
        received = joined(outputs)
        lengths = [tensor.numel() for tensor in outputs]
        call = partial(
            self._group.all_to_all_single,
            received,
            joined(inputs),
            lengths,
            [tensor.numel() for tensor in inputs],
        )
        finish = partial(copy_all, outputs, received.split(lengths))
        return self._issue(opts, outputs, [call], finish)

    def barrier(  # type: ignore[override]
        self, opts: c10d.BarrierOptions = _BARRIER
    ) -> dist.Work:
        """Return when all ranks of the group have called it."""
        return self._issue(opts, [], [self._group.barrier])

    # Point to point --------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> dist.Work:
        """Start to send a tensor."""
        parts = [self._group.isend(tensor, dst, tag) for tensor in tensors]
        return C10dWork(parts, tensors, kept=self._kept)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> dist.Work:
        """Start to receive a tensor."""
        parts = [self._group.irecv(tensor, src, tag) for tensor in tensors]
        return C10dWork(parts, tensors, kept=self._kept, source=lambda: src)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        """Start to receive a tensor from whichever rank sends one."""
        (tensor,) = tensors
        part = ReceiveFromAny(self._group, tensor, tag)
        return C10dWork([part], tensors, kept=self._kept, source=lambda: part.source)

    # torch 2.11 calls these by their former names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


def _create(options: c10d._DistributedBackendOptions, _: object) -> ProcessGroupEchelon:
    """Connect the ranks of a new process group; c10d calls it on each of them."""
    group = connect(
        options.group_rank,
        options.group_size,
        options.store,
        timeout=options.timeout.total_seconds(),
        name=f"c10d {options.group_id}",
    )
    return ProcessGroupEchelon(group, options.store)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
