"""What is saved by one layout is loaded by another, bit for bit."""

from pathlib import Path
from typing import Any

import pytest

import echelon as ec
from echelon.comm.world import World
from tests.checkpoint.layouts import LAYOUTS, Layout
from tests.checkpoint.whole import State, check_equal, whole_state

# Each layout saves and each loads at least twice; every pair and optimizer is in the long tests.
NAMES = list(LAYOUTS)
PAIRS = sorted(
    {(a, NAMES[(i * k + k) % len(NAMES)]) for i, a in enumerate(NAMES) for k in (1, 3, 5)}
)


def save(world: World, layout: Layout, optimizer: str, folder: Path) -> State:
    trainee = layout.trainee(world, optimizer)
    for step in range(2):
        trainee.train(step)
    ec.save(folder, step=2, model=trainee.model, optimizer=trainee.optimizer)
    return whole_state(trainee)


def load(world: World, layout: Layout, optimizer: str, folder: Path, trained: bool) -> Any:
    trainee = layout.trainee(world, optimizer, seed=1)
    if trained:
        trainee.train(0)
    loaded = ec.load(folder, model=trainee.model, optimizer=trainee.optimizer)
    assert loaded.step == world.step == 2
    return whole_state(trainee)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Saves each layout once, when it is first asked for."""
    known: dict[tuple[str, str], tuple[Path, State]] = {}

    def of(name: str, optimizer: str) -> tuple[Path, State]:
        if (name, optimizer) not in known:
            folder = tmp_path_factory.mktemp(name)
            layout = LAYOUTS[name]
            states = ec.run(save, layout.ranks, args=(layout, optimizer, folder))
            known[name, optimizer] = folder, states[0]
        return known[name, optimizer]

    return of


CASES = [
    (*pair, ("adamw-one" if "fsdp2-flat" in pair else "adamw", "sgd")[i % 2])
    for i, pair in enumerate(PAIRS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target", "optimizer"), CASES)
def test_model_and_optimizer_are_the_same_in_another_layout(
    saved: Any, source: str, target: str, optimizer: str
) -> None:
    folder, expected = saved(source, optimizer)
    layout = LAYOUTS[target]
    trained = len(source) % 2 == 0
    for state in ec.run(load, layout.ranks, args=(layout, optimizer, folder, trained)):
        check_equal(state, expected)


def test_there_are_at_least_36_pairs_of_technique_and_number_of_ranks() -> None:
    assert len(PAIRS) >= 36
