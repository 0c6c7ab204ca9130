from dataclasses import replace

import pytest

from echelon.planner.layout_space import LayoutSpace, SearchLimits
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
    for family in LayoutSpace(model, place, STACK, SearchLimits(global_batch=32)).families():
        for layout, peak in zip(family.layouts(), table.peaks(family), strict=True):
            assert peak == step_memory(model, layout, STACK).total, layout
