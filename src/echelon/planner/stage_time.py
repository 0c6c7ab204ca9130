"""How long one microbatch takes in each stage, from the time of a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from echelon.planner.compute_time import Seconds
from echelon.planner.layout import Layout, Recompute


class BlockTime(NamedTuple):
    """One microbatch in one block, or in the head.

    Attributes:
        forward: its computation.
        backward: its computation, with what is computed again.
        exchanged: seconds of collectives of ``tp``, ``cp`` and ``ep``, which nothing hides.
        weights: the part of the backward that computes gradients of weights, which nothing waits
            for.
        waiting: seconds in which it waits for gathered parameters or for reductions.
    """

    forward: Seconds
    backward: Seconds
    exchanged: float
    weights: float
    waiting: float = 0.0

    @property
    def computed(self) -> float:
        """Forward and backward without waiting."""
        return self.forward.total + self.backward.total + self.exchanged

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.computed + self.waiting


def passes_of_block(layout: Layout) -> int:
    """How often one microbatch goes through a block: forward, backward, and to recompute it."""
    return 3 if layout.recompute is Recompute.BLOCKS else 2


def parts_of_block(layout: Layout, block: BlockTime) -> tuple[float, float, float]:
    """Seconds of its forward, of the gradients of its inputs, and of those of its weights."""
    forward = block.forward.total + block.exchanged / passes_of_block(layout)
    return forward, block.total - forward - block.weights, block.weights


def blocks_of_stages(layers: int, stages: int) -> list[int]:
    """The numbers of blocks of stages that are cut evenly; the first ones have those left over.

    Example:
        >>> blocks_of_stages(10, 4)
        [3, 3, 2, 2]
    """
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def blocks_of_ranks(layers: int, layout: Layout) -> list[int]:
    """The numbers of blocks of the ranks of a pipeline, whose stages are cut evenly.

    Example:
        >>> blocks_of_ranks(9, Layout(pp=3, chunks=2, microbatches=6, schedule="zb-v"))
        [3, 3, 3]
    """
    if layout.schedule_cost.is_v:
        stages = blocks_of_stages(layers, 2 * layout.pp)
        return [stages[rank] + stages[-1 - rank] for rank in range(layout.pp)]
    return blocks_of_stages(layers, layout.pp)


def stage_seconds(
    blocks: Sequence[int], block: float, head: float, hop: float, head_rank: int = -1
) -> list[float]:
    """One microbatch in each rank: its blocks, two messages, and in one of them the head."""
    times = [count * block + 2 * hop for count in blocks]
    times[head_rank] += head
    return times


def costs_of_stages(
    layers: int, layout: Layout, block: BlockTime, head: float, hop: float
) -> dict[str, list[float]]:
    """Seconds of one microbatch in each stage, by the names of ``simulate``.

    A forward has the message that comes in, a backward that which goes back, and the last stage the
    head.

    Args:
        layers: of the model.
        head: seconds of the head, forward and backward.
        hop: seconds of one message.
    """
    counts = blocks_of_stages(layers, layout.pp * layout.chunks)
    costs = {}
    parts = parts_of_block(layout, block)
    for name, seconds, message in zip("FIW", parts, (hop, hop, 0.0), strict=True):
        costs[name] = [count * seconds + message for count in counts]
        costs[name][-1] += head / 3  # a backward has two products for one of a forward
    return costs
