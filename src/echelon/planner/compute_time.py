"""How long a device takes for the work of a block: multiplications, attention, memory, launches."""

from __future__ import annotations

import math
from typing import NamedTuple

from echelon.planner.device import Device
from echelon.planner.operations import Multiplication, RankWork
from echelon.planner.software_stack import Attention, SoftwareStack

_TILE = 128  # rows and columns of the output that one multiprocessor computes at once
_MOST_LOST = 2.5  # small outputs are cut along the inner dimension instead, which costs less


class Seconds(NamedTuple):
    """Of one rank, by what bounds it. Their sum is the time."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launch: float = 0.0

    @property
    def total(self) -> float:
        """Of all."""
        return sum(self)

    def plus(self, other: Seconds) -> Seconds:
        """Both, one after the other."""
        return Seconds(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Seconds:
        """So many times as long.

        Example:
            >>> Seconds(1.0, 0.5).times(2).total
            3.0
        """
        return Seconds(*(factor * value for value in self))


def matmul_seconds(product: Multiplication, device: Device, stack: SoftwareStack) -> float:
    """FLOPs at the rate of large multiplications, bytes at that of memory, and one launch.

    The output is dealt to the multiprocessors in tiles; a last wave of few tiles takes as long as a
    full one (NVIDIA, "Matrix multiplication background", section 4).
    """
    rates = stack.rates
    tiles = math.ceil(product.rows / _TILE) * math.ceil(product.columns / _TILE)
    waves = math.ceil(tiles / device.processors) * device.processors / tiles
    lost: float = min(waves, _MOST_LOST) ** rates.waves
    return (
        lost * product.flops / (device.matmul * rates.matmul)
        + product.nbytes / (device.bandwidth * rates.memory)
        + rates.kernel_s
    )


def work_seconds(
    work: RankWork, device: Device, stack: SoftwareStack, exchanged: float = 0.0
) -> Seconds:
    """The time of the device, or that of the host where launching takes longer.

    Args:
        exchanged: seconds of collectives between this work, in which the host launches, too.
    """
    rates = stack.rates
    fused = stack.attention is Attention.FUSED
    rate = device.attention * rates.attention if fused else device.matmul * rates.scores
    matmul = sum(matmul_seconds(product, device, stack) for product in work.multiplications)
    attention = work.attention_flops / rate
    memory = work.moved / (device.bandwidth * rates.memory)
    host = work.kernels * rates.launch_s
    waited = max(0.0, host - matmul - attention - memory - exchanged)
    return Seconds(matmul, attention, memory, waited)
