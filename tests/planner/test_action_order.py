import random

import pytest

from echelon.pipeline.schedules.families import schedule
from echelon.pipeline.schedules.simulate import simulate
from echelon.planner.simulated_step import action_order

NAMES = {
    "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-h2": 1, "zb-v": 2,
    "dualpipe-v": 2, "v-half": 2, "v-min": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_its_bubble_is_that_of_the_simulation(name: str, seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 5])
    stages, microbatches = ranks * NAMES[name], ranks * draw.choice([2, 3])
    order = action_order(name, stages, microbatches, ranks)
    for _ in range(3):  # the same walk serves all costs
        costs = {kind: [draw.uniform(0.1, 2.0) for _ in range(stages)] for kind in "FIW"}
        simulation = simulate(schedule(name, stages, microbatches, ranks), costs)
        expected = simulation.makespan - max(simulation.busy)
        assert order.bubble(costs) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_one_rank_has_no_bubble() -> None:
    costs = {"F": [1.0], "I": [2.0], "W": [3.0]}
    assert action_order("1f1b", 1, 4, 1).bubble(costs) == 0


def test_the_walk_of_a_schedule_is_kept() -> None:
    assert action_order("v-min", 4, 4, 2) is action_order("v-min", 4, 4, 2)
