"""A network that is not there: rank 0 of N, whose collectives take as long as one would.

The data of the other ranks is that of rank 0. What it takes to come is bytes over a bandwidth, for
which a stream sleeps. It is the same for echelon, below whose groups ``AbsentRanks`` is the engine,
and for FSDP2, whose all-gathers and reduce-scatters ``delayed`` replaces. Engines are those of
``echelon.comm.torch_dist.engines.Engine``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, final

import torch
from gpu_device import has_streams
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d

__all__ = ["AbsentRanks", "Network", "cycles_per_ms", "delayed"]


@cache
def cycles_per_ms(device: torch.device) -> float:
    """The cycles that ``torch.cuda._sleep`` takes for a millisecond, measured."""
    cycles = 20_000_000
    for _ in range(2):  # the first one wakes the clock
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize(device)
    return cycles / start.elapsed_time(end)


@final
class Network:
    """What sends data to this rank.

    Args:
        gb_s: GB/s that arrive at a rank; None: it takes no time.

    Attributes:
        nbytes: that have crossed it.
        num_calls: the number of collectives.
    """

    def __init__(self, device: torch.device, gb_s: float | None = None) -> None:
        self.device, self.gb_s = device, gb_s
        self.nbytes = self.num_calls = 0

    def __str__(self) -> str:
        return "off" if self.gb_s is None else f"{self.gb_s:g} GB/s"

    def carry(self, nbytes: float) -> None:
        """Have the current stream wait until so many bytes have come."""
        self.nbytes += int(nbytes)
        self.num_calls += 1
        if self.gb_s is not None and has_streams(self.device):
            milliseconds = nbytes / self.gb_s / 1e6
            torch.cuda._sleep(max(1, int(milliseconds * cycles_per_ms(self.device))))


@final
class StreamWork:
    """A collective on the stream of its communicator, or on the CPU one that is over."""

    def __init__(
        self,
        stream: torch.cuda.Stream | None,
        tensors: Sequence[Tensor],
        waits: Callable[[], bool] | None,
    ) -> None:
        self._event = None if stream is None else stream.record_event()
        self._tensors = list(tensors)  # kept until somebody has waited, as NCCL's are
        self._waits = waits

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Order the current stream behind it; the host goes on."""
        is_wanted = self._waits is None or self._waits()
        if self._event is not None and is_wanted:
            torch.cuda.current_stream().wait_event(self._event)
        self._tensors.clear()
        return True

    def is_completed(self) -> bool:
        return self._event is None or bool(self._event.query())


@final
class AbsentRanks:
    """An engine of rank 0 whose other ranks have the same data.

    Args:
        before: called on the stream of the communicator before each collective.
        waits: whether to wait when somebody waits for a collective; None: always.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        network: Network,
        *,
        before: Callable[[], None] | None = None,
        waits: Callable[[], bool] | None = None,
    ) -> None:
        self._rank, self._size, self._network = rank, size, network
        self._before, self._waits = before, waits
        is_cuda = has_streams(network.device)
        self._stream = torch.cuda.Stream(network.device) if is_cuda else None

    def _run(
        self, tensors: Sequence[Tensor], nbytes: float, act: Callable[[], object]
    ) -> StreamWork:
        """Act on the communicator's stream, after what was issued on the current one."""
        if self._stream is None:
            self._network.carry(nbytes)
            act()
            return StreamWork(None, tensors, self._waits)
        self._stream.wait_stream(torch.cuda.current_stream(self._network.device))
        with torch.cuda.stream(self._stream):
            if self._before is not None:
                self._before()
            self._network.carry(nbytes)
            act()
        return StreamWork(self._stream, tensors, self._waits)

    @property
    def _others(self) -> float:
        """The share of a buffer that other ranks send."""
        return (self._size - 1) / self._size

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> StreamWork:
        return self._run(
            (output, input),
            output.nbytes * self._others,
            lambda: spread(output, input, self._size),
        )

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> StreamWork:
        def act() -> None:
            output.copy_(input.view(self._size, -1)[self._rank])
            self._multiply(output, opts)

        return self._run((output, input), input.nbytes * self._others, act)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> StreamWork:
        (tensor,) = tensors
        return self._run(
            tensors, 2 * tensor.nbytes * self._others, lambda: self._multiply(tensor, opts)
        )

    reduce = allreduce

    def _multiply(self, tensor: Tensor, opts: Any) -> None:
        """The sum of equal values; means, extremes and the like of these are the values."""
        if opts.reduceOp == c10d.ReduceOp.SUM:
            tensor.mul_(self._size)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> StreamWork:
        """Zeros come from a rank that is not there: what it has is not known here."""
        is_root = opts.rootRank == self._rank
        return self._run(
            tensors, tensors[0].nbytes, lambda: None if is_root else tensors[0].zero_()
        )

    def alltoall_base(
        self, output: Tensor, input: Tensor, outs: list[int], ins: list[int], opts: Any
    ) -> StreamWork:
        """Every rank sends what this one sends to itself, cut or repeated to the length."""

        def act() -> None:
            own = input[sum(ins[: self._rank]) :][: ins[self._rank] if ins else None]
            for part in output.split(outs) if outs else output.chunk(self._size):
                part.zero_()[: len(own)].copy_(own[: len(part)])

        return self._run((output, input), output.nbytes * self._others, act)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> StreamWork:
        return self._run(tensors, tensors[0].nbytes, lambda: None)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> StreamWork:
        return self._run(tensors, tensors[0].nbytes, lambda: tensors[0].zero_())


def spread(output: Tensor, input: Tensor, count: int) -> None:
    """Copy ``input`` to each of the parts of ``output``, which may hold it, in one kernel."""
    width = 8 if input.nbytes % 8 == 0 and _is_aligned(output, 8) and _is_aligned(input, 8) else 1
    dtype = torch.int64 if width == 8 else torch.uint8  # the kernel moves an element a thread
    source = input.reshape(-1).view(dtype)
    output.reshape(-1).view(dtype).view(count, -1).copy_(source.expand(count, -1))


def _is_aligned(tensor: Tensor, nbytes: int) -> bool:
    return tensor.storage_offset() * tensor.itemsize % nbytes == 0


def delayed(model: nn.Module, network: Network) -> nn.Module:
    """Have the all-gathers and reduce-scatters of FSDP2 be those of ``AbsentRanks``."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    def empty(size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    class Gather(AllGather):
        def allocate(self, size: Sequence[Any], **options: Any) -> Tensor:
            return empty(size, **options)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
        ) -> None:
            size = group.size()
            network.carry(output_tensor.nbytes * (size - 1) / size)
            spread(output_tensor, input_tensor, size)

    class Scatter(ReduceScatter):
        def allocate(self, size: Sequence[Any], **options: Any) -> Tensor:
            return empty(size, **options)

        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: Any,
            op: Any,
            async_op: bool = False,
        ) -> None:
            size = group.size()
            network.carry(input_tensor.nbytes * (size - 1) / size)
            output_tensor.copy_(input_tensor.view(size, -1)[group.rank()])

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Gather())
            module.set_custom_reduce_scatter(Scatter())
    return model
