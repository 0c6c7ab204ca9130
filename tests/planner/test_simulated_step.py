import random
from dataclasses import replace

import pytest

from echelon.pipeline.schedules.families import schedule
from echelon.pipeline.schedules.simulate import simulate
from echelon.planner.layout import Layout
from echelon.planner.simulated_step import simulated_bubble, simulated_time
from echelon.planner.step_time import LayoutTimer
from tests.planner.sizes import MODEL, STACK, cluster

SCHEDULES = [
    (None, 1), (None, 2), (None, 4), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2),
    ("dualpipe-v", 2), ("v-half", 2), ("v-min", 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
@pytest.mark.parametrize("seed", range(6))
def test_few_rounds_say_how_long_many_take(name: str | None, chunks: int, seed: int) -> None:
    draw = random.Random(seed)
    pp = draw.choice([2, 4, 8])
    layout = Layout(pp=pp, microbatches=draw.randint(4 * pp, 8 * pp), chunks=chunks, schedule=name)
    forward = [draw.choice([2.0, 2.0, 1.0]) for _ in range(pp * chunks)]
    costs = {"F": forward, "I": [1.2 * f for f in forward], "W": [0.8 * f for f in forward]}
    costs["F"][-1] += 1.0  # the head
    actions = schedule(layout.schedule_name, pp * chunks, layout.microbatches, pp)
    simulation = simulate(actions, costs)
    seconds = simulated_bubble(layout, costs) + max(simulation.busy)
    assert seconds == pytest.approx(simulation.makespan, rel=0.03)


def test_equal_stages_have_the_bubble_of_the_closed_form() -> None:
    model = replace(MODEL, layers=16, vocab=1)
    timer = LayoutTimer(model, cluster(1, 4), STACK)
    for name, chunks in SCHEDULES:
        layout = Layout(pp=4, microbatches=16, chunks=chunks, schedule=name)
        closed = timer.step_time(layout)
        simulated = simulated_time(timer, layout, closed)
        if not layout.has_closed_form:
            assert closed.bubble <= simulated.bubble
            continue
        assert simulated.total == pytest.approx(closed.total, rel=0.01), layout


def test_the_last_stage_has_the_head_and_all_stages_their_messages() -> None:
    timer = LayoutTimer(replace(MODEL, layers=5), cluster(1, 2), STACK)
    layout = Layout(pp=2, microbatches=4)
    forward = timer.stage_costs(layout)["F"]
    block = timer.block(layout, timer.rings(layout)).forward.total
    hop = 2 * 2048 * 1024 / 200e9
    head = timer.head(layout).total / 3
    assert forward == pytest.approx([3 * block + hop, 2 * block + hop + head])


def test_without_a_pipeline_nothing_is_simulated() -> None:
    timer = LayoutTimer(MODEL, cluster(1, 2), STACK)
    time = timer.step_time(Layout(dp=2))
    assert simulated_time(timer, Layout(dp=2), time) is time
