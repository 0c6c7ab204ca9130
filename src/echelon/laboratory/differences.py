"""The first value in which ranks and one process differ by more than rounding.

Values are compared in the order in which a step computes them: parameters before it, outputs of
modules, buffers, gradients, states of the optimizer; and at the end parameters and buffers.

[Note: what is rounding]
One process trains twice, the second time with weights one rounding error away and, if it can, with
the rows of each batch in the other order. What differs between the two is rounding, whatever the
model amplifies: a norm that computes in float32, a division by a tiny gradient. Ranks may differ
from one process by 50 times as much, and always by 1e-9 of the largest value of a tensor and 1e-10
of the largest of its kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from echelon.laboratory.comparison import ValueDifference, ValueKind
from echelon.laboratory.pieces import Piece
from echelon.laboratory.value_pairs import (
    CallRows,
    StepBatch,
    ValuePair,
    distance,
    output_pairs,
    piece_pairs,
)
from echelon.laboratory.value_recorder import StepValues, TrainingValues

CHAOTIC = 1e-4  # more than rounding does, as a part of the largest value
RELATIVE = 1e-9  # of the largest value of a tensor
OF_KIND = 1e-10  # of the largest value of all tensors of a kind
_TIMES_ROUNDING = 50
_SMALL = 0.1  # how much the largest value of a kind counts for a tensor that is nearly zero


@final
@dataclass(slots=True)
class Counts:
    """How many tensors were compared, by kind, and how far they were apart.

    Attributes:
        compared: by kind.
        skipped: names of modules whose outputs have no counterpart.
        largest: the largest difference of each kind, as a part of the largest value of the tensor
            and a tenth of that of its kind.
    """

    compared: dict[ValueKind, int] = field(default_factory=lambda: defaultdict(int))
    skipped: dict[str, None] = field(default_factory=dict)
    largest: dict[ValueKind, float] = field(default_factory=lambda: defaultdict(float))


# Tolerance -----------------------------------------------------------------------------------


@final
class Tolerance:
    """How far apart two values may be, by step and kind.

    Args:
        expected: of one process.
        rounding: for each step, and the end, the largest difference of each kind that is rounding.
    """

    def __init__(
        self, expected: TrainingValues, rounding: Sequence[Mapping[ValueKind, float]]
    ) -> None:
        self._rounding = rounding
        self._largest = [_largest(expected.at(step)) for step in range(len(expected.steps) + 1)]

    def scale(self, step: int, pair: ValuePair) -> tuple[float, float]:
        """The largest value of the expected tensor, and of all tensors of its kind."""
        of_tensor = _size(pair.expected)
        of_kind = self._largest[step].get((pair.kind, _key(pair.kind, pair.name)), of_tensor)
        return of_tensor, max(of_kind, of_tensor)

    def allowed(self, step: int, pair: ValuePair) -> float:
        """The largest difference that may be rounding."""
        of_tensor, of_kind = self.scale(step, pair)
        rounding = self._rounding[step].get(pair.kind, 0.0) if self._rounding else 0.0
        return max(
            RELATIVE * of_tensor + OF_KIND * of_kind,
            _TIMES_ROUNDING * rounding * (of_tensor + _SMALL * of_kind),
        )


def _key(kind: ValueKind, name: str) -> str:
    """States of an optimizer are of one kind if they have the same key."""
    return name.split(" of ")[0] if kind is ValueKind.STATE else ""


def _size(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _largest(values: StepValues) -> dict[tuple[ValueKind, str], float]:
    largest: dict[tuple[ValueKind, str], float] = defaultdict(float)
    # Not of buffers, of which each has a meaning of its own.
    for kind in (ValueKind.PARAMETER, ValueKind.GRADIENT, ValueKind.STATE):
        for piece in _pieces(values, kind):
            key = (kind, _key(kind, piece.name))
            largest[key] = max(largest[key], _size(piece.flat))
    for outputs in values.outputs.values():
        for output in outputs:
            for tensor in output.tensors:
                key = (ValueKind.OUTPUT, "")
                largest[key] = max(largest[key], _size(tensor))
    return largest


# All values ----------------------------------------------------------------------------------

_ORDER = (
    ValueKind.PARAMETER,
    ValueKind.OUTPUT,
    ValueKind.BUFFER,
    ValueKind.GRADIENT,
    ValueKind.STATE,
)
_AT_END = (ValueKind.PARAMETER, ValueKind.BUFFER)


@final
class ValueComparer:
    """Compares what ranks recorded with what one process did.

    Args:
        expected: of one process.
        sizes: the number of rows of each batch.
        tolerance: how far apart values may be.
    """

    def __init__(
        self, expected: TrainingValues, sizes: Sequence[int], tolerance: Tolerance
    ) -> None:
        self._expected = expected
        self._sizes = sizes
        self._tolerance = tolerance
        self.counts = Counts()
        self._not_by_rows: set[str] = set()

    def first(
        self, ranks: Sequence[TrainingValues], calls: Sequence[CallRows]
    ) -> list[tuple[ValueDifference, ValuePair]]:
        """All differences of the first kind, in the first step, that has some."""
        for step in range(len(self._sizes)):
            # Outputs that do not always fit to their rows do so only by accident.
            for _ in self._pairs(step, ValueKind.OUTPUT, ranks, calls):
                pass
        self._not_by_rows |= self.counts.skipped.keys()
        for step in range(len(self._sizes) + 1):
            for kind in _ORDER if step < len(self._sizes) else _AT_END:
                differences = self.of_kind(step, kind, ranks, calls)
                if differences:
                    return differences
        return []

    def of_kind(
        self,
        step: int,
        kind: ValueKind,
        ranks: Sequence[TrainingValues],
        calls: Sequence[CallRows],
    ) -> list[tuple[ValueDifference, ValuePair]]:
        """All differences of one kind in one step, or at the end."""
        return self._differences(step, kind, self._pairs(step, kind, ranks, calls))

    def rounding(self, other: TrainingValues, calls: CallRows) -> list[dict[ValueKind, float]]:
        """The largest difference of each kind in each step, and at the end.

        Outputs that differ by more than rounding do so because rows come in another order. They do
        not go by rows, as those of an expert that gets some tokens, and are not compared any more.
        """
        rounding: list[dict[ValueKind, float]] = []
        for step in range(len(self._sizes) + 1):
            by_kind: dict[ValueKind, float] = defaultdict(float)
            for kind in _ORDER if step < len(self._sizes) else (ValueKind.PARAMETER,):
                for pair in self._pairs(step, kind, [other], [calls]):
                    apart = self._relative(step, pair, distance(pair.observed, pair.expected))
                    if kind is ValueKind.OUTPUT and apart > CHAOTIC:
                        self.counts.skipped[pair.name] = None
                    else:
                        by_kind[kind] = max(by_kind[kind], apart)
            rounding.append(by_kind)
        return rounding

    def _relative(self, step: int, pair: ValuePair, apart: Tensor) -> float:
        of_tensor, of_kind = self._tolerance.scale(step, pair)
        largest = float(apart.max()) if apart.numel() else 0.0
        return largest / (of_tensor + _SMALL * of_kind) if largest else 0.0

    def _pairs(
        self,
        step: int,
        kind: ValueKind,
        ranks: Sequence[TrainingValues],
        calls: Sequence[CallRows],
    ) -> Iterator[ValuePair]:
        expected = self._expected.at(step)
        for rank, training in enumerate(ranks):
            values = training.at(step)
            if kind is ValueKind.OUTPUT:
                rows, parts = calls[rank].rows[step], calls[rank].parts[step]
                batch = StepBatch(step, self._sizes[step], rows, parts)
                left_out = calls[rank].partial | self._not_by_rows
                by_rows = {
                    name: outputs
                    for name, outputs in expected.outputs.items()
                    if name not in left_out
                }
                yield from output_pairs(rank, values.outputs, by_rows, batch, self.counts.skipped)
            else:
                pieces, fulls = _pieces(values, kind), _pieces(expected, kind)
                yield from piece_pairs(kind, rank, pieces, fulls)

    def _names(self, step: int, kind: ValueKind) -> list[str]:
        """The names of all values of a kind, in the order in which they are computed."""
        values = self._expected.at(step)
        if kind is ValueKind.OUTPUT:
            return list(values.outputs)
        names = [piece.name for piece in _pieces(values, kind)]
        return names[::-1] if kind is ValueKind.GRADIENT else names  # backward starts at the end

    def _differences(
        self, step: int, kind: ValueKind, pairs: Iterator[ValuePair]
    ) -> list[tuple[ValueDifference, ValuePair]]:
        by_name: dict[str, list[tuple[ValuePair, Tensor]]] = {}
        for pair in pairs:
            if not pair.expected.numel():
                continue
            apart = distance(pair.observed, pair.expected)
            relative, largest = self._relative(step, pair, apart), float(apart.max())
            self.counts.compared[kind] += 1
            self.counts.largest[kind] = max(self.counts.largest[kind], relative)
            if largest > self._tolerance.allowed(step, pair):
                by_name.setdefault(pair.name, []).append((pair, apart))
        order = {name: i for i, name in enumerate(self._names(step, kind))}
        by_name = dict(sorted(by_name.items(), key=lambda item: order[item[0]]))
        return [_difference(step, apart) for apart in by_name.values()]


def _difference(
    step: int, pairs: Sequence[tuple[ValuePair, Tensor]]
) -> tuple[ValueDifference, ValuePair]:
    """The difference of one name, which several ranks may have."""
    pair, apart = pairs[0]
    at = int(apart.reshape(-1).argmax())
    scale = _size(pair.expected)
    largest = float(apart.max())
    difference = ValueDifference(
        step=step,
        kind=pair.kind,
        name=pair.name or "the model",
        rank=pair.rank,
        ranks=tuple(dict.fromkeys(other.rank for other, _ in pairs)),
        largest=largest,
        relative=largest / scale if scale else torch.inf,
        expected=float(pair.expected.reshape(-1)[at]),
        observed=float(pair.observed.reshape(-1)[at]),
    )
    return difference, pair


def _pieces(values: StepValues, kind: ValueKind) -> list[Piece]:
    return {
        ValueKind.PARAMETER: values.parameters,
        ValueKind.BUFFER: values.buffers,
        ValueKind.GRADIENT: values.gradients,
        ValueKind.STATE: values.states,
    }[kind]
