"""Values of a rank beside those that one process has in their place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from echelon.laboratory.batch_rows import Row
from echelon.laboratory.comparison import ValueKind
from echelon.laboratory.pieces import Piece
from echelon.laboratory.value_recorder import ModuleOutput


@final
@dataclass(frozen=True, slots=True)
class CallRows:
    """Which rows each forward of a rank took.

    Attributes:
        rows: for each step and each forward in it; None where they are of no batch.
        parts: for each of them, which forward of one process took the same rows; None where that
            takes the whole batch.
        partial: modules of which the rank runs a part only, as a stage of a pipeline does.
    """

    rows: Sequence[Sequence[Sequence[Row] | None]]
    parts: Sequence[Sequence[int | None]]
    partial: frozenset[str] = frozenset()


@final
@dataclass(frozen=True, slots=True, eq=False)
class ValuePair:
    """A value of a rank and the one that it should be."""

    kind: ValueKind
    name: str
    rank: int
    observed: Tensor
    expected: Tensor
    call: int | None = None


# Rows of outputs -----------------------------------------------------------------------------


def rows_of(full: Tensor, part: Tensor, rows: Sequence[int], size: int) -> list[Tensor]:
    """What a tensor of a batch of ``size`` rows has for some of them, in the form of ``part``.

    The dim of rows is that in which the two have different lengths; each row may have several
    entries in it, such as tokens. Several answers where the shapes allow them; none where they fit
    to nothing, or the tensor has no dim of rows, so that it may depend on all of them.

    Example:
        >>> full = torch.arange(8).view(1, 8)  # two tokens for each of four rows
        >>> rows_of(full, torch.zeros(1, 4), [0, 3], 4)
        [tensor([[0, 1, 6, 7]])]
    """
    if full.dim() != part.dim():
        return []
    dims = [d for d in range(full.dim()) if full.shape[d] != part.shape[d]]
    answers = []
    if not dims:
        if len(rows) < size:
            return []
        if list(rows) == list(range(size)):
            return [full]
        dims = [d for d in range(full.dim()) if full.shape[d] and full.shape[d] % size == 0]
    elif len(dims) > 1:
        return []
    for dim in dims:
        entries, left = divmod(full.shape[dim], size)
        if not left and entries * len(rows) == part.shape[dim]:
            index = torch.tensor(
                [row * entries + i for row in rows for i in range(entries)], device="cpu"
            )
            answers.append(full.index_select(dim, index.to(full.device)))
    return answers


@final
@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step, the number of rows of its batch, and what each forward of a rank took of it."""

    step: int
    size: int
    rows: Sequence[Sequence[Row] | None]
    parts: Sequence[int | None]

    def expected(
        self, observed: ModuleOutput, wholes: Sequence[ModuleOutput], call: int, occurrence: int
    ) -> Sequence[Tensor | None]:
        """What one process has in the place of each tensor of an output; None if nothing fits."""
        rows, part = self.rows[call], self.parts[call]
        if rows is None or any(batch != self.step for batch, _ in rows):
            return [None] * len(observed.tensors)
        same = [
            other for other in wholes if other.root == (wholes[0].root if part is None else part)
        ]
        if occurrence >= len(same) or len(same[occurrence].tensors) != len(observed.tensors):
            return [None] * len(observed.tensors)
        tensors: list[Tensor | None] = []
        for tensor, full in zip(observed.tensors, same[occurrence].tensors, strict=True):
            answers = [full]
            if part is None:
                answers = rows_of(full, tensor, [row for _, row in rows], self.size)
            answers = [answer for answer in answers if answer.shape == tensor.shape]
            tensors.append(_nearest(answers, tensor))
        return tensors


def output_pairs(
    rank: int,
    values: Mapping[str, Sequence[ModuleOutput]],
    expected: Mapping[str, Sequence[ModuleOutput]],
    batch: StepBatch,
    skipped: dict[str, None],
) -> Iterator[ValuePair]:
    """The outputs of each forward of a module on a rank, beside those of one process.

    Names of modules of which an output has no counterpart are added to ``skipped``.
    """
    for name, wholes in expected.items():
        per_call = sum(output.root == wholes[0].root for output in wholes)
        occurrences: dict[int, int] = defaultdict(int)
        for number, output in enumerate(values.get(name, ())):
            call = number // per_call if output.root is None else output.root
            occurrence = occurrences[call]
            occurrences[call] += 1
            tensors: Sequence[Tensor | None] = [None] * len(output.tensors)
            if call < len(batch.rows):
                tensors = batch.expected(output, wholes, call, occurrence)
            if tensors and all(tensor is None for tensor in tensors):
                skipped[name] = None
            for observed, like in zip(output.tensors, tensors, strict=True):
                if like is not None:
                    yield ValuePair(ValueKind.OUTPUT, name, rank, observed, like, call)


def piece_pairs(
    kind: ValueKind, rank: int, pieces: Sequence[Piece], expected: Sequence[Piece]
) -> Iterator[ValuePair]:
    """Pieces of a rank beside the same ranges of the tensors of one process."""
    fulls = {piece.name: piece for piece in expected}
    for piece in pieces:
        full = fulls.get(piece.name)
        if full is not None and full.shape == piece.shape:
            whole = full.flat.reshape(full.shape)
            yield ValuePair(kind, piece.name, rank, piece.flat, piece.of(whole))


def _nearest(answers: Sequence[Tensor], observed: Tensor) -> Tensor | None:
    if len(answers) < 2:
        return answers[0] if answers else None
    return min(answers, key=lambda answer: float(distance(observed, answer).sum()))


def distance(observed: Tensor, expected: Tensor) -> Tensor:
    """Absolute differences in float64; those of equal infinities and of two NaNs are 0."""
    a, b = observed.detach().double(), expected.detach().double()
    apart = (a - b).abs()
    same = (a == b) | (a.isnan() & b.isnan())
    return apart.masked_fill(same, 0.0).nan_to_num(nan=torch.inf)
