"""Checks before steps: which optimizers they run for, how often, and until when."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from echelon.modules.optimizer_hooks import (
    StepCheck,
    add_step_check,
    has_step_check,
    remove_step_check,
)


class Counting(StepCheck):
    """Counts the steps that it is called before."""

    def __init__(self) -> None:
        self.steps = 0

    def before_step(self, optimizer: Optimizer) -> None:
        self.steps += 1


class Other(Counting):
    """Another class of check."""


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


def test_a_check_runs_once_a_step_of_an_optimizer_that_has_one_of_its_parameters() -> None:
    watched, others, check = parameters(3), parameters(2), Counting()
    mine, foreign = SGD([*watched, *others], lr=1.0), SGD(others, lr=1.0)
    mine.step()
    add_step_check(watched, check)
    mine.step()
    foreign.step()
    assert check.steps == 1
    remove_step_check(watched, Counting)
    mine.step()
    assert check.steps == 1


def test_one_check_of_each_class_runs_the_last_one() -> None:
    params, first, last, other = parameters(1), Counting(), Counting(), Other()
    for check in (first, other, last):
        add_step_check(params, check)
    assert has_step_check(params[0], Other)
    SGD(params, lr=1.0).step()
    assert (first.steps, last.steps, other.steps) == (0, 1, 1)
    remove_step_check(params, Other)
    assert not has_step_check(params[0], Other)
    SGD(params, lr=1.0).step()
    assert (last.steps, other.steps) == (2, 1)


def test_parameters_that_an_optimizer_gets_later_are_noticed() -> None:
    params, late, check = parameters(1), parameters(1), Counting()
    add_step_check(late, check)
    optimizer = SGD(params, lr=1.0)
    optimizer.step()
    optimizer.param_groups[0]["params"] = late  # as many as before
    optimizer.step()
    assert check.steps == 1
    optimizer.param_groups[0]["params"] = params
    optimizer.add_param_group({"params": late})
    optimizer.step()
    assert check.steps == 2
