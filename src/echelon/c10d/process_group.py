"""A group of this library in the shape of a process group of c10d."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from echelon.c10d.connection import Connection, connect, of_processes
from echelon.c10d.dist_work import C10dWork, ReceiveFromAny, is_in_callback, wait_for_all
from echelon.c10d.monitored_barrier import MonitoredBarrier
from echelon.c10d.named_process_group import BACKEND, NamedProcessGroup
from echelon.c10d.sparse_reduction import SparseAllReduce
from echelon.c10d.translate import (
    INTEGERS,
    C10dOptions,
    copy_all,
    divide_integers,
    joined,
    joined_by_dtype,
    reduction,
    seconds_of,
)
from echelon.comm.compiler_bypass import bypass_compiler
from echelon.comm.profiler_spans import NO_SPAN, caller_span, profiler_runs
from echelon.comm.work import Work
from echelon.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from echelon.comm.shm import ShmGroup

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

# What the profiler shows of a call: the name of the operation, and the tensors that go into it.
_Shown: TypeAlias = tuple[str, Sequence[Tensor]]


@final
@bypass_compiler
class ProcessGroupEchelon(NamedProcessGroup):
    """A group of this library in the shape of a process group of c10d.

    Collectives that c10d asks for asynchronously run in the background, the others on the caller's
    thread. Reductions run in rank order, so results are bitwise equal on all ranks.

    Args:
        connection: the group that does the work, or how it is reached; closed with this process
            group.
        store: of c10d, for the ranks of this group.
    """

    def __init__(self, connection: Connection | ShmGroup, store: c10d.Store) -> None:
        if not isinstance(connection, Connection):
            connection = of_processes(connection)
        super().__init__(connection.group, store)
        self._connection = connection
        self._barriers = MonitoredBarrier(store, connection)
        self._num_issued = 0
        self._kept: set[C10dWork] = set()
        self._batch_scope = ExitStack()  # of the batch that is being issued, until it ends
        self._num_in_batch = 0  # messages of it that are still to come
        self._batch: list[Work] = []
        self._coalesced: list[C10dWork] | None = None  # works since ``_start_coalescing``

    def _get_sequence_number_for_group(self) -> int:
        return self._num_issued

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a rank waits for the others by default."""
        self._group.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """End communication in good order; c10d calls it when the process group is destroyed."""
        self._kept.clear()
        self._connection.close(None)

    def abort(self) -> None:
        """End communication at once, and let ranks that wait for this one fail."""
        self._kept.clear()
        self._connection.close("aborted its process group")

    def _issue(
        self,
        shown: _Shown,
        options: C10dOptions,
        result: Sequence[Tensor],
        calls: Sequence[_Call],
        finish: Callable[[], None] | None = None,
    ) -> dist.Work:
        """Issue ``calls``, and wait for them where c10d wants that.

        Raises:
            UnsupportedError: a callback of a future issues them.
        """
        if is_in_callback():
            raise UnsupportedError(
                f"a callback of a future issued {shown[0]} of group {self._group.name!r}, beside "
                "the program's own calls, so ranks would issue them in different orders. The "
                "PowerSGD hooks of PyTorch do that, and are for NCCL, whose callbacks run in the "
                "order of calls: run them with --world threads, which does the same"
            )
        self._num_issued += 1
        self._end_batch()
        seconds = seconds_of(options.timeout)
        in_background = options.asyncOp or seconds is not None
        with self._span(shown):
            parts = [part for part in [call(in_background) for call in calls] if part is not None]
            work = self._work(parts, result, finish, seconds)
            if not options.asyncOp:
                work.wait()
            return work

    def _span(self, shown: _Shown) -> AbstractContextManager[None]:
        """The span of a call in the profiler, if one runs."""
        return caller_span(*shown, self._group.name) if profiler_runs() else NO_SPAN

    def _work(
        self,
        parts: list[Work],
        result: Sequence[Tensor],
        finish: Callable[[], None] | None = None,
        seconds: float | None = None,
        source: Callable[[], int] = lambda: -1,
    ) -> C10dWork:
        work = C10dWork(
            parts,
            result,
            finish,
            seconds,
            source=source,
            kept=self._kept,
            connection=self._connection,
        )
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # Reductions ------------------------------------------------------------------------------

    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor] | Tensor, opts: c10d.AllreduceOptions = _ALL_REDUCE
    ) -> dist.Work:
        """Replace each tensor by its reduction over all ranks."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        if any(tensor.layout != torch.strided for tensor in tensors):
            return self._all_reduce_sparse(tensors, opts)
        op, sources = reduction(opts.reduceOp, tensors)
        finish = partial(copy_all, tensors, sources)
        if op == "mean" and all(tensor.dtype in INTEGERS for tensor in tensors):
            op, finish = "sum", partial(divide_integers, tensors, self._group.size)
        calls = [partial(self._group.all_reduce, source, op) for source in sources]
        return self._issue(("all_reduce", tensors), opts, tensors, calls, finish)

    def _all_reduce_sparse(
        self, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions
    ) -> dist.Work:
        op, _ = reduction(opts.reduceOp, [])
        calls = [SparseAllReduce(self._group, tensor, op).run for tensor in tensors]
        return self._issue(("all_reduce", tensors), opts, tensors, calls)

    allreduce_sparse = allreduce  # by which C++ calls it

    def allreduce_coalesced(
        self,
        tensors: Sequence[Tensor],
        opts: c10d.AllreduceCoalescedOptions = _ALL_REDUCE_COALESCED,
    ) -> dist.Work:
        """The same for many small tensors: those of one dtype travel as one."""
        op, sources = reduction(opts.reduceOp, tensors)
        buffers, finish = joined_by_dtype(tensors, sources)
        calls = [partial(self._group.all_reduce, buffer, op) for buffer in buffers]
        return self._issue(("all_reduce", tensors), opts, tensors, calls, finish)

    def reduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor], opts: c10d.ReduceOptions = _REDUCE
    ) -> dist.Work:
        """Replace each tensor of one rank by its reduction over all ranks."""
        op, sources = reduction(opts.reduceOp, tensors)
        calls = [partial(self._group.reduce, source, opts.rootRank, op) for source in sources]
        is_root = self._group.rank == opts.rootRank
        finish = partial(copy_all, tensors, sources) if is_root else None
        return self._issue(("reduce", tensors), opts, tensors, calls, finish)

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
        shown = ("reduce_scatter", [part for of_ranks in inputs for part in of_ranks])
        return self._issue(shown, opts, outputs, calls)

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
        return self._issue(("reduce_scatter_single", inputs), opts, outputs, calls)

    # Copies ----------------------------------------------------------------------------------

    def broadcast(  # type: ignore[override]
        self, tensors: Sequence[Tensor], opts: c10d.BroadcastOptions = _BROADCAST
    ) -> dist.Work:
        """Copy each tensor of one rank to all ranks."""
        calls = [partial(self._group.broadcast, tensor, opts.rootRank) for tensor in tensors]
        return self._issue(("broadcast", tensors), opts, tensors, calls)

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
        results = [part for of_ranks in outputs for part in of_ranks]
        return self._issue(("all_gather", inputs), opts, results, calls)

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
        return self._issue(("all_gather_single", inputs), opts, outputs, calls)

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
        return self._issue(("gather", inputs), opts, parts or [], [call])

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
        return self._issue(("scatter", parts or []), opts, outputs, [call])

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
        return self._issue(("all_to_all_single", [input]), opts, [output], [call])

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
        return self._issue(("all_to_all_single", inputs), opts, outputs, [call], finish)

    def barrier(  # type: ignore[override]
        self, opts: c10d.BarrierOptions = _BARRIER
    ) -> dist.Work:
        """Return when all ranks of the group have called it."""
        return self._issue(("barrier", []), opts, [], [self._group.barrier])

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when all ranks have called it; rank 0 says which do not come in time."""
        if timeout is distributed_c10d.default_pg_timeout:  # torch's, if the program gives none
            timeout = None
        self._barriers.wait(timeout, wait_all_ranks)

    # Point to point --------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> dist.Work:
        """Start to send a tensor."""
        with self._span(("send", tensors)), self._in_batch():
            parts = [self._group.isend(tensor, dst, tag) for tensor in tensors]
            return self._work(self._parts_of_batch(parts), tensors)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> dist.Work:
        """Start to receive a tensor."""
        with self._span(("recv", tensors)), self._in_batch():
            parts = [self._group.irecv(tensor, src, tag) for tensor in tensors]
            return self._work(self._parts_of_batch(parts), tensors, source=lambda: src)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        """Start to receive a tensor from whichever rank sends one."""
        if not self._group.has_tags:
            raise UnsupportedError("NCCL cannot receive from any rank: give recv the rank as src")
        (tensor,) = tensors
        part = ReceiveFromAny(self._connection, tensor, tag)
        return self._work([part], tensors, source=lambda: part.source)

    def begin_batch(self, num_messages: int) -> None:
        """Let so many messages that follow be one operation, as NCCL has it."""
        self._end_batch()
        # Where one work of a batch was waited for, nobody may ask for the others.
        self._kept.difference_update([work for work in self._kept if not work.is_under_way()])
        self._num_in_batch, self._batch = num_messages, []
        self._batch_scope.enter_context(self._connection.batch())

    @contextmanager
    def _in_batch(self) -> Iterator[None]:
        """Issue a message in the body, which may be the last of a batch, or fail."""
        try:
            yield
        except Exception:
            self._end_batch()
            raise
        if self._num_in_batch:
            self._num_in_batch -= 1
            if not self._num_in_batch:
                self._end_batch()

    def _start_coalescing(self, device: torch.device) -> None:
        """Let what follows be one operation, until ``_end_coalescing``."""
        self.begin_batch(sys.maxsize)
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """One work that waits for all works since ``_start_coalescing``."""
        works, self._coalesced = self._coalesced or [], None
        self._end_batch()
        results = [tensor for work in works for tensor in work.result()]
        return self._work([], results, partial(wait_for_all, works))

    def _end_batch(self) -> None:
        self._num_in_batch = 0
        self._batch_scope.close()

    def _parts_of_batch(self, parts: list[Work]) -> list[Work]:
        """What the work of a message waits for: where a batch is one operation, for all of it."""
        if self._group.has_tags or not self._num_in_batch:
            return parts
        self._batch += parts
        return self._batch

    # torch 2.11 calls these by their former names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


def _create(
    options: c10d._DistributedBackendOptions, is_beside_nccl: object
) -> ProcessGroupEchelon:
    """Connect the ranks of a new process group; c10d calls it on each of them."""
    connection = connect(options, is_beside_nccl=is_beside_nccl is True)
    return ProcessGroupEchelon(connection, options.store)


_check_p2p_op_list = vars(distributed_c10d)["_check_p2p_op_list"]


@wraps(_check_p2p_op_list)
def check_p2p_op_list(p2p_op_list: list[dist.P2POp]) -> None:
    """Check a batch of messages as torch does, and let it be one operation of our group.

    ``batch_isend_irecv`` calls it first, under whatever name the program has imported that.
    """
    _check_p2p_op_list(p2p_op_list)
    group = p2p_op_list[0].group
    group = distributed_c10d._get_default_group() if group is None else group
    if isinstance(group, ProcessGroupEchelon):
        group.begin_batch(len(p2p_op_list))


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
