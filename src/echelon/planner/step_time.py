"""The time of a step as a sum of named terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from echelon.planner.cluster import Cluster
from echelon.planner.collective_time import Rings, rings_of
from echelon.planner.compute_time import Seconds
from echelon.planner.layout import Layout, ShardedStates
from echelon.planner.operations import WIDTH
from echelon.planner.software_stack import SoftwareStack
from echelon.planner.stage_time import (
    BlockTime,
    block_time,
    blocks_of_stages,
    head_time,
    stage_seconds,
)
from echelon.planner.transformer import Transformer

# AdamW in mixed precision reads and writes master weight, two moments and the gradient, and writes
# the weight of 16 bits: bytes for each element of a shard, and for each element of the rank.
_OPTIMIZER_BYTES, _WEIGHT_BYTES = 38, 4
_BUCKET_BYTES = 25e6  # of gradients that are reduced while the backward runs, the default of DDP


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
        optimizer: the update.
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
    model: Transformer,
    layout: Layout,
    cluster: Cluster,
    stack: SoftwareStack,
    blocks: Sequence[int] | None = None,
) -> StepTime:
    """The time of one step.

    Args:
        blocks: of each stage; None: cut evenly.

    Returns:
        the terms of the rank with the slowest stage. All its microbatches take it the time of the
        computing terms; until its first and after its last microbatch it waits for the other
        stages once (the bubble of 1F1B, Narayanan et al., arXiv 2104.04473, section 2.2), with
        ``chunks`` stages for a rank the chunk-th part of it.
    """
    rates = stack.rates
    rings = rings_of(layout, cluster, rates)
    block = block_time(model, layout, cluster, stack, rings)
    head = head_time(model, layout, cluster, stack)
    counts = blocks_of_stages(model.layers, layout.pp) if blocks is None else list(blocks)
    hop = _hop(model, layout, cluster, stack, rings)
    stages = stage_seconds(counts, block.total, head.total, hop)
    slowest = max(range(layout.pp), key=stages.__getitem__)
    bubble = (sum(stages) - stages[slowest]) / layout.chunks
    compute = _compute(block, head, counts[slowest], is_last=slowest == layout.pp - 1)
    compute = compute.times(layout.microbatches)
    exchange = layout.microbatches * counts[slowest] * block.exchanged
    edges = _edges(model, layout, stack, rings)
    gather = layout.microbatches * (counts[slowest] * block.waiting + edges)
    busy = compute.total + exchange + gather + 2 * layout.microbatches * hop + bubble
    hosts = max(1.0, layout.num_ranks / cluster.devices_per_host)
    backward = layout.microbatches * counts[slowest] * block.backward.total
    return StepTime(
        matmul=compute.matmul,
        attention=compute.attention,
        memory=compute.memory,
        launch=compute.launch,
        exchange=exchange,
        gather=gather,
        message=2 * layout.microbatches * hop,
        bubble=bubble,
        reduce=_reduce(model, layout, stack, rings, max(counts), backward / layout.microbatches),
        optimizer=_optimizer(model, layout, cluster, stack, max(counts)),
        other=rates.step_s + busy * rates.drift * math.log2(hosts),
    )


def _compute(block: BlockTime, head: Seconds, count: int, *, is_last: bool) -> Seconds:
    seconds = block.forward.plus(block.backward).times(count)
    return seconds.plus(head) if is_last else seconds


def _hop(
    model: Transformer, layout: Layout, cluster: Cluster, stack: SoftwareStack, rings: Rings
) -> float:
    """The part of one message between stages that no computation hides.

    With ``tp``, each rank sends its part of what they all have, and they gather it in the next
    stage (Narayanan et al., arXiv 2104.04473, section 4.1).
    """
    if layout.pp == 1:
        return 0.0
    nbytes = WIDTH * layout.microbatch * model.seq / layout.cp * model.hidden
    rate = cluster.network * stack.rates.network / cluster.devices_per_host
    if not rings.message.between_hosts:
        rate = cluster.device.link * stack.rates.bus
    sent = stack.rates.message * nbytes / layout.tp / rate + rings.message.latency
    return sent + (0.0 if layout.sequence_parallel else rings.tp.one_pass(nbytes))


def _edges(model: Transformer, layout: Layout, stack: SoftwareStack, rings: Rings) -> float:
    """Gathers and reductions of embedding and head, and those of the first block: nothing is
    computed meanwhile."""
    if layout.shard == 1 or layout.sharded not in (
        ShardedStates.PARAMETERS,
        ShardedStates.GRADIENTS,
    ):
        return 0.0
    edge = (model.embedding_parameters + model.head_parameters) / layout.tp / layout.pp
    block = model.block_parameters / layout.tp
    gathers = rings.shard.one_pass(WIDTH * edge) * 2 + rings.shard.one_pass(WIDTH * block)
    return gathers + rings.shard.one_pass(stack.gradient_bytes * (edge + block))


def _reduce(
    model: Transformer,
    layout: Layout,
    stack: SoftwareStack,
    rings: Rings,
    count: int,
    backward: float,
) -> float:
    """Waiting for the reduction of gradients that no backward hides; 0 where shards are reduced."""
    if layout.shard > 1 and layout.sharded in (ShardedStates.PARAMETERS, ShardedStates.GRADIENTS):
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
    model: Transformer, layout: Layout, cluster: Cluster, stack: SoftwareStack, count: int
) -> float:
    elements = (count * model.block_parameters + model.embedding_parameters) / layout.tp
    shard = elements / (layout.shard if layout.sharded is not ShardedStates.NOTHING else 1)
    nbytes = _OPTIMIZER_BYTES * shard + _WEIGHT_BYTES * elements
    if layout.sharded is ShardedStates.PARAMETERS:
        nbytes = (_OPTIMIZER_BYTES + _WEIGHT_BYTES) * shard
    return nbytes / (cluster.device.bandwidth * stack.rates.optimizer)
