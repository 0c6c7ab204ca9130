from dataclasses import replace

import pytest

from echelon.planner.layout_space import SearchLimits, families
from echelon.planner.memory_table import MemoryTable
from echelon.planner.step_memory import step_memory
from tests.planner.sizes import HOST, MODEL, STACK, cluster


@pytest.mark.slow
@pytest.mark.parametrize("layers", [4, 6, 11, 14, 21])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab", [512, 300_000])
def test_the_peaks_are_to_the_byte_those_of_the_rank_that_needs_most(
    layers: int, tied: bool, vocab: int
) -> None:
    model = replace(MODEL, layers=layers, tied=tied, vocab=vocab)
    table = MemoryTable(model, STACK)
    place = replace(cluster(2, 4), host=HOST)
    for family in families(model, place, SearchLimits(global_batch=32)):
        for schedule, row in zip(family.schedules, table.peaks(family), strict=True):
            for shard, peak in zip(family.shards, row, strict=True):
                layout = family.layout(schedule, shard)
                assert peak == step_memory(model, layout, STACK).total, layout
