"""The bar of "who held us up": rank and activity are named in each world and by each technique."""

import dataclasses
import gc
import importlib.util
import mmap
import re
import sys
import time
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import echelon as ec
from echelon import testing
from echelon.diagnosis.step_rows import RankSteps
from echelon.observe import Activity, HeldUp, held_up
from tests.worlds import KINDS, run_world

_FOLDER = Path(__file__).parents[2] / "benchmarks"


def _slow_training() -> ModuleType:
    """The module of the benchmark of verdicts, which trains in the same way."""
    spec = importlib.util.spec_from_file_location("slow_training", _FOLDER / "slow_training.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["slow_training"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


slow_training = _slow_training()
RANKS, STEPS = slow_training.RANKS, 7
BACKWARD_S, LOADING_S = slow_training.BACKWARD_S, slow_training.LOADING_S
TRAINING = slow_training.SlowTraining(steps=STEPS, width=32, layers=1, microbatches=3, rows=3)


def verdict_of(world: ec.World, technique: str, *seconds: float) -> list[HeldUp]:
    world.steps.stop()
    world.step = 0  # the steps of a new optimizer count from here
    world.steps.count()
    world.steps.measure()
    TRAINING.run(world, technique, *seconds)
    assert RankSteps.of(world.rank, world.steps.time.rows.numbers()).num_steps == STEPS
    return held_up(world)


def verdicts_of(world: ec.World, technique: str) -> tuple[list[HeldUp], list[HeldUp]]:
    """With both delays, and without any."""
    slow = verdict_of(world, technique, BACKWARD_S, LOADING_S)
    return slow, verdict_of(world, technique, 0.0, 0.0)


@cache
def verdicts(kind: str, technique: str) -> list[tuple[list[HeldUp], list[HeldUp]]]:
    return run_world(kind, verdicts_of, RANKS, args=(technique,))


@pytest.mark.slow
@pytest.mark.parametrize("technique", slow_training.TECHNIQUES)
@pytest.mark.parametrize("kind", KINDS)
def test_slow_backward_and_slow_loading_are_named_on_all_ranks(kind: str, technique: str) -> None:
    (slow, _), *others = verdicts(kind, technique)
    assert [costs for costs, _ in others] == [slow] * (RANKS - 1)
    assert {(cost.rank, cost.activity) for cost in slow} == {
        (1, Activity.BACKWARD),
        (2, Activity.LOADING),
    }
    seconds = {cost.rank: cost.seconds for cost in slow}
    assert seconds[1] == pytest.approx(BACKWARD_S, rel=0.25)
    assert seconds[2] == pytest.approx(LOADING_S, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("technique", slow_training.TECHNIQUES)
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_slow_rank_there_is_no_verdict(kind: str, technique: str) -> None:
    assert [costs for _, costs in verdicts(kind, technique)] == [[]] * RANKS


def train_many_microbatches(world: ec.World) -> list[HeldUp]:
    training = dataclasses.replace(TRAINING, microbatches=32, rows=32)
    training.run(world, "Pipeline", 0.0, 0.0)
    return held_up(world)


@pytest.mark.slow
def test_a_stage_that_has_more_messages_than_others_is_not_named() -> None:
    # That in the middle sends to both sides, and receives from both.
    assert ec.run(train_many_microbatches, RANKS) == [[]] * RANKS


class SlowToFree:
    """An item that refers to itself, so that only a garbage collection frees it."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0.02)


def collect_in_each_step(world: ec.World) -> list[tuple[int, Activity]]:
    for _ in range(STEPS):
        if world.rank == 1:
            SlowToFree()
            gc.collect()
        world.group.barrier()
        world.step += 1
    return [(cost.rank, cost.activity) for cost in held_up(world)]


@pytest.mark.slow
def test_simulated_ranks_share_the_cost_of_garbage_collections() -> None:
    assert ec.run(collect_in_each_step, 2, "threads") == [[]] * 2


def touch_new_memory(world: ec.World) -> list[str]:
    """What is said of a rank that gets memory from the kernel in each step."""
    for _ in range(STEPS):
        if world.rank == 1:
            with mmap.mmap(-1, 48 << 20) as memory:
                for start in range(0, len(memory), mmap.PAGESIZE):
                    memory[start] = 1
        world.group.barrier()
        world.step += 1
    return [str(cost) for cost in held_up(world)]


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_page_faults_are_named(kind: str) -> None:
    (line,), _ = ec.run(touch_new_memory, 2, kind)
    match = re.search(r"with ([0-9,]+) page faults more than others", line)
    assert line.startswith("rank 1 cost ")
    assert match is not None
    assert int(match[1].replace(",", "")) > 10_000


def train_and_ask(world: ec.World) -> list[tuple[int, Activity]]:
    TRAINING.run(world, "DDP", 0.0, 0.0)
    return [(cost.rank, cost.activity) for cost in held_up(world)]


@pytest.mark.slow
def test_a_rank_that_dawdles_before_its_calls_in_backward_is_named() -> None:
    # Each step has one call: the model fits into a bucket.
    named = testing.run_faulty(train_and_ask, 2, testing.slow(0.05), rank=1, timeout=60.0)
    assert named == [[(1, Activity.BACKWARD)]] * 2
