"""What arrives in a store when its save was given up, and what replaces a step there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from fsspec.implementations import memory

import echelon as ec
from echelon.checkpoint.place import storage_of
from echelon.checkpoint.store_path import StorePath
from echelon.errors import CheckpointError
from echelon.process import time_limits
from tests.checkpoint.stores import objects, store
from tests.checkpoint.test_object_store import model_of

__all__ = ["store"]  # a fixture


@pytest.mark.parametrize("late", ["close", "pipe_file"], ids=["file", "manifest"])
def test_an_upload_that_arrives_late_changes_no_step(
    store: str, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The first call of its kind is carried out when a second save of the step has ended."""
    monkeypatch.setattr(time_limits, "STORE_CALL_S", 0.3)
    arrives, threads = threading.Event(), []
    owner: Any = memory.MemoryFile if late == "close" else memory.MemoryFileSystem
    real = getattr(owner, late)

    def call(self: Any, *given: Any, **named: Any) -> Any:
        if threading.current_thread().name == "echelon store" and not threads:
            threads.append(threading.current_thread())
            assert arrives.wait(60)
        return real(self, *given, **named)

    monkeypatch.setattr(owner, late, call)
    with pytest.raises(CheckpointError, match=r"the store has not answered for 0\.3 s"):
        ec.save(store, step=1, model=model_of(0), rng=False)
    assert ec.steps(store) == []
    if late == "pipe_file":  # until it is known what becomes of it, nobody else commits this step
        with pytest.raises(CheckpointError, match="has not answered an earlier call"):
            ec.save(store, step=1, model=model_of(1), rng=False)
        ec.save(store, step=2, model=model_of(2), rng=False)
        left = {1: 0, 2: 2}
    else:
        ec.save(store, step=1, model=model_of(1), rng=False)
        left = {1: 1}
    arrives.set()
    threads[0].join()
    assert ec.steps(store) == [*left]
    for step, seed in left.items():
        model = model_of(9)
        ec.load(store, step=step, model=model)
        assert torch.equal(model[0].weight, model_of(seed)[0].weight)


def test_an_overwritten_step_has_the_new_files_and_later_steps_go(store: str) -> None:
    for step in (1, 2, 3):
        ec.save(store, step=step, model=model_of(step))
    ec.save(store, step=2, model=model_of(7), overwrite=True)
    assert (ec.steps(store), len(objects(store))) == ([1, 2], 4)
    model = model_of(0)
    assert ec.load(store, model=model).step == 2
    assert torch.equal(model[0].weight, model_of(7)[0].weight)


def test_nobody_saves_among_the_steps_of_another_writer(store: str) -> None:
    storage_of(StorePath(store)).claim(StorePath(store), "accelerate")
    with pytest.raises(CheckpointError, match="holds steps that save_state of Accelerate"):
        ec.save(store, step=1, model=model_of(0), keep=1)
