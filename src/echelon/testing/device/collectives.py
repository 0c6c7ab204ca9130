"""Process groups as devices have them: collectives are work of a stream of their communicator.

A collective begins after what was issued on the current stream, and ``Work.wait`` lets the current
stream wait for it, not the host. Values travel over gloo, from and to the memory of the device.
Tensors of the CPU go to gloo directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.utils._pytree import tree_leaves, tree_map_only

from echelon.comm.streams import device_of
from echelon.process.background_threads import run_in_background
from echelon.testing.device import torch_module
from echelon.testing.device.native import device_library

NAME = "simccl"


def register_backend() -> None:
    """Let ``init_process_group`` use the simulated groups for the device."""
    dist.Backend.register_backend(
        NAME, SimulatedGroup, extended_api=False, devices=[torch_module.DEVICE, "cpu"]
    )


@final
class StreamWork(dist.Work):
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
        super().__init__()
        self._event, self._inputs, self._outputs = event, list(inputs), list(outputs)
        with stream:
            self._future: torch.futures.Future[Any] = torch.futures.Future(
                devices=[torch.device(torch_module.DEVICE, 0)]
            )
            self._future.set_result(self._outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        torch.accelerator.current_stream().wait_event(self._event)
        self._inputs.clear()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


@final
class _Coalesced(dist.Work):
    """Several collectives."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


@final
class SimulatedGroup(dist.ProcessGroup):
    """The ranks of a group, each with a stream for its collectives."""

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # as trampolines need it
        self._gloo = c10d.ProcessGroupGloo(store, rank, size, timeout)
        self._stream = torch.Stream(torch_module.DEVICE)
        self._coalesced: list[dist.Work] | None = None
        self._name = ""

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(torch_module.DEVICE), torch.device("cpu")]

    def _issue(
        self,
        method: str,
        args: Sequence[Any],
        reads: Any,
        writes: Any,
        *,
        after: Callable[[list[Tensor]], None] | None = None,
    ) -> dist.Work:
        outputs = tree_leaves(writes)
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if any(device_of(tensor.device).is_host for tensor in tensors):
            work: dist.Work = getattr(self._gloo, method)(*args)
            if after is not None:
                work.wait()
                after(outputs)
            return work
        library, stream, inputs = device_library(), self._stream, tree_leaves(reads)
        stream.wait_stream(torch.accelerator.current_stream())
        host_args = tree_map_only(Tensor, library.host_view, list(args))
        host_outputs = [library.host_view(output) for output in outputs]
        step = _Collective(getattr(self._gloo, method), host_args, host_outputs, after)
        with stream:
            library.launch(method, inputs, outputs, step)
            event = stream.record_event()
        issued = StreamWork(event, inputs, outputs, stream)
        if self._coalesced is not None:
            self._coalesced.append(issued)
        return issued

    # Coalescing --------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return _Coalesced(works)

    # Collectives -------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        is_root = opts.rootRank == self.rank()
        return self._issue(
            "broadcast", [tensors, opts], tensors if is_root else [], [] if is_root else tensors
        )

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        opts, after = self._summing(opts)
        return self._issue("allreduce", [tensors, opts], tensors, tensors, after=after)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        return _Coalesced([self.allreduce([tensor], opts) for tensor in tensors])

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        opts, after = self._summing(opts)
        return self._issue("reduce", [tensors, opts], tensors, tensors, after=after)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        return self._issue("allgather", [outputs, inputs, opts], inputs, outputs)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:  # type: ignore[override]
        return self._issue("_allgather_base", [output, input, opts], [input], [output])

    all_gather_single = _allgather_base  # type: ignore[assignment]

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        options = c10d.AllgatherOptions()
        return _Coalesced(
            [self._allgather_base(o, i, options) for o, i in zip(outputs, inputs, strict=True)]
        )

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> dist.Work:
        opts, after = self._summing(opts)
        return self._issue("reduce_scatter", [outputs, inputs, opts], inputs, outputs, after=after)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        opts, after = self._summing(opts)
        args = [output, input, opts]
        return self._issue("_reduce_scatter_base", args, [input], [output], after=after)

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def reduce_scatter_tensor_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        return _Coalesced(
            [self._reduce_scatter_base(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        )

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        return self._issue("gather", [outputs, inputs, opts], inputs, outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:  # type: ignore[override]
        return self._issue("scatter", [outputs, inputs, opts], inputs, outputs)

    def alltoall_base(  # type: ignore[override]
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any,
    ) -> dist.Work:
        args = [output, input, output_splits, input_splits, opts]
        return self._issue("alltoall_base", args, [input], [output])

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        return self._issue("send", [tensors, dst, 0], tensors, [])

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        return self._issue("recv", [tensors, src, 0], [], tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        torch.accelerator.synchronize()
        work: dist.Work = vars(c10d)["ProcessGroupGloo"].barrier(self._gloo)
        return work

    def _summing(self, opts: Any) -> tuple[Any, Callable[[list[Tensor]], None] | None]:
        """Options for gloo, which has no means and reads them later; what to do with sums."""
        own, is_mean = type(opts)(), opts.reduceOp == dist.ReduceOp.AVG
        if isinstance(opts, c10d.ReduceOptions):
            own.rootRank, own.rootTensor = opts.rootRank, opts.rootTensor
        own.reduceOp = dist.ReduceOp.SUM if is_mean else opts.reduceOp
        return own, partial(_divide, self.size()) if is_mean else None


def _divide(size: int, outputs: list[Tensor]) -> None:
    for output in outputs:
        output.div_(size)


class _Collective:
    """The work of a stream that is a collective of gloo: it begins when it is called first."""

    def __init__(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        outputs: list[Tensor],
        after: Callable[[list[Tensor]], None] | None,
    ) -> None:
        self._call, self._args, self._outputs, self._after = call, args, outputs, after
        self._waits: Thread | None = None
        self._error: BaseException | None = None

    def __call__(self) -> bool:
        if self._waits is None:
            self._waits = run_in_background(f"{self._call.__name__} of {NAME}", self._run)
            if self._call.__name__ != "send":  # a send is over when its values are on their way
                return False
            self._waits.join()
        if self._waits.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        try:
            self._call(*self._args).wait()
            if self._after is not None:
                with torch.no_grad():
                    self._after(self._outputs)
        except BaseException as error:  # raised where the stream is
            self._error = error
