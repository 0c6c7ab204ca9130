"""Process groups as devices have them: collectives are work of a stream of their communicator.

A collective begins after what was issued on the current stream, and ``Work.wait`` lets the current
stream wait for it, not the host. The first one of a group waits on the host until all ranks have
come, as NCCL makes its communicator then. Values travel over gloo, from and to the memory of the
device. Tensors of the CPU go to gloo directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any, NamedTuple, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.utils._pytree import tree_leaves, tree_map_only

from echelon.comm.streams import device_of
from echelon.errors import StateError
from echelon.process.background_threads import run_in_background
from echelon.testing.device import torch_module
from echelon.testing.device.native import device_library

NAME = "simccl"


def register_backend() -> None:
    """Let ``init_process_group`` use the simulated groups for the device."""
    dist.Backend.register_backend(
        NAME, _backend, extended_api=False, devices=[torch_module.DEVICE, "cpu"]
    )


def _backend(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Any:
    group = SimulatedGroup(c10d.ProcessGroupGloo(store, rank, size, timeout), rank, size)
    return device_library().backend_of(NAME, rank, size, group)


class Work(Protocol):
    """What was issued: one of ``dist``, or one whose methods its calls are passed on to."""

    def wait(self) -> bool: ...

    def is_completed(self) -> bool: ...


@final
class StreamWork:
    """A collective that streams wait for.

    Until somebody does, it holds its inputs, as NCCL's works do: they may be dropped before.
    """

    def __init__(
        self,
        event: torch.Event,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        stream: torch.Stream,
    ) -> None:
        self._event, self._inputs, self._outputs = event, list(inputs), list(outputs)
        with stream:
            self._future: torch.futures.Future[Any] = torch.futures.Future(
                devices=[torch.device(torch_module.DEVICE, torch_module.current_device())]
            )
            self._future.set_result(self._outputs)

    def wait(self) -> bool:
        torch.accelerator.current_stream().wait_event(self._event)
        self._inputs.clear()
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


@final
class _Coalesced:
    """Several collectives."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


@final
class SimulatedGroup:
    """The ranks of a group, each with a stream for its collectives.

    Args:
        engine: carries the values, in memory of the host: gloo, or torch's ``fake`` in tests.
    """

    def __init__(self, engine: Any, rank: int, size: int) -> None:
        self._rank, self._size, self._engine = rank, size, engine
        self._stream = torch.Stream(torch_module.DEVICE)
        self._coalesced: list[_Issued] | None = None
        self._has_met = False

    def _meet(self) -> None:
        """Wait on the host for all ranks, as the first collective of a communicator does.

        Raises:
            StateError: some have not come within the time-out of the group.
        """
        if self._has_met:
            return
        try:
            self._engine.barrier(c10d.BarrierOptions()).wait()
        except RuntimeError as error:
            raise StateError(
                "the first collective of a group waits for all of its ranks, as NCCL does, and "
                "some did not come: ranks that use two groups for the first time in different "
                "orders wait for one another"
            ) from error
        self._has_met = True

    def _issue(
        self,
        method: str,
        args: Sequence[Any],
        reads: Any,
        writes: Any,
        *,
        after: Callable[[list[Tensor]], None] | None = None,
    ) -> Work:
        outputs = tree_leaves(writes)
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if any(device_of(tensor.device).is_host for tensor in tensors):
            work: Work = getattr(self._engine, method)(*args)
            if after is not None:
                work.wait()
                after(outputs)
            return work
        if method not in ("send", "recv"):
            self._meet()
        host_args = tree_map_only(Tensor, device_library().host_view, list(args))
        host_outputs = [device_library().host_view(output) for output in outputs]
        step = _Collective(getattr(self._engine, method), host_args, host_outputs, after)
        issued = _Issued(method, step, tree_leaves(reads), outputs)
        if self._coalesced is not None:
            self._coalesced.append(issued)
            return _Coalesced([])  # those who coalesce wait for the work of all
        return self._launch([issued], is_waited_for=not getattr(args[-1], "asyncOp", True))

    def _launch(self, issued: Sequence[_Issued], *, is_waited_for: bool = False) -> Work:
        stream, current = self._stream, torch.accelerator.current_stream()
        stream.wait_stream(current)
        outputs = [output for each in issued for output in each.outputs]
        reads = [tensor for each in issued for tensor in each.reads]
        steps = [each.step for each in issued]
        with stream:
            device_library().launch(issued[0].method, reads, outputs, partial(_all_are_done, steps))
            event = stream.record_event()
        if is_waited_for:  # on the current stream, as NCCL does
            current.wait_event(event)
        return StreamWork(event, [] if is_waited_for else reads, outputs, stream)

    # Coalescing --------------------------------------------------------------------------------

    def start_coalescing(self) -> None:
        self._coalesced = []

    def end_coalescing(self) -> Work:
        issued, self._coalesced = self._coalesced or [], None
        return self._launch(issued) if issued else _Coalesced([])

    # Collectives -------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        is_root = opts.rootRank == self._rank
        return self._issue(
            "broadcast", [tensors, opts], tensors if is_root else [], [] if is_root else tensors
        )

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        opts, after = self._summing(opts)
        return self._issue("allreduce", [tensors, opts], tensors, tensors, after=after)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Work:
        return _Coalesced([self.allreduce([tensor], opts) for tensor in tensors])

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        opts, after = self._summing(opts)
        return self._issue("reduce", [tensors, opts], tensors, tensors, after=after)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        return self._issue("allgather", [outputs, inputs, opts], inputs, outputs)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        return self._issue("_allgather_base", [output, input, opts], [input], [output])

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        options = c10d.AllgatherOptions()
        return _Coalesced(
            [self._allgather_base(o, i, options) for o, i in zip(outputs, inputs, strict=True)]
        )

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        opts, after = self._summing(opts)
        return self._issue("reduce_scatter", [outputs, inputs, opts], inputs, outputs, after=after)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        opts, after = self._summing(opts)
        args = [output, input, opts]
        return self._issue("_reduce_scatter_base", args, [input], [output], after=after)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Work:
        return _Coalesced(
            [self._reduce_scatter_base(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        )

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        return self._issue("gather", [outputs, inputs, opts], inputs, outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        return self._issue("scatter", [outputs, inputs, opts], inputs, outputs)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any,
    ) -> Work:
        args = [output, input, output_splits, input_splits, opts]
        return self._issue("alltoall_base", args, [input], [output])

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:
        return self._issue("send", [tensors, dst, 0], tensors, [])

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:
        return self._issue("recv", [tensors, src, 0], [], tensors)

    def barrier(self, opts: Any = None) -> Work:
        torch.accelerator.synchronize()
        work: Work = self._engine.barrier(c10d.BarrierOptions())
        return work

    def _summing(self, opts: Any) -> tuple[Any, Callable[[list[Tensor]], None] | None]:
        """Options for gloo, which has no means and reads them later; what to do with sums."""
        own, is_mean = type(opts)(), opts.reduceOp == dist.ReduceOp.AVG
        own.asyncOp = opts.asyncOp
        if isinstance(opts, c10d.ReduceOptions):
            own.rootRank, own.rootTensor = opts.rootRank, opts.rootTensor
        own.reduceOp = dist.ReduceOp.SUM if is_mean else opts.reduceOp
        return own, partial(_divide, self._size) if is_mean else None


def _divide(size: int, outputs: list[Tensor]) -> None:
    for output in outputs:
        output.div_(size)


class _Collective:
    """The work of a stream that is a collective of gloo: it begins when it is asked first."""

    def __init__(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        outputs: list[Tensor],
        after: Callable[[list[Tensor]], None] | None,
    ) -> None:
        self._call, self._args, self._outputs, self._after = call, args, outputs, after
        self._work: dist.Work | None = None
        self._waits: Thread | None = None
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Ask the engine, which takes what is asked in one order on all ranks."""
        if self._work is None:
            self._work = self._call(*self._args)
            if not self._work.is_completed():
                self._waits = run_in_background(f"{self._call.__name__} of {NAME}", self._wait)

    def is_done(self) -> bool:
        if self._work is None or (self._waits is not None and self._waits.is_alive()):
            return False
        if self._error is not None:
            raise self._error
        if self._after is not None:
            with torch.no_grad():
                self._after(self._outputs)
        return True

    def _wait(self) -> None:
        assert self._work is not None
        try:
            self._work.wait()
        except BaseException as error:  # raised where the stream is
            self._error = error


def _all_are_done(steps: Sequence[_Collective]) -> bool:
    """Of coalesced ones, each begins before another is waited for: a send needs its receiver."""
    for step in steps:
        step.begin()
    return all(step.is_done() for step in steps)


class _Issued(NamedTuple):
    """A collective that a stream is to do."""

    method: str
    step: _Collective
    reads: list[Tensor]
    outputs: list[Tensor]
