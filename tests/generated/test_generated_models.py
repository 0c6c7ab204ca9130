"""Models that nobody designed are trained on many ranks as one process trains them.

These are the first seeds; ``tests/long`` runs many more. What fails is made smaller and printed.
"""

import pytest
import torch
from torch import nn

from tests.generated.campaign import run_batch, run_one
from tests.generated.draw import draw_case
from tests.generated.operations import Spec
from tests.generated.program import new_optimizer
from tests.generated.shrink import report

CHUNK = 20
SEEDS = {"fsdp": 200, "ddp": 60, "pipeline": 60}
CHUNKS = [(technique, first) for technique, end in SEEDS.items() for first in range(0, end, CHUNK)]


@pytest.mark.slow_for(*(str(first) for _, first in CHUNKS if first))
@pytest.mark.parametrize(("technique", "first"), CHUNKS)
def test_training_on_simulated_ranks_equals_one_process(technique: str, first: int) -> None:
    for seed in range(first, first + CHUNK):
        case = draw_case(seed, technique)
        outcome = run_one(case)
        assert not outcome.failed, report(case, outcome)


def sample(world: str) -> list[Spec]:
    """Cases of two ranks, of all techniques."""
    cases = [draw_case(seed, None, world) for seed in range(100)]
    return [case for case in cases if case["ranks"] == 2]


@pytest.mark.slow
@pytest.mark.parametrize("world", ["processes", "gloo"])
def test_training_on_processes_equals_one_process(world: str) -> None:
    cases = sample(world)
    for case, outcome in zip(cases, run_batch(cases), strict=True):
        assert not outcome.failed, report(case, outcome, smaller=False)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_steps_make_no_rounding_of_a_gradient_larger(optimizer: str) -> None:
    param = nn.Parameter(torch.zeros((), dtype=torch.float64))
    steps = new_optimizer({"optimizer": optimizer}, [param])
    for _ in range(3):  # as many as a case has
        param.grad = torch.full_like(param, 1e-13)
        steps.step()
    assert param.abs() <= 1e-13
