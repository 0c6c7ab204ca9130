"""Compares what a rank has with what one process has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

import echelon as ec
from tests.generated.operations import Spec
from tests.generated.program import Record
from tests.generated.trees import has, walk

TOLERANCE = 1e-12  # relative to the largest element, or to 1: sums over ranks have another order
ROUNDED = 1e-4  # where gradients are reduced in float32
_tolerance = ContextVar("tolerance", default=TOLERANCE)


@contextmanager
def tolerance_of(case: Spec) -> Iterator[None]:
    """Compare as this case can be."""
    options = case["options"]
    low = "float32" in (
        options.get("gradient_dtype"),
        options.get("precision", {}).get("reduce"),
    )
    token = _tolerance.set(ROUNDED if low else TOLERANCE + _rounding_of_norms(case))
    try:
        yield
    finally:
        _tolerance.reset(token)


def _rounding_of_norms(case: Spec) -> float:
    """What torch's norm, which adds one square after another, may be wrong by.

    With 8 Mi equal float64 elements it is 1.9e-11 away from the exact norm. The bound is that of
    recursive summation: Higham, Accuracy and Stability of Numerical Algorithms, section 4.2.
    """
    if not any("clip" in step for step in case["steps"]):
        return 0.0
    parts = walk(case["model"])
    sizes = [op.get("numel", 0) for part in parts for op in part.get("ops", [])]
    return max(sizes, default=0) * 2.0**-53


class Difference(AssertionError):
    """A rank has something else than one process."""


def same(what: str, actual: Tensor, wanted: Tensor) -> None:
    """Whether two tensors are equal up to the order of sums; of a part, what this rank holds.

    Raises:
        Difference: they are not.
    """
    actual = ec.local_shard(actual)
    if actual.numel() != wanted.numel() or actual.dtype != wanted.dtype:
        raise Difference(
            f"{what} is {tuple(actual.shape)} {actual.dtype}, and in one process "
            f"{tuple(wanted.shape)} {wanted.dtype}"
        )
    if not wanted.numel():
        return
    actual, wanted = actual.reshape(-1), wanted.detach().reshape(-1)
    error = (actual - wanted).abs().max().item()
    bound = _tolerance.get() * max(1.0, wanted.abs().max().item())
    if not error <= bound:
        raise Difference(
            f"{what} differs by {error:.3g}: {actual[:20].tolist()!s:.200}, and in one process "
            f"{wanted[:20].tolist()!s:.200}"
        )


def same_numbers(step: int, actual: Record, wanted: Record) -> None:
    """Whether losses and the like are those of one process."""
    names = [name for name, _ in wanted.numbers]
    if [name for name, _ in actual.numbers] != names:
        raise Difference(f"step {step}: saw {[n for n, _ in actual.numbers]}, wanted {names}")
    for i, ((name, value), (_, right)) in enumerate(
        zip(actual.numbers, wanted.numbers, strict=True)
    ):
        same(f"step {step}: {name} (number {i})", value, right)


def same_gradient(step: int, name: str, actual: Tensor | None, wanted: Tensor | None) -> None:
    """Whether a gradient, or the part of it that a rank has, is that of one process."""
    if wanted is not None and not wanted.numel():
        return
    if (actual is None) != (wanted is None):
        raise Difference(
            f"step {step}: {name} has {'no' if actual is None else 'a'} gradient, and "
            f"{'none' if wanted is None else 'one'} in one process"
        )
    if actual is not None and wanted is not None:
        same(f"step {step}: gradient of {name}", actual, wanted)


# Errors of ours that documentation promises: what the message says, for which cases, and where.
Allowed = tuple[str, Callable[[Spec], bool], str]

ALLOWED: tuple[Allowed, ...] = (
    (
        r"was frozen, and unfrozen after \w+ wrapped the model",
        lambda case: any("toggle" in step for step in case["steps"]),
        "StateError of census.py: only what was trainable when it was wrapped is thawed again",
    ),
    (
        r"reduce_every is 'microbatch', but nobody shares gradients",
        lambda case: "reduce_every" in case["options"],
        "ArgumentError of pipeline/data_parallel.py: all that is trained is shared by stages",
    ),
    (
        r"is shared with an ignored module: ignore both, or neither",
        lambda case: (
            case["options"].get("ignored") == "module" and has(case["model"], "tie", "again")
        ),
        "ArgumentError of ignored.py",
    ),
    (
        r"which cannot go to another stage",
        lambda case: has(case["model"], "gives:dataclass", "gives:object"),
        "docs/pipeline.md, Run a step: tensors and plain values go between stages",
    ),
    (
        r"leaf Variable that requires grad",
        lambda case: case["technique"] == "pipeline",
        "docs/pipeline.md, When something fails: a stage that begins with an operation in place",
    ),
    (
        r"Reentrant activation checkpointing of a\s+shared module",
        lambda case: has(case["model"], "recomputed:reentrant", "recomputes:reentrant"),
        "StateError of fsdp/hooks.py",
    ),
    (
        r"linear\(\) needs the whole tensor, and its argument is sharded: '[\w.]*\bused\.",
        lambda case: has(case["model"], "parent"),
        "docs/fsdp-details.md, How a unit is sharded: a module that is never called is no unit",
    ),
    (
        r"and its argument is sharded: '[\w.]*' of unit",
        lambda case: has(case["model"], "again") and has(case["model"], "tie"),
        "docs/fsdp-details.md, How a unit is sharded: a tied parameter is of the module that has "
        "all its uses, and a cell that is called outside of that module shows a part of it",
    ),
)


def is_allowed(case: Spec, error: BaseException) -> bool:
    """Whether documentation says that this case ends in this error."""
    return any(re.search(text, str(error)) and of(case) for text, of, _ in ALLOWED)
