"""The time of a step as a sum of named terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import final

from echelon.planner.cluster import Cluster, HostMemory
from echelon.planner.collective_time import Rings, ring
from echelon.planner.compute_time import Seconds, work_seconds
from echelon.planner.layout import HostStates, Layout, Recompute, ShardedStates
from echelon.planner.operations import WIDTH, PlannedModel, block_work, head_work
from echelon.planner.software_stack import SoftwareStack
from echelon.planner.stage_schedule import bubble_of_a_stage, least_bubble
from echelon.planner.stage_time import (
    BlockTime,
    blocks_of_ranks,
    costs_of_stages,
    parts_of_block,
    passes_of_block,
    stage_seconds,
)

# AdamW in mixed precision reads and writes four numbers of 32 bits, which are master weight, two
# moments and gradient, and casts the weight to 16 bits, which reads 4 bytes and writes 2: for each
# element of a shard. The weight of 16 bits is read and written once more for each of the rank.
_OPTIMIZER_BYTES, _WEIGHT_BYTES = 38, 4
# On the host AdamW reads four numbers of 32 bits and writes three, and casts the weight, as above;
# a gradient of a microbatch is read in 16 bits and added in 32.
_HOST_BYTES, _ADDITION_BYTES = 34, 10
_BUCKET_BYTES = 25e6  # of gradients that are reduced while the backward runs, the default of DDP
# All that the times of a block and of a head depend on.
_OF_BLOCK = attrgetter("tp", "cp", "ep", "microbatch", "recompute", "sequence_parallel")
_OF_HEAD = attrgetter("tp", "cp", "microbatch")
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
) -> StepTime:
    """The time of one step of one layout, as ``LayoutTimer.step_time``."""
    return LayoutTimer(model, cluster, stack).step_time(layout, blocks)


@final
class LayoutTimer:
    """How long steps of a model take on a cluster; what many layouts share is computed once.

    Attributes:
        model: the model that is trained.
        cluster: the devices that train it.
        stack: the software that trains it.
        bubbles: the bubbles of simulated pipelines, by what they depend on.
    """

    def __init__(self, model: PlannedModel, cluster: Cluster, stack: SoftwareStack) -> None:
        self.model, self.cluster, self.stack = model, cluster, stack
        self.bubbles: dict[object, float] = {}
        self._ring = cache(partial(ring, cluster=cluster, rates=stack.rates))
        self._blocks: dict[object, BlockTime] = {}
        self._heads: dict[object, Seconds] = {}

    def step_time(self, layout: Layout, blocks: Sequence[int] | None = None) -> StepTime:
        """The time of one step.

        Args:
            blocks: of each rank of ``pp``; None: stages are cut evenly.

        Returns:
            the terms of the rank with the slowest stages. All its microbatches take it the time of
            the computing terms; until its first and after its last microbatch it waits for the
            other ranks, as long as the schedule says. Of a schedule without a closed form that is
            the least that it can be, and ``simulated_time`` has the rest.
        """
        rings, head = self.rings(layout), self.head(layout)
        block = self.block(layout, rings)
        counts = blocks_of_ranks(self.model.layers, layout) if blocks is None else list(blocks)
        hop = self.message(layout, rings)
        hops = layout.chunks * hop
        stages = stage_seconds(counts, block.total, head.total, hops, layout.head_rank)
        slowest = max(range(layout.pp), key=stages.__getitem__)
        bubble = self._bubble(layout, block, stages, head=head.total, hop=hop)
        compute = block.forward.plus(block.backward).times(counts[slowest])
        compute = compute.plus(head) if slowest == layout.head_rank else compute
        compute = compute.times(layout.microbatches)
        exchange = layout.microbatches * counts[slowest] * block.exchanged
        edges = self._edges(layout, rings)
        gather = layout.microbatches * (counts[slowest] * block.waiting + edges)
        message = 2 * layout.microbatches * hops
        busy = compute.total + exchange + gather + message + bubble
        parameters = counts[slowest] * self.model.block_parameters + self.model.embedding_parameters
        elements = parameters / layout.tp
        backward = counts[slowest] * block.backward.total
        return StepTime(
            **compute._asdict(),
            exchange=exchange,
            gather=gather,
            message=message,
            bubble=bubble,
            reduce=self._reduce(layout, rings, elements, backward),
            optimizer=self._optimizer(layout, elements),
            other=self.stack.rates.step_s + busy * self.drift(layout),
        )

    def least_seconds(self, layout: Layout) -> float:
        """No choice of ``shard``, ``sharded``, ``schedule`` and ``chunks`` makes a step faster.

        It has the computing terms of the slowest rank and the exchanges, and what grows with them;
        waiting, messages, bubble, reductions and the optimizer are taken as nothing.
        """
        block = self.computed_block(layout, self.rings(layout)).computed
        fewest, most = self.model.layers // layout.pp, -(-self.model.layers // layout.pp)
        slowest = max(most * block, fewest * block + self.head(layout).total)
        busy = layout.microbatches * slowest * (1 + self.drift(layout))
        return (busy + self.stack.rates.step_s) * (1 - ROUNDING)

    def stage_costs(self, layout: Layout) -> dict[str, list[float]]:
        """As ``costs_of_stages``."""
        rings = self.rings(layout)
        hop = self.message(layout, rings)
        block, head = self.block(layout, rings), self.head(layout).total
        return costs_of_stages(self.model.layers, layout, block, head, hop)

    def rings(self, layout: Layout) -> Rings:
        """Where the axes lie: ``tp`` is the fastest, then ``cp``, ``shard``, ``dp`` and ``pp``."""
        inner = layout.tp * layout.cp
        outer = inner * layout.shard
        return Rings(
            tp=self._ring(layout.tp, 1),
            cp=self._ring(layout.cp, layout.tp),
            ep=self._ring(layout.ep, inner),
            shard=self._ring(layout.shard, inner),
            dp=self._ring(layout.dp, outer),
            message=self._ring(min(2, layout.pp), outer * layout.dp),
        )

    def block(self, layout: Layout, rings: Rings) -> BlockTime:
        """One microbatch in one block, in a forward and a backward, with what it waits for."""
        block = self.computed_block(layout, rings)
        waiting = self._waiting(layout, rings, block)
        return block._replace(waiting=waiting) if waiting else block

    def computed_block(self, layout: Layout, rings: Rings) -> BlockTime:
        """One microbatch in one block without waiting for its parameters and their gradients."""
        key = _OF_BLOCK(layout)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = self._compute_block(layout, rings)
        return block

    def head(self, layout: Layout) -> Seconds:
        """One microbatch in embedding, head and loss, in a forward and a backward."""
        key = _OF_HEAD(layout)
        head = self._heads.get(key)
        if head is None:
            work = head_work(self.model, layout, self.stack.rates)
            head = self._heads[key] = work_seconds(work, self.cluster.device, self.stack)
        return head

    def message(self, layout: Layout, rings: Rings) -> float:
        """The part of one message between stages that no computation hides.

        With ``tp``, each rank sends its part of what they all have, and they gather it in the next
        stage (Narayanan et al., arXiv 2104.04473, section 4.1).
        """
        if layout.pp == 1:
            return 0.0
        cluster, stack, model = self.cluster, self.stack, self.model
        nbytes = stack.parameter_bytes * layout.microbatch * model.seq / layout.cp * model.hidden
        if rings.message.between_hosts:
            rate = cluster.network * stack.rates.network / cluster.devices_per_host
        else:
            rate = cluster.device.link * stack.rates.bus
        sent = stack.rates.message * nbytes / layout.tp / rate + rings.message.latency
        return sent + (0.0 if layout.sequence_parallel else rings.tp.one_pass(nbytes))

    def drift(self, layout: Layout) -> float:
        """The fraction by which a step takes longer on so many hosts."""
        hosts = max(1.0, layout.num_ranks / self.cluster.devices_per_host)
        return self.stack.rates.drift * math.log2(hosts)

    def host_copies(self, layout: Layout, elements: float) -> tuple[float, float]:
        """Seconds in which the shard of so many elements comes from the host, and its gradient
        goes there; 0 where the device keeps them."""
        if layout.offload is HostStates.NOTHING or self.cluster.host is None:
            return 0.0, 0.0
        shard = elements / layout.shard / self.cluster.host.link
        comes = self.stack.parameter_bytes * shard if layout.offload is HostStates.ALL else 0.0
        return comes, self.stack.gradient_bytes * shard

    def _compute_block(self, layout: Layout, rings: Rings) -> BlockTime:
        """One microbatch in one block, computed and exchanged.

        With ``tp``, a forward has two all-reduces of the residual stream, and so has a backward
        (Shoeybi et al., arXiv 1909.08053, section 3). With sequence parallelism each is a
        reduce-scatter and an all-gather, which move as much (Korthikanti et al., arXiv 2205.05198,
        section 4.2.2).
        """
        passes = block_work(self.model, layout, self.stack)
        seconds = partial(work_seconds, device=self.cluster.device, stack=self.stack)
        exchange = self._exchange(layout, rings)
        forward = seconds(passes.forward, exchanged=exchange)
        backward = seconds(passes.backward, exchanged=exchange)
        weights = backward.matmul / 2  # the other half are gradients of inputs
        if layout.recompute is Recompute.BLOCKS:
            work = passes.backward.plus(passes.forward)
            backward = seconds(work, exchanged=2 * exchange)
        elif layout.recompute is Recompute.ATTENTION:
            backward = backward.plus(Seconds(attention=forward.attention))
        return BlockTime(forward, backward, passes_of_block(layout) * exchange, weights)

    def _exchange(self, layout: Layout, rings: Rings) -> float:
        """Seconds of collectives of one pass through a block, forward or backward."""
        model = self.model
        tokens = layout.microbatch * model.seq / layout.cp
        nbytes = WIDTH * tokens * model.hidden
        seconds = 2 * rings.tp.all_reduce(nbytes)
        if layout.cp > 1:  # keys and values go round (Liu et al., arXiv 2310.01889, section 3)
            kv_bytes = 2 * WIDTH * tokens * model.kv_heads * model.head_dim / layout.tp
            seconds += rings.cp.one_pass(kv_bytes * layout.cp)
        if layout.ep > 1:  # tokens go to their experts and back
            seconds += 2 * rings.ep.one_pass(nbytes * model.active_experts)
        return seconds

    def _waiting(self, layout: Layout, rings: Rings, block: BlockTime) -> float:
        """Seconds in which a block waits for its parameters or for the reduction of its gradients.

        The next block's gather and the last one's reduction run while this block computes, so the
        longer one counts, and part of the shorter one, because they share memory and processors. A
        shard that the host keeps is copied before its gather, and its gradient after its reduction.
        """
        if not layout.shards_gradients:
            return 0.0
        stack = self.stack
        forward, backward = block.forward.total, block.backward.total
        elements = self.model.block_parameters / layout.tp
        gather = rings.shard.one_pass(stack.parameter_bytes * elements)
        reduce = rings.shard.one_pass(stack.gradient_bytes * elements)
        reduce += rings.dp.all_reduce(stack.gradient_bytes * elements / layout.shard)
        from_host, to_host = self.host_copies(layout, elements)
        gather, reduce = gather + from_host, reduce + to_host
        gathers_again = layout.sharded is ShardedStates.PARAMETERS
        contention = stack.rates.contention

        def lost(compute: float, collective: float) -> float:
            return max(0.0, collective - compute) + contention * min(compute, collective)

        if not gathers_again and layout.microbatches > 1:
            return lost(backward, reduce)  # parameters stay whole from one microbatch to the next
        return lost(forward, gather) + lost(backward, gather * gathers_again + reduce)

    def _bubble(
        self, layout: Layout, block: BlockTime, stages: Sequence[float], *, head: float, hop: float
    ) -> float:
        """By the closed form of the schedule, or the least that it can be."""
        if not layout.has_closed_form:
            costs = costs_of_stages(self.model.layers, layout, block, head, hop)
            return least_bubble(layout, costs, [layout.microbatches * stage for stage in stages])
        forward, inputs, weights = parts_of_block(layout, block)
        part = bubble_of_a_stage(layout, forward, inputs, weights) / (forward + inputs + weights)
        return (sum(stages) - max(stages)) * part

    def _edges(self, layout: Layout, rings: Rings) -> float:
        """Gathers and reductions of embedding and head, and those of the first block: nothing is
        computed meanwhile."""
        if not layout.shards_gradients:
            return 0.0
        model, stack = self.model, self.stack
        edge = (model.embedding_parameters + model.head_parameters) / layout.tp / layout.pp
        block = model.block_parameters / layout.tp
        width = stack.parameter_bytes
        gathers = rings.shard.one_pass(width * edge) * 2 + rings.shard.one_pass(width * block)
        from_host, to_host = self.host_copies(layout, edge)
        block_from_host, block_to_host = self.host_copies(layout, block)
        copies = 2 * from_host + to_host + block_from_host + block_to_host
        return copies + gathers + rings.shard.one_pass(stack.gradient_bytes * (edge + block))

    def _reduce(self, layout: Layout, rings: Rings, elements: float, backward: float) -> float:
        """Waiting for the reduction of gradients that no backward hides; 0 where shards are
        reduced."""
        if layout.shards_gradients:
            return 0.0
        stack = self.stack
        nbytes = stack.gradient_bytes * elements
        buckets = math.ceil(nbytes / _BUCKET_BYTES) if stack.overlaps_reduction else 1
        bucket = nbytes / buckets
        shards = 2 * rings.shard.one_pass(bucket)  # gradients are scattered, and weights gathered
        seconds = buckets * (shards + rings.dp.all_reduce(bucket / layout.shard))
        if not stack.overlaps_reduction:
            return seconds
        # By the backward of the last microbatch; nothing is left of it that hides the last bucket.
        hidden = min(seconds * (1 - 1 / buckets), backward)
        return seconds - hidden + stack.rates.contention * hidden

    def _optimizer(self, layout: Layout, elements: float) -> float:
        shard = elements / (layout.shard if layout.sharded is not ShardedStates.NOTHING else 1)
        if layout.offload is not HostStates.NOTHING and self.cluster.host is not None:
            return self._on_host(layout, self.cluster.host, shard)
        whole = shard if layout.sharded is ShardedStates.PARAMETERS else elements
        nbytes = _OPTIMIZER_BYTES * shard + _WEIGHT_BYTES * whole
        return nbytes / (self.cluster.device.bandwidth * self.stack.rates.optimizer)

    def _on_host(self, layout: Layout, host: HostMemory, shard: float) -> float:
        """The update of a shard by the host, and what no computation hides of copies.

        The devices of a host share the bandwidth of its memory. All but sharded gradients are
        copied after the last backward.
        """
        accumulated = 0 if layout.sharded is ShardedStates.OPTIMIZER else layout.microbatches
        nbytes = _HOST_BYTES + _ADDITION_BYTES * accumulated
        seconds = nbytes * shard * self.cluster.devices_per_host / host.bandwidth
        if layout.sharded is ShardedStates.OPTIMIZER:
            seconds += self.stack.gradient_bytes * shard / host.link
        if layout.offload is HostStates.OPTIMIZER:  # with ALL, each gather copies
            seconds += self.stack.parameter_bytes * shard / host.link
        return seconds
