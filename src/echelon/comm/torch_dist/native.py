"""The group over an engine whose own collectives are used: NCCL, XCCL, UCC, MPI and others.

The engine decides the order of sums and the precision in which bfloat16 and float16 are
accumulated; ``"mean"`` is that of NCCL for float64, float32 and bfloat16, and elsewhere the sum of
the engine and a division. Reductions that engines do not have (uint16,
bitwise, product of complex numbers and the like) are a gather and a local reduction in rank order.
Data that is only moved travels as bytes, so every dtype works.

On CUDA, work is queued: ``wait`` orders the current stream behind it and returns at once, and
``stall_watch`` tells of ranks that do not come.
Messages between two ranks match in the order of issue, whatever their tags: NCCL has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from echelon.comm.derived import Reduce
from echelon.comm.primitives import (
    AllGather,
    AllReduce,
    Broadcast,
    Derived,
    EqualParts,
    Exchange,
    Primitive,
    Receive,
    ReduceScatter,
    Send,
)
from echelon.comm.reduce_op import divide_for_mean, reduce_into
from echelon.comm.torch_dist.engines import Engine, EngineWork, NativeEngine
from echelon.comm.torch_dist.group import GroupSpec, Lengths, TorchGroup
from echelon.comm.torch_dist.peers import PeerLost, Peers
from echelon.comm.torch_dist.signature_check import SignatureCheck
from echelon.comm.torch_dist.stall_watch import Started
from echelon.comm.work import Work
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.diagnosis.failure_record import FailureRecord
from echelon.diagnosis.stalled_calls import Stall
from echelon.errors import (
    CollectiveMismatch,
    CommError,
    CommTimeout,
    StateError,
    UnsupportedError,
)

_OPS = {
    "sum": c10d.ReduceOp.SUM,
    "mean": c10d.ReduceOp.SUM,
    "product": c10d.ReduceOp.PRODUCT,
    "min": c10d.ReduceOp.MIN,
    "max": c10d.ReduceOp.MAX,
}
# What all engines reduce themselves. For bool, "or" is a maximum and "and" a minimum of bytes.
_REDUCED = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8,
}  # fmt: skip
_AVERAGED = (torch.float64, torch.float32, torch.bfloat16)
_BOOL_OPS = {"sum": "max", "max": "max", "product": "min", "min": "min"}
_POLL_S = 0.0005
_ALL_HAVE_ISSUED = (
    "All ranks have issued all collectives of this group. So a device or the network between them "
    "does not go on, or the ranks launch the collectives of two groups in different orders."
)


@final
class NativeWork(Work):
    """The works of c10d that together carry out one call."""

    def __init__(
        self,
        call: CollectiveCall,
        works: Sequence[EngineWork],
        translate: Callable[[RuntimeError], CommError],
        others: tuple[int, ...],
    ) -> None:
        super().__init__(call)
        self._works = list(works)
        self._translate = translate
        self._others = others
        self._error: CommError | None = None

    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        return self._error is not None or all(work.is_completed() for work in self._works)

    def _wait(self, timeout: float | None) -> None:
        if self._error is not None:
            raise self._error
        if timeout is not None:
            # A timeout of the engine ends its communicator, so look instead of waiting.
            end = time.monotonic() + timeout
            while not self.done():
                if time.monotonic() > end:
                    raise CommTimeout(str(self.call), self._others, timeout)
                time.sleep(_POLL_S)
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = self._translate(error)
            raise self._error from error
        self._works = []


@final
class NativeGroup(TorchGroup):
    """Ranks whose engine has collectives of its own.

    Args:
        check_peers: compare the calls of all ranks before each collective; None: nothing does.
    """

    has_tags = False
    # NCCL's reduce needs no memory for the data of all ranks, and sends each element once.
    overrides = frozenset({Reduce})

    def __init__(
        self, spec: GroupSpec, native: NativeEngine, check_peers: Peers | None = None
    ) -> None:
        check = None if check_peers is None else SignatureCheck(check_peers, spec.ranks)
        super().__init__(spec, check)
        self._engine: Engine | None = native.engine
        self._shut_down, self._abort = native.shut_down, native.abort
        self._averages = native.averages
        self._check_peers = check_peers
        self._others = tuple(rank for rank in self.ranks if rank != spec.job.rank)
        self._watch = spec.job.stalls.join(self) if native.queues else None
        spec.job.join(self._sever, self._drop)

    def _kept_in_forks(self) -> Sequence[object]:
        return (self._engine,)

    def _use_timeout(self, seconds: float) -> None:
        raise UnsupportedError(
            f"the timeout of group {self.name!r} is that of its engine, which was started with "
            f"{self.timeout:g} s: give another one to echelon.init(timeout=…)"
        )

    def _start(self, call: CollectiveCall, operation: Primitive | Derived) -> Work:
        match operation:
            case AllReduce(tensor=tensor, op=op):
                return self._all_reduce(call, tensor, op)
            case ReduceScatter(output=output, input=input, splits=splits, op=op):
                target = operation.target(self.rank)
                work = self._reduce_scatter(call, target, input, splits, op)
                if target is not output:
                    work.then(lambda: _copy_all([output], [target]))
                return work
            case AllGather(outputs=outputs, input=input):
                return self._all_gather(call, outputs, input)
            case Broadcast(tensor=tensor, src=src):
                return self._run(call, lambda e: [e.broadcast([_bytes(tensor)], _rooted(src))])
            case Exchange():
                return self._exchange_parts(call, operation)
            case Send(tensor=tensor, dst=dst, tag=tag):
                return self._call(call, lambda e: [e.send([_bytes(tensor)], dst, tag)])
            case Receive(tensor=tensor, src=src, tag=tag):
                return self._call(call, lambda e: [e.recv([_bytes(tensor)], src, tag)])
            case Reduce(tensor=tensor, dst=dst, op=op):
                return self._reduce(call, tensor, dst, op)
            case _:
                raise NotImplementedError(f"{operation!r} is no collective that it has")

    # Reductions ------------------------------------------------------------------------------

    def _all_reduce(self, call: CollectiveCall, tensor: Tensor, op: str) -> Work:
        view = _reducible(tensor, op)
        if view is None:
            return self._gather_and_reduce(call, tensor, op, [tensor])
        options = c10d.AllreduceOptions()
        options.reduceOp = self._engine_op(tensor, op)
        work = self._run(call, lambda engine: [engine.allreduce([view], options)])
        return self._divided(work, tensor, op)

    def _reduce_scatter(
        self, call: CollectiveCall, output: Tensor, input: Tensor, splits: list[int], op: str
    ) -> Work:
        is_even = splits.count(splits[0]) == len(splits)
        if not is_even and _reducible(output, op) is not None and _pads_little(splits):
            longest = max(splits)
            equal, part = _padded(input, splits), input.new_empty(longest)
            work = self._reduce_scatter(call, part, equal, [longest] * self.size, op)
            work.then(lambda: _copy_all([output], [part[: output.numel()]]))
            return work
        out_view, in_view = _reducible(output, op), _reducible(input, op)
        if out_view is None or in_view is None or not is_even:
            numel = output.numel()
            parts = output.new_empty(self.size * numel)
            work = self._exchange(call, parts, input, [numel] * self.size, splits)
            rows = EqualParts(parts, self.size)
            if numel:
                work.then(lambda: reduce_into([output], rows, op))
            return work
        options = c10d.ReduceScatterOptions()
        options.reduceOp = self._engine_op(output, op)
        work = self._run(
            call, lambda engine: [engine._reduce_scatter_base(out_view, in_view, options)]
        )
        return self._divided(work, output, op)

    def _reduce(self, call: CollectiveCall, tensor: Tensor, dst: int, op: str) -> Work:
        view = _reducible(tensor, op)
        if view is None:
            return self._gather_and_reduce(call, tensor, op, [tensor] if self.rank == dst else [])
        # Engines may use the tensors of the other ranks as scratch memory, so those give a copy.
        buffer = view if self.rank == dst else view.clone()
        options = c10d.ReduceOptions()
        options.reduceOp = self._engine_op(tensor, op)
        options.rootRank = dst
        work = self._run(call, lambda engine: [engine.reduce([buffer], options)])
        return self._divided(work, tensor, op) if self.rank == dst else work

    def _gather_and_reduce(
        self, call: CollectiveCall, tensor: Tensor, op: str, outputs: list[Tensor]
    ) -> Work:
        everyone = tensor.new_empty(self.size * tensor.numel())
        work = self._gather_flat(call, everyone, tensor)
        rows = EqualParts(everyone, self.size)
        if outputs:
            work.then(lambda: reduce_into(outputs, rows, op))
        return work

    def _engine_averages(self, tensor: Tensor, op: str) -> bool:
        return op == "mean" and self._averages and tensor.dtype in _AVERAGED

    def _engine_op(self, tensor: Tensor, op: str) -> c10d.ReduceOp:
        if self._engine_averages(tensor, op):
            return c10d.ReduceOp(c10d.ReduceOp.AVG)
        return c10d.ReduceOp(_OPS[_BOOL_OPS[op] if tensor.dtype == torch.bool else op])

    def _divided(self, work: Work, tensor: Tensor, op: str) -> Work:
        """``work``, after which a mean that the engine has only summed is divided."""
        if op == "mean" and not self._engine_averages(tensor, op):
            work.then(lambda: divide_for_mean(tensor, self.size))
        return work

    # Movement --------------------------------------------------------------------------------

    def _all_gather(self, call: CollectiveCall, outputs: Sequence[Tensor], input: Tensor) -> Work:
        if isinstance(outputs, EqualParts):
            return self._gather_flat(call, outputs.flat, input)
        if len({output.numel() for output in outputs}) > 1:
            return self._gather_uneven(call, outputs, input)
        flat = _joined(outputs)
        if flat is not None:
            return self._gather_flat(call, flat, input)
        everyone = input.new_empty(self.size * input.numel())
        work = self._gather_flat(call, everyone, input)
        work.then(lambda: _copy_all(outputs, EqualParts(everyone, self.size)))
        return work

    def _gather_flat(self, call: CollectiveCall, output: Tensor, input: Tensor) -> Work:
        options = c10d.AllgatherOptions()
        return self._run(
            call,
            lambda engine: [engine._allgather_base(_bytes(output), _bytes(input), options)],
        )

    # Engines have no collectives for parts of unequal lengths. If padding takes little, all parts
    # are sent as long as the longest; else, as where one rank has everything, each rank broadcasts.
    def _gather_uneven(
        self, call: CollectiveCall, outputs: Sequence[Tensor], input: Tensor
    ) -> Work:
        lengths = [output.numel() for output in outputs]
        if _pads_little(lengths):
            longest = max(lengths)
            everyone, part = input.new_empty(self.size * longest), input.new_zeros(longest)
            part[: input.numel()].copy_(input)
            work = self._gather_flat(call, everyone, part)
            rows = zip(EqualParts(everyone, self.size), lengths, strict=True)
            targets, parts = [*map(_bytes, outputs)], [_bytes(row[:numel]) for row, numel in rows]
            work.then(lambda: torch._foreach_copy_(targets, parts))
            return work
        if outputs[self.rank].data_ptr() != input.data_ptr():
            outputs[self.rank].copy_(input)

        def start(engine: Engine) -> list[EngineWork]:
            return [
                engine.broadcast([_bytes(output)], _rooted(rank))
                for rank, output in enumerate(outputs)
                if output.numel()
            ]

        return self._run(call, start)

    def _exchange_parts(self, call: CollectiveCall, operation: Exchange) -> Work:
        """Send ``inputs[r]`` to rank ``r`` and receive ``outputs[r]`` from it."""
        outputs, inputs = operation.outputs, operation.inputs
        ins, outs = [part.numel() for part in inputs], [part.numel() for part in outputs]
        source = _joined(inputs)
        source = torch.cat(list(inputs)) if source is None else source
        target = _joined(outputs)
        if target is not None:
            return self._exchange(call, target, source, outs, ins)
        buffer = source.new_empty(sum(outs))
        work = self._exchange(call, buffer, source, outs, ins)
        work.then(lambda: _copy_all(outputs, buffer.split(outs)))
        return work

    def _exchange(
        self, call: CollectiveCall, output: Tensor, input: Tensor, outs: list[int], ins: list[int]
    ) -> Work:
        options = c10d.AllToAllOptions()
        width = input.itemsize
        return self._run(
            call,
            lambda engine: [
                engine.alltoall_base(
                    _bytes(output),
                    _bytes(input),
                    [count * width for count in outs],
                    [count * width for count in ins],
                    options,
                )
            ],
            (ins, outs) if call.signature.op == "all_to_all_single" else None,
        )

    # Parts of the above ----------------------------------------------------------------------

    def _run(
        self,
        call: CollectiveCall,
        start: Callable[[Engine], list[EngineWork]],
        lengths: Lengths | None = None,
    ) -> Work:
        """Issue a collective, after the check of the calls if there is one."""
        self._synchronize(call, lengths)
        return self._call(call, start)

    def _call(self, call: CollectiveCall, start: Callable[[Engine], list[EngineWork]]) -> Work:
        self._job.check()
        start_s = time.monotonic()

        def translate(error: RuntimeError) -> CommError:
            seconds = time.monotonic() - start_s
            late = seconds >= self.timeout or "imed out" in str(error)
            return self._diagnose(call, PeerLost((), late), start_s)

        if self._engine is None:
            raise StateError(f"{call} was issued after its world was closed")
        try:
            works = start(self._engine)
        except RuntimeError as error:
            raise translate(error) from error
        if self._watch is not None:
            self._watch(call, works)
        return NativeWork(call, works, translate, self._others)

    def _synchronize(self, call: CollectiveCall, lengths: Lengths | None = None) -> None:
        self._job.check()
        if self._agreement is None:
            return
        start_s = time.monotonic()
        try:
            self._agreement.check(call, lengths)
        except PeerLost as lost:
            raise self._diagnose(call, lost, start_s, lengths) from lost.__cause__

    # Failures --------------------------------------------------------------------------------

    def end_stall(self, started: Started, stall: Stall) -> None:
        """Have this rank fail, because its device waits for others; see ``stall_watch``."""
        call, seconds = started.call, time.monotonic() - started.start_s
        peer = call.signature.root if call.signature.op in ("send", "recv") else None
        missing = stall.missing + stall.silent
        if stall.call is None and peer is not None:
            missing = (self.ranks[peer],)
        report = FailureRecord.of_call(call, late=True, missing=missing, seconds=seconds)
        what, others = str(call), ""
        if stall.call is not None:
            what = f"{stall.call.signature} (#{stall.call.position} of group {self.name!r}) at "
            what += stall.call.place
        elif peer is None:
            others = _ALL_HAVE_ISSUED
        error: CommError = CommTimeout(what, missing, seconds, others)
        if stall.call is not None and stall.different:
            error = CollectiveMismatch(self.name, stall.call.position, stall.different)
        self._job.give_up(error, report)

    def look(self, started: Started) -> None:
        """Have this rank fail if another one of the group has."""
        try:
            self._job.look(self.ranks)
        except PeerLost as lost:
            self._diagnose(started.call, lost, started.start_s)

    def _sever(self) -> None:
        if self._check_peers is not None:
            self._check_peers.sever()
        self._abort()

    def _drop(self, failed: bool) -> None:
        self._engine = None
        if self._check_peers is not None:
            self._check_peers.close()
        self._shut_down(failed)


def _reducible(tensor: Tensor, op: str) -> Tensor | None:
    """A view of ``tensor`` that engines can reduce with ``op``, or None."""
    if op not in _OPS:
        return None
    if tensor.is_complex():
        return torch.view_as_real(tensor).view(-1) if op in ("sum", "mean") else None
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    return tensor if tensor.dtype in _REDUCED else None


def _rooted(rank: int) -> c10d.BroadcastOptions:
    options = c10d.BroadcastOptions()
    options.rootRank = rank
    return options


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _pads_little(lengths: Sequence[int]) -> bool:
    """Whether parts of these lengths, all as long as the longest, take at most twice the memory."""
    return max(lengths) * len(lengths) <= 2 * sum(lengths)


def _padded(flat: Tensor, lengths: Sequence[int]) -> Tensor:
    """The parts of ``flat``, all as long as the longest by zeros behind them, end to end."""
    padded = flat.new_zeros(len(lengths), max(lengths))
    targets = [row[:numel] for row, numel in zip(padded.unbind(0), lengths, strict=True)]
    torch._foreach_copy_(targets, flat.split(list(lengths)))
    return padded.view(-1)


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """``parts`` as one 1D tensor, if they lie end to end in one storage."""
    full = [part for part in parts if part.numel()]
    if not full:
        return parts[0]
    end = full[0].storage_offset()
    for part in full:
        if part.untyped_storage().data_ptr() != full[0].untyped_storage().data_ptr():
            return None
        if part.storage_offset() != end:
            return None
        end += part.numel()
    first = full[0]
    return first.as_strided((end - first.storage_offset(),), (1,), first.storage_offset())


def _copy_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    for output, input in zip(outputs, inputs, strict=True):
        output.copy_(input)
