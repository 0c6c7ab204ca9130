"""Costs that many layouts share, each computed once."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from echelon.planner.cluster import Cluster
from echelon.planner.collective_time import Ring, Rings, ring
from echelon.planner.compute_time import Seconds
from echelon.planner.layout import Layout, Recompute
from echelon.planner.operations import PlannedModel
from echelon.planner.software_stack import SoftwareStack
from echelon.planner.stage_time import BlockTime, computed_block, head_time, waiting_of_block


@final
class CostTable:
    """The times of blocks, heads and rings by what they depend on."""

    def __init__(self, model: PlannedModel, cluster: Cluster, stack: SoftwareStack) -> None:
        self._model, self._cluster, self._stack = model, cluster, stack
        self._rings: dict[tuple[int, int], Ring] = {}
        self._blocks: dict[tuple[int, int, int, int, Recompute, bool], BlockTime] = {}
        self._heads: dict[tuple[int, int, int], Seconds] = {}

    def rings(self, layout: Layout) -> Rings:
        """As ``rings_of``."""
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

    def computed_block(self, layout: Layout, rings: Rings) -> BlockTime:
        """As ``stage_time.computed_block``."""
        key = (
            layout.tp, layout.cp, layout.ep, layout.microbatch, layout.recompute,
            layout.sequence_parallel,
        )  # fmt: skip
        block = self._blocks.get(key)
        if block is None:
            block = computed_block(self._model, layout, self._cluster, self._stack, rings)
            self._blocks[key] = block
        return block

    def block(self, layout: Layout, rings: Rings) -> BlockTime:
        """As ``stage_time.block_time``."""
        block = self.computed_block(layout, rings)
        waiting = waiting_of_block(self._model, layout, self._cluster, self._stack, rings, block)
        return replace(block, waiting=waiting) if waiting else block

    def head(self, layout: Layout) -> Seconds:
        """As ``stage_time.head_time``."""
        key = (layout.tp, layout.cp, layout.microbatch)
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = head_time(self._model, layout, self._cluster, self._stack)
        return head

    def _ring(self, size: int, stride: int) -> Ring:
        cached = self._rings.get((size, stride))
        if cached is None:
            cached = ring(size, stride, self._cluster, self._stack.rates)
            self._rings[size, stride] = cached
        return cached
