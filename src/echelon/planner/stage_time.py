"""How long one microbatch takes in each stage, with the collectives inside of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from echelon.planner.cluster import Cluster
from echelon.planner.collective_time import Rings
from echelon.planner.compute_time import Seconds, work_seconds
from echelon.planner.layout import HostStates, Layout, Recompute, ShardedStates
from echelon.planner.operations import WIDTH, PlannedModel, block_work, head_work
from echelon.planner.software_stack import SoftwareStack


@final
@dataclass(frozen=True, kw_only=True)
class BlockTime:
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


def block_time(
    model: PlannedModel, layout: Layout, cluster: Cluster, stack: SoftwareStack, rings: Rings
) -> BlockTime:
    """One microbatch through one block, in a forward and a backward, with what it waits for."""
    block = computed_block(model, layout, cluster, stack, rings)
    return replace(block, waiting=waiting_of_block(model, layout, cluster, stack, rings, block))


def computed_block(
    model: PlannedModel, layout: Layout, cluster: Cluster, stack: SoftwareStack, rings: Rings
) -> BlockTime:
    """One microbatch through one block without waiting for its parameters and their gradients.

    It is the same for all layouts of one ``tp``, ``cp``, ``ep``, ``microbatch`` and ``recompute``.

    With ``tp``, a forward has two all-reduces of the residual stream, and so has a backward
    (Shoeybi et al., arXiv 1909.08053, section 3). With sequence parallelism each is a
    reduce-scatter and an all-gather, which move as much (Korthikanti et al., arXiv 2205.05198,
    section 4.2.2).
    """
    passes = block_work(model, layout, stack)
    device = cluster.device
    exchange = _exchanges(model, layout, rings, layout.microbatch * model.seq / layout.cp)
    forward = work_seconds(passes.forward, device, stack, exchange)
    backward = work_seconds(passes.backward, device, stack, exchange)
    weights = backward.matmul / 2  # the other half are gradients of inputs
    runs = 2  # one in the forward, one in the backward
    if layout.recompute is Recompute.BLOCKS:
        work = passes.backward.plus(passes.forward)
        backward = work_seconds(work, device, stack, 2 * exchange)
        runs += 1
    elif layout.recompute is Recompute.ATTENTION:
        backward = backward.plus(Seconds(attention=forward.attention))
    return BlockTime(
        forward=forward,
        backward=backward,
        exchanged=runs * exchange,
        weights=weights,
    )


def parts_of_block(layout: Layout, block: BlockTime) -> tuple[float, float, float]:
    """Seconds of its forward, of the gradients of its inputs, and of those of its weights."""
    runs = 3 if layout.recompute is Recompute.BLOCKS else 2
    forward = block.forward.total + block.exchanged / runs
    return forward, block.total - forward - block.weights, block.weights


def head_time(
    model: PlannedModel, layout: Layout, cluster: Cluster, stack: SoftwareStack
) -> Seconds:
    """One microbatch through embedding, head and loss, in a forward and a backward."""
    return work_seconds(head_work(model, layout, stack.rates), cluster.device, stack)


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


def _exchanges(model: PlannedModel, layout: Layout, rings: Rings, tokens: float) -> float:
    """Seconds of one pass through a block, forward or backward."""
    nbytes = WIDTH * tokens * model.hidden
    seconds = 2 * rings.tp.all_reduce(nbytes)
    if layout.cp > 1:  # keys and values go round (Liu et al., arXiv 2310.01889, section 3)
        kv_bytes = 2 * WIDTH * tokens * model.kv_heads * model.head_dim / layout.tp
        seconds += rings.cp.one_pass(kv_bytes * layout.cp)
    if layout.ep > 1:  # tokens go to their experts and back
        seconds += 2 * rings.ep.one_pass(nbytes * model.active_experts)
    return seconds


def waiting_of_block(
    model: PlannedModel,
    layout: Layout,
    cluster: Cluster,
    stack: SoftwareStack,
    rings: Rings,
    block: BlockTime,
) -> float:
    """Seconds in which a block waits for its parameters or for the reduction of its gradients.

    The next block's gather and the last one's reduction run while this block computes, so the
    longer one counts, and part of the shorter one, because they share memory and processors. A
    shard that the host keeps is copied before its gather, and its gradient after its reduction.
    """
    if not layout.shards_gradients:
        return 0.0
    forward, backward = block.forward.total, block.backward.total
    elements = model.block_parameters / layout.tp
    gather = rings.shard.one_pass(stack.parameter_bytes * elements)
    reduce = rings.shard.one_pass(stack.gradient_bytes * elements)
    reduce += rings.dp.all_reduce(stack.gradient_bytes * elements / layout.shard)
    from_host, to_host = host_copies(layout, cluster, stack, elements)
    gather, reduce = gather + from_host, reduce + to_host
    gathers_again = layout.sharded is ShardedStates.PARAMETERS
    contention = stack.rates.contention

    def lost(compute: float, collective: float) -> float:
        return max(0.0, collective - compute) + contention * min(compute, collective)

    if not gathers_again and layout.microbatches > 1:
        return lost(backward, reduce)  # parameters stay whole from one microbatch to the next
    return lost(forward, gather) + lost(backward, gather * gathers_again + reduce)


def host_copies(
    layout: Layout, cluster: Cluster, stack: SoftwareStack, elements: float
) -> tuple[float, float]:
    """Seconds in which the shard of so many elements comes from the host, and its gradient goes
    there; 0 where the device keeps them."""
    if layout.offload is HostStates.NOTHING or cluster.host is None:
        return 0.0, 0.0
    shard = elements / layout.shard / cluster.host.link
    from_host = stack.parameter_bytes * shard if layout.offload is HostStates.ALL else 0.0
    return from_host, stack.gradient_bytes * shard
