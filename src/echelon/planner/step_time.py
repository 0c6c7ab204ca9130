"""The time of a step as a sum of named terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from echelon.planner.cluster import Cluster
from echelon.planner.collective_time import Rings
from echelon.planner.compute_time import Seconds
from echelon.planner.cost_table import CostTable
from echelon.planner.host_memory import HostMemory
from echelon.planner.layout import HostStates, Layout, ShardedStates
from echelon.planner.operations import PlannedModel
from echelon.planner.software_stack import SoftwareStack
from echelon.planner.stage_schedule import bubble_of_a_stage, least_bubble
from echelon.planner.stage_time import (
    BlockTime,
    blocks_of_ranks,
    costs_of_stages,
    host_copies,
    parts_of_block,
    stage_seconds,
)

# AdamW in mixed precision reads and writes master weight, two moments and the gradient, and writes
# the weight of 16 bits: bytes for each element of a shard, and for each element of the rank.
_OPTIMIZER_BYTES, _WEIGHT_BYTES = 38, 4
# On the host AdamW reads four numbers of 32 bits and writes three, and casts the weight to 16 bits;
# a gradient of a microbatch is read in 16 bits and added in 32.
_HOST_BYTES, _ADDITION_BYTES = 34, 10
_BUCKET_BYTES = 25e6  # of gradients that are reduced while the backward runs, the default of DDP
ROUNDING = 1e-12  # sums of the same terms in another order differ by less


@final
@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step of the slowest stage, by what they go into.

    Attributes:
        matmul: multiplications of matrices.
        attention: scores and values.
        memory: work that is bound by memory.
        launch: waiting for the host to launch kernels.
        exchange: collectives of ``tp``, ``cp`` and ``ep``.
        gather: waiting for parameters, and for reductions of sharded gradients.
        message: messages between stages.
        bubble: waiting for other stages.
        reduce: waiting for the gradients of replicas.
        optimizer: the update; with ``offload`` by the host, and the copies of all shards.
        other: all else: the start and end of a step, and what grows with the number of hosts.
    """

    matmul: float
    attention: float
    memory: float
    launch: float
    exchange: float
    gather: float
    message: float
    bubble: float
    reduce: float
    optimizer: float
    other: float

    @property
    def total(self) -> float:
        """Seconds of the step: the sum of all terms."""
        return sum(self.terms().values())

    def terms(self) -> dict[str, float]:
        """The terms by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def step_time(
    model: PlannedModel,
    layout: Layout,
    cluster: Cluster,
    stack: SoftwareStack,
    blocks: Sequence[int] | None = None,
    table: CostTable | None = None,
) -> StepTime:
    """The time of one step.

    Args:
        blocks: of each rank of ``pp``; None: stages are cut evenly.
        table: of this model, cluster and stack, where many layouts are looked at.

    Returns:
        the terms of the rank with the slowest stages. All its microbatches take it the time of the
        computing terms; until its first and after its last microbatch it waits for the other
        ranks, as long as the schedule says. Of a schedule without a closed form that is the least
        that it can be, and ``simulated_steps`` has the rest.
    """
    table = CostTable(model, cluster, stack) if table is None else table
    rings, head = table.rings(layout), table.head(layout)
    block = table.block(layout, rings)
    counts = blocks_of_ranks(model.layers, layout) if blocks is None else list(blocks)
    hop = layout.chunks * exposed_message(model, layout, cluster, stack, rings)
    stages = stage_seconds(counts, block.total, head.total, hop, layout.head_rank)
    slowest = max(range(layout.pp), key=stages.__getitem__)
    bubble = _bubble(model, layout, block, stages, head=head.total, hop=hop)
    compute = _compute(block, head, counts[slowest], has_head=slowest == layout.head_rank)
    compute = compute.times(layout.microbatches)
    exchange = layout.microbatches * counts[slowest] * block.exchanged
    edges = _edges(model, layout, cluster, stack, rings)
    gather = layout.microbatches * (counts[slowest] * block.waiting + edges)
    busy = compute.total + exchange + gather + 2 * layout.microbatches * hop + bubble
    backward = counts[slowest] * block.backward.total
    return StepTime(
        matmul=compute.matmul,
        attention=compute.attention,
        memory=compute.memory,
        launch=compute.launch,
        exchange=exchange,
        gather=gather,
        message=2 * layout.microbatches * hop,
        bubble=bubble,
        reduce=_reduce(model, layout, stack, rings, max(counts), backward),
        optimizer=_optimizer(model, layout, cluster, stack, max(counts)),
        other=stack.rates.step_s + busy * drift_of(layout, cluster, stack),
    )


def least_seconds(
    model: PlannedModel, layout: Layout, cluster: Cluster, stack: SoftwareStack, table: CostTable
) -> float:
    """No choice of ``shard``, ``sharded``, ``schedule`` and ``chunks`` makes a step faster.

    It has the computing terms of the slowest rank and the exchanges, and what grows with them;
    waiting, messages, bubble, reductions and the optimizer are taken as nothing.
    """
    block = table.computed_block(layout, table.rings(layout)).computed
    fewest, most = model.layers // layout.pp, -(-model.layers // layout.pp)
    slowest = max(most * block, fewest * block + table.head(layout).total)
    busy = layout.microbatches * slowest * (1 + drift_of(layout, cluster, stack))
    return (busy + stack.rates.step_s) * (1 - ROUNDING)


def _bubble(
    model: PlannedModel,
    layout: Layout,
    block: BlockTime,
    stages: Sequence[float],
    *,
    head: float,
    hop: float,
) -> float:
    """By the closed form of the schedule, or the least that it can be."""
    if layout.has_closed_form:
        return (sum(stages) - max(stages)) * bubble_part(layout, block)
    costs = costs_of_stages(model.layers, layout, block, head, hop / layout.chunks)
    return least_bubble(layout, costs, [layout.microbatches * stage for stage in stages])


def bubble_part(layout: Layout, block: BlockTime) -> float:
    """The bubble as a part of the time that the other ranks take for one microbatch."""
    forward, inputs, weights = parts_of_block(layout, block)
    total = forward + inputs + weights
    return bubble_of_a_stage(layout, forward, inputs, weights) / total


def drift_of(layout: Layout, cluster: Cluster, stack: SoftwareStack) -> float:
    """By which part a step takes longer on so many hosts."""
    hosts = max(1.0, layout.num_ranks / cluster.devices_per_host)
    return stack.rates.drift * math.log2(hosts)


def _compute(block: BlockTime, head: Seconds, count: int, *, has_head: bool) -> Seconds:
    seconds = block.forward.plus(block.backward).times(count)
    return seconds.plus(head) if has_head else seconds


def exposed_message(
    model: PlannedModel, layout: Layout, cluster: Cluster, stack: SoftwareStack, rings: Rings
) -> float:
    """The part of one message between stages that no computation hides.

    With ``tp``, each rank sends its part of what they all have, and they gather it in the next
    stage (Narayanan et al., arXiv 2104.04473, section 4.1).
    """
    if layout.pp == 1:
        return 0.0
    nbytes = stack.parameter_bytes * layout.microbatch * model.seq / layout.cp * model.hidden
    rate = cluster.network * stack.rates.network / cluster.devices_per_host
    if not rings.message.between_hosts:
        rate = cluster.device.link * stack.rates.bus
    sent = stack.rates.message * nbytes / layout.tp / rate + rings.message.latency
    return sent + (0.0 if layout.sequence_parallel else rings.tp.one_pass(nbytes))


def _edges(
    model: PlannedModel, layout: Layout, cluster: Cluster, stack: SoftwareStack, rings: Rings
) -> float:
    """Gathers and reductions of embedding and head, and those of the first block: nothing is
    computed meanwhile."""
    if not layout.shards_gradients:
        return 0.0
    edge = (model.embedding_parameters + model.head_parameters) / layout.tp / layout.pp
    block = model.block_parameters / layout.tp
    width = stack.parameter_bytes
    gathers = rings.shard.one_pass(width * edge) * 2 + rings.shard.one_pass(width * block)
    from_host, to_host = host_copies(layout, cluster, stack, edge)
    block_from_host, block_to_host = host_copies(layout, cluster, stack, block)
    copies = 2 * from_host + to_host + block_from_host + block_to_host
    return copies + gathers + rings.shard.one_pass(stack.gradient_bytes * (edge + block))


def _reduce(
    model: PlannedModel,
    layout: Layout,
    stack: SoftwareStack,
    rings: Rings,
    count: int,
    backward: float,
) -> float:
    """Waiting for the reduction of gradients that no backward hides; 0 where shards are reduced."""
    if layout.shards_gradients:
        return 0.0
    elements = (count * model.block_parameters + model.embedding_parameters) / layout.tp
    nbytes = stack.gradient_bytes * elements
    buckets = math.ceil(nbytes / _BUCKET_BYTES) if stack.overlaps_reduction else 1
    bucket = nbytes / buckets
    shards = 2 * rings.shard.one_pass(bucket)  # gradients are scattered, and weights gathered
    seconds = buckets * (shards + rings.dp.all_reduce(bucket / layout.shard))
    if not stack.overlaps_reduction:
        return seconds
    hidden = min(seconds * 0.9, backward)  # of the last microbatch; the last bucket is never hidden
    return seconds - hidden + stack.rates.contention * hidden


def _optimizer(
    model: PlannedModel, layout: Layout, cluster: Cluster, stack: SoftwareStack, count: int
) -> float:
    elements = (count * model.block_parameters + model.embedding_parameters) / layout.tp
    shard = elements / (layout.shard if layout.sharded is not ShardedStates.NOTHING else 1)
    nbytes = _OPTIMIZER_BYTES * shard + _WEIGHT_BYTES * elements
    if layout.sharded is ShardedStates.PARAMETERS:
        nbytes = (_OPTIMIZER_BYTES + _WEIGHT_BYTES) * shard
    if layout.offload is not HostStates.NOTHING and cluster.host is not None:
        return _on_host(layout, cluster, cluster.host, stack, shard)
    return nbytes / (cluster.device.bandwidth * stack.rates.optimizer)


def _on_host(
    layout: Layout, cluster: Cluster, host: HostMemory, stack: SoftwareStack, shard: float
) -> float:
    """The update of a shard by the host, and what no computation hides of copies.

    The devices of a host share the bandwidth of its memory. All but sharded gradients are copied
    after the last backward.
    """
    accumulated = 0 if layout.sharded is ShardedStates.OPTIMIZER else layout.microbatches
    nbytes = _HOST_BYTES + _ADDITION_BYTES * accumulated
    seconds = nbytes * shard * cluster.devices_per_host / host.bandwidth
    if layout.sharded is ShardedStates.OPTIMIZER:
        seconds += stack.gradient_bytes * shard / host.link
    if layout.offload is HostStates.OPTIMIZER:  # with ALL, each gather copies
        seconds += stack.parameter_bytes * shard / host.link
    return seconds
