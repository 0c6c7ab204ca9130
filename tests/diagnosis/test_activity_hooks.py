import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

from echelon.diagnosis import activity_hooks
from echelon.diagnosis.rank_monitor import StepCounter
from echelon.diagnosis.step_rows import Activity, RankSteps
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
NAP_S = 0.1


def nap(*args: Any) -> None:
    time.sleep(NAP_S)


@pytest.fixture
def steps() -> Iterator[StepCounter]:
    """What counts and measures this thread as a rank, after a step that warms up."""
    counter = StepCounter()
    counter.count()
    counter.measure()
    layer = nn.Linear(2, 2)
    one_step(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    gc.disable()
    yield counter
    gc.enable()
    counter.stop()


def naps(steps: StepCounter) -> set[Activity]:
    """The activities that took a nap since the step of the fixture."""
    steps.time.end_step()
    rows = RankSteps.of(0, steps.time.rows.numbers()).steps
    spans = rows[max(rows)].spans_ns
    own = set(Activity) - {Activity.PROCESSOR}
    return {activity for activity in own if spans[activity] > 0.9e9 * NAP_S}


def one_step(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    optimizer.step()


def test_backward_is_seen(steps: StepCounter) -> None:
    layer = nn.Linear(2, 2)
    layer.register_full_backward_hook(nap)
    one_step(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    assert naps(steps) == {Activity.BACKWARD}


def test_the_step_of_an_optimizer_is_seen(steps: StepCounter) -> None:
    layer = nn.Linear(2, 2)

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            nap()

    one_step(layer, Slow(layer.parameters(), lr=0.1))
    assert naps(steps) == {Activity.OPTIMIZER}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_next_batch_of_a_loader_is_seen(steps: StepCounter, num_workers: int) -> None:
    class Data(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            time.sleep(1.5 * NAP_S)
            return index

    context = "fork" if num_workers else None
    for _ in DataLoader(Data(), num_workers=num_workers, multiprocessing_context=context):
        pass
    layer = nn.Linear(2, 2)
    one_step(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    assert Activity.LOADING in naps(steps)
    assert Activity.BACKWARD not in naps(steps)


def test_a_garbage_collection_is_seen(steps: StepCounter) -> None:
    class Slow:
        def __del__(self) -> None:
            nap()

    item = Slow()
    item.__dict__["itself"] = item
    del item
    gc.collect()
    layer = nn.Linear(2, 2)
    one_step(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    assert naps(steps) == {Activity.COLLECTING}


def installs_and_removes() -> None:
    """Install for two ranks, and remove what was installed."""
    backward, load = vars(torch.autograd)["_engine_run_backward"], _BaseDataLoaderIter.__next__
    callbacks = list(gc.callbacks)
    activity_hooks.install()
    activity_hooks.install()
    assert vars(torch.autograd)["_engine_run_backward"] is not backward
    activity_hooks.remove()
    assert _BaseDataLoaderIter.__next__ is not load
    activity_hooks.remove()
    assert vars(torch.autograd)["_engine_run_backward"] is backward
    assert _BaseDataLoaderIter.__next__ is load
    assert gc.callbacks == callbacks


@pytest.mark.slow
def test_what_was_replaced_is_put_back_with_the_last_rank() -> None:
    # In a process without ranks that the tests before have left behind.
    done = run_python("-c", f"import {__name__} as test; test.installs_and_removes()", cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_replacement_of_somebody_else_stays() -> None:
    backward = vars(torch.autograd)["_engine_run_backward"]
    activity_hooks.install()
    ours = vars(torch.autograd)["_engine_run_backward"]

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    torch.autograd._engine_run_backward = theirs  # type: ignore[attr-defined]
    try:
        activity_hooks.remove()
        assert vars(torch.autograd)["_engine_run_backward"] is theirs
    finally:
        torch.autograd._engine_run_backward = backward  # type: ignore[attr-defined]
