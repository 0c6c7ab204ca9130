"""``measure_rates``: how fast each rank of a group computes and communicates, all at the same time.

The constants are those that ``step_time`` takes, and each is measured by work whose operations are
counted as those of a model are, so that the same sum of terms gives the time of the work back.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.comm.streams import device_of
from echelon.comm.world import World
from echelon.planner.operation_counter import OperationCounter, PlaceWork

_MEGA = 1 << 20
# Rows, inner dimension and columns: products of a block and of a head, forward and backward.
_PRODUCTS = (
    (256, 512, 512),
    (512, 512, 2048),
    (512, 2048, 512),
    (1024, 512, 1536),
    (512, 1024, 1024),
    (512, 512, 8192),
)
_KINDS = 40  # about as many pieces of work are timed
# Elements of collectives: for the latency, and for the rate as many as a model has, so that its
# gradients are not in a cache.
_MESSAGES = (1 << 14, 1 << 25)


@final
@dataclass(frozen=True, kw_only=True)
class RankRates:
    """What a rank reaches while the others do the same.

    Attributes:
        matmul: FLOP/s of multiplications.
        kernel_s: seconds of the smallest multiplication.
        bandwidth: bytes/s of an addition of long vectors.
        memory: of the bandwidth, in what a block does besides multiplications and attention.
        attention: FLOP/s of fused attention with a causal mask.
        optimizer: bytes/s that AdamW would reach if it moved what ``step_time`` says.
        bus: bytes/s of the bus in an all-reduce.
        latency_s: seconds of one pass besides its bytes.
        contention: by which part of the shorter one a computation and an all-reduce at the same
            time take longer than the longer one.
    """

    matmul: float
    kernel_s: float
    bandwidth: float
    memory: float
    attention: float
    optimizer: float
    bus: float
    latency_s: float
    contention: float


def measure_rates(world: World, seconds: float, threads: int | None = None) -> RankRates:
    """Measure on this rank; all ranks call this together.

    Args:
        seconds: about how long, in all.
        threads: that computations of a rank use; None: as many as now.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(before if threads is None else threads)
    try:
        return _rates(_RankClock(world.group, seconds / _KINDS))
    finally:
        torch.set_num_threads(before)


def _rates(clock: _RankClock) -> RankRates:
    group = clock.group
    bandwidth = _bandwidth(clock)
    kernel_s = clock.seconds(_multiplication((8, 8, 8), group.device))
    matmul, attention = _matmul(clock, kernel_s), _attention(clock)
    latency_s, bus = _collectives(clock)
    return RankRates(
        matmul=matmul,
        kernel_s=kernel_s,
        bandwidth=bandwidth,
        memory=_memory(clock, matmul, attention, kernel_s) / bandwidth,
        attention=attention,
        optimizer=_optimizer(clock),
        bus=bus,
        latency_s=latency_s,
        contention=_contention(clock),
    )


def median_rates(rates: Sequence[RankRates]) -> RankRates:
    """Of all ranks, the median of each.

    Example:
        >>> names = RankRates.__dataclass_fields__
        >>> slow, fast, faster = (RankRates(**dict.fromkeys(names, x)) for x in (1.0, 5.0, 6.0))
        >>> median_rates([slow, fast, faster]).bus
        5.0
    """
    names = RankRates.__dataclass_fields__
    return RankRates(**{name: statistics.median(getattr(r, name) for r in rates) for name in names})


@final
class _RankClock:
    """Times work that all ranks do at once."""

    def __init__(self, group: Group, budget_s: float) -> None:
        self.group, self._budget_s = group, budget_s

    def seconds(self, work: Callable[[], Any]) -> float:
        """The median time of repeated work; the ranks repeat it equally often."""
        device = self.group.device
        work()
        first = self._once(work, device)
        count = max(3, min(1000, int(self._budget_s / max(first, 1e-6))))
        count = max(self.group.all_gather_object(count))
        self.group.barrier()
        return statistics.median(self._once(work, device) for _ in range(count))

    def _once(self, work: Callable[[], Any], device: torch.device) -> float:
        start_s = time.perf_counter()
        work()
        device_of(device).synchronize()
        return time.perf_counter() - start_s


def _multiplication(sizes: tuple[int, int, int], device: torch.device) -> Callable[[], Tensor]:
    rows, inner, columns = sizes
    left, right = torch.ones(rows, inner, device=device), torch.ones(columns, inner, device=device)
    return lambda: left @ right.T


def _bandwidth(clock: _RankClock) -> float:
    a = torch.ones(16 * _MEGA, device=clock.group.device)
    output = torch.empty_like(a)
    return 3 * a.nbytes / clock.seconds(lambda: torch.add(a, a, out=output))


def _matmul(clock: _RankClock, kernel_s: float) -> float:
    """The rate of the sizes of a model's products, with the bytes that they move."""
    flops = spent_s = 0.0
    for sizes, order in itertools.product(_PRODUCTS, ((0, 1, 2), (0, 2, 1), (1, 0, 2))):
        rows, inner, columns = (sizes[i] for i in order)
        multiply = _multiplication((rows, inner, columns), clock.group.device)
        spent_s += max(clock.seconds(multiply) - kernel_s, 0.0)
        flops += 2.0 * rows * inner * columns
    return flops / spent_s


class _ProbeBlock(nn.Module):
    """A block of a small language model, and as much of a head as falls to one of eight blocks."""

    def __init__(self, width: int = 512, heads: int = 8, vocabulary: int = 1024) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        q, k, v = (
            part.transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def _memory(clock: _RankClock, matmul: float, attention: float, kernel_s: float) -> float:
    """Bytes/s with which a block takes as long as it does, with all its overhead.

    A multiplication moves its bytes besides, as ``step_time`` counts it.
    """
    device = clock.group.device
    probe = _ProbeBlock().to(device)
    x = torch.ones(4, 128, 512, device=device, requires_grad=True)
    target = torch.zeros(4, 128, dtype=torch.long, device=device)
    work, seconds = _counted(clock, probe.parameters(), lambda: probe(x, target))
    products = work.multiplications
    computing = sum(product.flops / matmul + kernel_s for product in products)
    computing += work.attention_flops / attention
    moved = work.moved + sum(product.nbytes for product in products)
    return moved / max(seconds - computing, 0.02 * seconds)


def _attention(clock: _RankClock) -> float:
    shape = (4, 8, 128, 64)
    q, k, v = (torch.ones(shape, device=clock.group.device, requires_grad=True) for _ in range(3))
    work, seconds = _counted(
        clock, (), lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).sum()
    )
    return work.attention_flops / seconds


def _counted(
    clock: _RankClock, constants: Iterable[Tensor], forward: Callable[[], Tensor]
) -> tuple[PlaceWork, float]:
    """What a forward and a backward do, and how long they take."""
    forward().backward()  # later gradients are added to those of this one
    with OperationCounter(constants) as counter:
        forward().backward()
    return counter.at(0, "forward"), clock.seconds(lambda: forward().backward())


def _optimizer(clock: _RankClock) -> float:
    """38 bytes for each element of AdamW and 4 for its weight, over its time."""
    params = [nn.Parameter(torch.ones(512, 2048, device=clock.group.device)) for _ in range(8)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW(params)
    elements = sum(param.numel() for param in params)
    return 42 * elements / clock.seconds(optimizer.step)


def _collectives(clock: _RankClock) -> tuple[float, float]:
    """The latency of one pass, and the rate of the bus."""
    group = clock.group
    if group.size == 1:
        return 0.0, 1e12
    values = [torch.zeros(numel, device=group.device) for numel in _MESSAGES]
    small, large = (clock.seconds(partial(group.all_reduce, value)) for value in values)
    passed = 2 * (group.size - 1) / group.size * 4 * (_MESSAGES[1] - _MESSAGES[0])
    return small / 2, passed / max(large - small, 1e-9)


def _contention(clock: _RankClock) -> float:
    """Between all-reduces and multiplications, both large."""
    group = clock.group
    if group.size == 1:
        return 0.0
    multiply = _multiplication((512, 1024, 1024), group.device)
    value = torch.zeros(_MESSAGES[1], device=group.device)
    reduce_s = clock.seconds(lambda: group.all_reduce(value))
    count = max(1, round(reduce_s / clock.seconds(multiply)))

    def compute() -> None:
        for _ in range(count):
            multiply()

    def both() -> None:
        work = group.all_reduce(value, async_op=True)
        assert work is not None
        compute()
        work.wait()

    compute_s, both_s = clock.seconds(compute), clock.seconds(both)
    lost = (both_s - max(compute_s, reduce_s)) / min(compute_s, reduce_s)
    return min(1.0, max(0.0, lost))
