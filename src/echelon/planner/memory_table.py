"""The peaks of many layouts, from sizes that are computed once."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, final

from echelon.planner.layout import Layout, Recompute
from echelon.planner.layout_space import LayoutFamily, ScheduleChoice, ShardChoice
from echelon.planner.operations import PlannedModel
from echelon.planner.software_stack import SoftwareStack
from echelon.planner.stage_schedule import microbatches_under_way
from echelon.planner.stage_time import blocks_of_ranks
from echelon.planner.step_memory import (
    MicrobatchBytes,
    RankParts,
    microbatch_bytes,
    rank_activations,
    rank_states,
)


class _RankLoad(NamedTuple):
    parts: RankParts
    under_way: float


@final
class MemoryTable:
    """Peaks of the families of one search, to the byte those of ``step_memory``.

    Only the first two ranks and the last one of a pipeline are looked at: the first has the
    embedding, those after the second have neither more blocks nor more microbatches under way than
    it or the last one, and the last may have the head.
    """

    def __init__(self, model: PlannedModel, stack: SoftwareStack) -> None:
        self._model, self._stack = model, stack
        self._loads: dict[tuple[int, int], list[list[_RankLoad]]] = {}
        self._sizes: dict[tuple[int, int, int, Recompute, bool], MicrobatchBytes] = {}
        self._states: dict[tuple[int, int, int, int, int, RankParts], list[float]] = {}

    def peaks(self, family: LayoutFamily) -> list[float]:
        """Bytes of the rank that needs most, for each layout of a family in their order."""
        base = family.base
        sizes = self._microbatch_bytes(base)
        peaks = list[float]()
        for loads in self._rank_loads(family):
            ranks = []
            for parts, under_way in loads:
                nbytes = rank_activations(sizes, parts, under_way).total
                states = self._shard_states(base, parts, family.shards)
                ranks.append([of_states + nbytes for of_states in states])
            peaks += map(max, zip(*ranks, strict=True)) if len(ranks) > 1 else ranks[0]
        return peaks

    def _rank_loads(self, family: LayoutFamily) -> list[list[_RankLoad]]:
        base = family.base
        key = (base.pp, base.microbatches)
        loads = self._loads.get(key)
        if loads is None:
            loads = [self._of_schedule(base, choice) for choice in family.schedules]
            self._loads[key] = loads
        return loads

    def _of_schedule(self, base: Layout, choice: ScheduleChoice) -> list[_RankLoad]:
        layout = replace(base, **choice._asdict())
        counts = blocks_of_ranks(self._model.layers, layout)
        loads = [
            _RankLoad(
                RankParts.of(layout, counts, rank),
                microbatches_under_way(layout, rank) / layout.chunks,
            )
            for rank in sorted({0, min(1, layout.pp - 1), layout.pp - 1})
        ]
        return list(dict.fromkeys(loads))

    def _microbatch_bytes(self, base: Layout) -> MicrobatchBytes:
        key = (base.tp, base.cp, base.microbatch, base.recompute, base.sequence_parallel)
        sizes = self._sizes.get(key)
        if sizes is None:
            sizes = self._sizes[key] = microbatch_bytes(self._model, base, self._stack)
        return sizes

    def _shard_states(
        self, base: Layout, parts: RankParts, shards: tuple[ShardChoice, ...]
    ) -> list[float]:
        key = (base.tp, base.cp, base.ep, base.pp, base.dp, parts)
        states = self._states.get(key)
        if states is None:
            states = [
                rank_states(
                    self._model, replace(base, **choice._asdict()), self._stack, parts
                ).total
                for choice in shards
            ]
            self._states[key] = states
        return states
