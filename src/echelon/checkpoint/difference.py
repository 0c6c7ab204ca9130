"""How two steps differ, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.checkpoint.format import SavedTensor
from echelon.checkpoint.step import SavedStep
from echelon.values.value_types import DTYPES


class Difference(NamedTuple):
    """One name under which two steps differ.

    Attributes:
        name: of a tensor, or of what was saved beside tensors.
        what: how.
    """

    name: str
    what: str


def differences(one: SavedStep, other: SavedStep) -> Iterator[Difference]:
    """What differs, in the order of names. Cuts into files and pieces do not count."""
    mine, theirs = one.manifest.tensors, other.manifest.tensors
    for name in sorted({*mine, *theirs}):
        if name not in mine or name not in theirs:
            yield Difference(name, f"only in {(one if name in mine else other).folder}")
        else:
            what = _difference(one, mine[name], other, theirs[name])
            if what is not None:
                yield Difference(name, what)
    for name in sorted({*one.sections, *other.sections}):
        if name not in one.sections or name not in other.sections:
            yield Difference(name, f"only in {(one if name in one.sections else other).folder}")
        elif one.sections[name] != other.sections[name]:
            yield Difference(*_first_of(name, one.sections[name], other.sections[name]))


def _first_of(name: str, mine: Any, theirs: Any) -> tuple[str, str]:
    """Where two values that differ do so first, and how."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in sorted({*mine, *theirs}):
            if key not in mine or key not in theirs:
                return f"{name}.{key}", "is in one of them only"
            if mine[key] != theirs[key]:
                is_plain = mine.get("kind") == "value" and key == "value"  # what users call it
                inside = name if is_plain else f"{name}.{key}"
                return _first_of(inside, mine[key], theirs[key])
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        at = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        return _first_of(f"{name}[{at}]", mine[at], theirs[at])
    return name, f"{mine!r:.80} and {theirs!r:.80}"


def _difference(
    one: SavedStep, mine: SavedTensor, other: SavedStep, theirs: SavedTensor
) -> str | None:
    """How two tensors differ; None if they do not."""
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return f"{mine.dtype}{list(mine.shape)} and {theirs.dtype}{list(theirs.shape)}"
    if [(p.start, p.checksum) for p in mine.pieces] == [
        (p.start, p.checksum) for p in theirs.pieces
    ]:
        return None
    values, others = _read(one, mine), _read(other, theirs)
    differ = values.view(-1).view(torch.uint8) != others.view(-1).view(torch.uint8)
    if not bool(differ.any()):
        return None
    if not values.is_floating_point():
        return f"{int((values != others).sum())} of {values.numel()} elements differ"
    most = (values.double() - others.double()).abs().max().item()
    count = int(differ.view(values.numel(), -1).any(1).sum())
    return f"{count} of {values.numel()} elements differ, by at most {most:.3g}"


def _read(step: SavedStep, saved: SavedTensor) -> Tensor:
    values = torch.empty(saved.shape, dtype=DTYPES[saved.dtype], device="cpu")
    step.read(saved, 0, values)
    return values
