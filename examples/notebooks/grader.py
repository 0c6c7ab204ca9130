"""Grades exercises of the notebooks: weights, bytes sent, peak memory of each rank, and races."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import echelon as ec
from echelon.testing.device import Order, served_cuda, simulated_device

TOLERANCE = 1e-12  # sums of float64 in another order differ by less
TIMEOUT_S = 20

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What an exercise asks for.

    Attributes:
        title: a few words.
        ranks: on how many ranks it is graded.
        expected: the tensors of a rank by name, computed on one process.
        calls: the most communication calls of a rank; None: as many as it likes.
        sent: the most bytes that a rank may give to its group; None: as many as it likes.
        peak: the most bytes of tensors at a time on a rank; None: as many as it likes.
    """

    title: str
    ranks: int
    expected: Callable[[int], Weights]
    calls: int | None = None
    sent: int | None = None
    peak: int | None = None


@dataclass(frozen=True)
class Grade:
    """What is right of a solution and what is missing; the last line of a cell shows it."""

    title: str
    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing is missing."""
        return not self.wrong

    def __repr__(self) -> str:
        lines = [f"{self.title}: {'passed' if self.passed else 'not passed yet'}"]
        lines += [f"  right    {text}" for text in self.right]
        lines += [f"  missing  {text}" for text in self.wrong]
        return "\n".join(lines)


def grade(task: Task, solution: Callable[[ec.World], Weights]) -> Grade:
    """Run ``solution(world)`` on the ranks of a task, and compare what it returns and needs.

    A solution that raises, hangs or returns something else gets a grade that says so.
    """
    result = Grade(task.title)
    expected = [dict(task.expected(rank)) for rank in range(task.ranks)]

    def measured(world: ec.World) -> tuple[Any, ec.StepRecord]:
        with ec.StepRecord(world) as record:
            weights = solution(world)
        return weights, record

    try:
        outcomes = ec.run(measured, task.ranks, timeout=TIMEOUT_S)
    except NotImplementedError as error:
        names = ", ".join(expected[0])
        result.wrong.append(f"not solved yet: {error} (to return: {names})")
        return result
    except Exception as error:
        text = str(error).replace("\n", "\n           ")
        result.wrong.append(f"the ranks ended with {type(error).__name__}: {text}")
        return result
    _compare(result, expected, [weights for weights, _ in outcomes])
    records = [record for _, record in outcomes]
    _limit(result, "calls", [len(record.calls) for record in records], task.calls)
    _limit(result, "bytes sent", [record.sent_nbytes for record in records], task.sent)
    peaks = [record.peak_nbytes for record in records]
    _limit(result, "bytes of tensors at most", peaks, task.peak)
    return result


def grade_races(
    title: str, program: Callable[[], Any], expected: Any, steps: int | None = None
) -> Grade:
    """Run a program on a simulated GPU, with all work as late as it may be.

    Args:
        title: a few words.
        program: it returns what the host has read.
        expected: what it should return.
        steps: after how many the device has to be idle, where each operation of a stream takes one.
    """
    result = Grade(title)
    with simulated_device(Order.LAZY, costs=_steps_of) as device, served_cuda():
        try:
            values = program()
        except Exception as error:
            result.wrong.append(f"the program ended with {type(error).__name__}: {error}")
            return result
        report, needed = device.report(), round(device.finished_at())
    is_right = values == expected
    text = f"returned {values}" if is_right else f"returned {values} instead of {expected}"
    (result.right if is_right else result.wrong).append(text)
    for race in report.findings:
        places = f"first: {race.first}\n             second: {race.second}"
        result.wrong.append(f"{race.kind}\n             {places}")
    if not report:
        result.right.append("no races")
    if steps is not None:
        text = f"{needed} steps of the device, {steps} are allowed"
        (result.wrong if needed > steps else result.right).append(text)
    return result


def _steps_of(name: str, nbytes: int) -> float:
    return 0.0 if name == "allocation" else 1.0


def _compare(result: Grade, expected: list[dict[str, Tensor]], returned: list[Any]) -> None:
    wrong = []
    for rank, (values, weights) in enumerate(zip(expected, returned, strict=True)):
        if not isinstance(weights, Mapping):
            kind = type(weights).__name__
            wrong.append(f"rank {rank} returned {kind}; return a dict with {', '.join(values)}")
            continue
        wrong += [
            f"rank {rank}, {name}: {text}"
            for name, value in values.items()
            if (text := _difference(value, weights.get(name)))
        ]
    result.wrong.extend(wrong[:3])
    if len(wrong) > 3:
        result.wrong.append(f"and {len(wrong) - 3} more differences")
    if not wrong:
        names = ", ".join(expected[0])
        result.right.append(f"{names}: those of one process, on every rank")


def _difference(expected: Tensor, value: Any) -> str:
    """What is wrong with a tensor; empty if nothing is."""
    if not isinstance(value, Tensor):
        return f"is {type(value).__name__} and no tensor"
    if value.shape != expected.shape:
        return f"has the shape {list(value.shape)} instead of {list(expected.shape)}"
    if value.dtype != expected.dtype:
        return f"is {value.dtype} instead of {expected.dtype}"
    if value.dtype is torch.bool:
        return "" if torch.equal(value, expected) else "is not so"
    difference = (value.detach() - expected).abs().max().item() if expected.numel() else 0.0
    if difference <= TOLERANCE:  # False for NaN
        return ""
    return f"differs from one process by {difference:.2g}"


def _limit(result: Grade, what: str, counts: list[int], limit: int | None) -> None:
    if limit is None:
        return
    rank = max(range(len(counts)), key=counts.__getitem__)
    text = f"{counts[rank]:,} {what} on rank {rank}, {limit:,} are allowed"
    (result.wrong if counts[rank] > limit else result.right).append(text)
