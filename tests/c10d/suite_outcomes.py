"""What outcomes of PyTorch's generic tests mean: which of them say something about echelon."""

from __future__ import annotations

import re
from typing import NamedTuple


class Setting(NamedTuple):
    """In which ranks tests run, and what they are told.

    Attributes:
        world: ``"threads"``, ``"processes"``, or ``"gloo"``: processes with torch's own backend.
        size: how many ranks.
        backend: of which tests know the name, ``"echelon"`` or ``"gloo"``.
    """

    world: str
    size: int
    backend: str


# What fails for a name: where, by the beginning of "world/backend", which tests, and why.
NOT_OURS = (
    (
        ("threads/echelon", "processes/echelon"),
        r"test_monitored_barrier_.*",
        "torch.distributed refuses it to all backends but gloo, by name",
    ),
    (
        ("threads/", "processes/"),
        r"test_barrier_timeout_(full_)?group",
        "expects the words of gloo in the error; test_process_group has ours",
    ),
    (
        ("threads/gloo", "processes/gloo"),
        r"test_ddp_logging_data_cpu",
        "expects DDP to log the name gloo, and it logs the name of the group that it has: echelon",
    ),
    (
        ("threads/",),
        r"test_get_rank",
        "counts ranks by the numbers of their processes, and simulated ranks are one process",
    ),
)
# Why PyTorch's own decorators leave a test out here: the whole reason, or its beginning.
LEFT_OUT_BY_PYTORCH = (
    "Need at least 2 CUDA devices",
    "Need at least 4 CUDA devices",
    "CUDA is not available.",
    "no torchvision",
    "https://github.com/pytorch/pytorch/issues/",  # broken everywhere
    "Test is failing, see https://github.com/pytorch/pytorch/",
    "Skipped due to flakiness",
    "Only Nccl supports ",
    "Only NCCL supports CUDA all_to_all",
    "Only NCCL backend supports high priority stream",
    "NCCL Batch Send Recv Only",
    "NCCL Send Recv Only",
    "Coalescing manager currently tests with NCCL only",
    "Test requires backend gloo to be one of {'nccl'}",
    "Requires file:// initialization method.",
    "Test is failing, tracking issue at https://github.com/pytorch/pytorch/",  # torch 2.11
    "Currently failing in NVIDIA internal CI",  # torch 2.11
    "Tests nccl metadata primarily.",  # torch 2.11
)
# The same in a world of two ranks: subgroups of ranks 1 and 2, and tests for four ranks.
LEFT_OUT_ON_TWO_RANKS = (
    "Skipped due to small world size.",
    "Test requires world size of 4",
    "Test requires an exact world size of 4",
)


def reason_not_ours(name: str, setting: Setting) -> str | None:
    """Why a test says nothing about echelon there; None where it does.

    Example:
        >>> reason_not_ours("test_get_rank", Setting("processes", 4, "echelon")) is None
        True
    """
    place = f"{setting.world}/{setting.backend}"
    for places, pattern, reason in NOT_OURS:
        if place.startswith(places) and re.fullmatch(pattern, name):
            return reason
    return None


def is_left_out(outcome: str, size: int) -> bool:
    """Whether PyTorch itself does not run a test there."""
    reasons = LEFT_OUT_BY_PYTORCH + (LEFT_OUT_ON_TWO_RANKS if size == 2 else ())
    return outcome.startswith(tuple(f"skipped: {reason}" for reason in reasons))


class Sorted(NamedTuple):
    """Names of tests by what became of them on all ranks."""

    passed: list[str]
    left_out: list[str]
    failed: list[str]


def sort(outcomes: dict[str, set[str]], size: int) -> Sorted:
    """Sort tests by the outcomes that their ranks had."""
    passed = [name for name, seen in outcomes.items() if seen == {"passed"}]
    left_out = [
        name for name, seen in outcomes.items() if all(is_left_out(each, size) for each in seen)
    ]
    return Sorted(passed, left_out, sorted({*outcomes} - {*passed, *left_out}))
