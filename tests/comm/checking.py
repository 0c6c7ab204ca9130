"""Many checks in one start of ranks, each of them still a test of its own.

A check is a function of a module that takes a ``Group`` and raises where something is wrong. All
ranks run the checks one after another; the first that fails ends the run and is named.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

from echelon.comm.world import World
from tests.comm.gloo_ranks import run_gloo
from tests.worlds import run_world

TIMEOUT_S = 30.0  # of one call


def checks_of(*modules: ModuleType) -> list[str]:
    """The checks of ``modules``, in their order, as ``module:check``."""
    return [
        f"{module.__name__}:{name}"
        for module in modules
        for name, value in vars(module).items()
        if name.startswith("check_") and value.__module__ == module.__name__
    ]


def run_checks(world: World, names: Sequence[str]) -> int:
    """Run checks on this rank, one after another."""
    for name in names:
        module, check = name.split(":")
        try:
            getattr(importlib.import_module(module), check)(world.group)
            world.group.barrier(label=f"end of {name}")
        except Exception as error:
            error.add_note(f"in {name}")
            raise
    return len(names)


@dataclass
class Outcome:
    """How a run of checks ended."""

    names: list[str]
    error: BaseException | None

    def require(self, name: str) -> None:
        """Fail unless the check ``name`` has passed."""
        if self.error is None:
            return
        notes = getattr(self.error, "__notes__", [])
        failed = next((name for name in self.names if f"in {name}" in notes), None)
        if failed is None or failed == name:
            raise self.error
        if self.names.index(name) > self.names.index(failed):
            pytest.fail(f"not reached, because {failed} failed")


def outcome_of(kind: str, ranks: int, names: list[str], **options: bool) -> Outcome:
    """Run checks in one world, and take down how it ended.

    Args:
        options: of ``run_gloo``.
    """
    try:
        if kind == "gloo":
            run_gloo(run_checks, ranks, args=(names,), timeout=TIMEOUT_S, **options)
        else:
            run_world(kind, run_checks, ranks, (names,), timeout=TIMEOUT_S)
    except Exception as error:
        return Outcome(names, error)
    return Outcome(names, None)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaNs and zeros of both signs compare as they lie."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def same(found: Tensor, expected: Tensor, what: str = "") -> None:
    """Require the same dtype, shape and bits."""
    if (
        found.dtype != expected.dtype
        or found.shape != expected.shape
        or not torch.equal(bits(found), bits(expected))
    ):
        raise AssertionError(f"{what}: found {found}, expected {expected}")


def refuses(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    """Require that ``call`` raises ``kind`` with ``words`` in its sentence."""
    try:
        call()
    except kind as error:
        if words not in str(error):
            raise AssertionError(f"{words!r} is not in {error}") from error
    else:
        raise AssertionError(f"no {kind.__name__} with {words!r}")
