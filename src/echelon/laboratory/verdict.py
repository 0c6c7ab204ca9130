"""What a comparison says of two trainings: differences, causes, and what was not compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

from echelon.errors import ArgumentError
from echelon.laboratory.batch_rows import num_rows
from echelon.laboratory.comparison import Comparison, ValueKind, listed
from echelon.laboratory.differences import CHAOTIC, Tolerance, ValueComparer
from echelon.laboratory.explain import Trainings, causes_of
from echelon.laboratory.one_process import OneProcess
from echelon.laboratory.value_pairs import CallRows


def verdict(trainings: Trainings, what: str) -> Comparison:
    """Compare the trainings.

    Args:
        what: the plan, or the name of the function.

    Raises:
        ArgumentError: the ranks trained another model.
    """
    expected = trainings.expected
    sizes = [num_rows(batch) for batch in trainings.alone.batches]
    unlimited = ValueComparer(expected, sizes, Tolerance(expected, ()))
    rounding = unlimited.rounding(
        trainings.alone.perturbed().train(), _whole_calls(trainings.alone)
    )
    comparer = ValueComparer(expected, sizes, Tolerance(expected, rounding))
    comparer.counts.skipped.update(unlimited.counts.skipped)
    calls = [_calls(trainings, rank) for rank in range(len(trainings.ranks))]
    of_gradients = _largest(rounding).get(ValueKind.GRADIENT, 0.0)
    trainings = replace(trainings, rounding=of_gradients)
    differing = comparer.first(trainings.ranks, calls)
    counts, buffers = comparer.counts, []
    if differing and differing[0][0].kind is ValueKind.OUTPUT:
        step = differing[0][0].step
        buffers = comparer.of_kind(step, ValueKind.BUFFER, trainings.ranks, calls)
    _check_compared(trainings, what)
    return Comparison(
        what=what,
        ranks=len(trainings.ranks),
        steps=len(sizes),
        differences=tuple(difference for difference, _ in differing),
        causes=causes_of(differing, buffers, trainings) if differing else (),
        compared=dict(counts.compared),
        largest=dict(counts.largest),
        rounding=_largest(rounding),
        notes=tuple(_notes(trainings, counts.skipped, _largest(rounding))),
    )


def _whole_calls(alone: OneProcess) -> CallRows:
    """Which rows each forward of the perturbed training on one process takes."""
    if alone.parts is not None:
        return CallRows(
            rows=[[part.rows for part in parts] for parts in alone.parts],
            parts=[list(range(len(parts))) for parts in alone.parts],
        )
    sizes = [num_rows(batch) for batch in alone.batches]
    return CallRows(
        rows=[[[(step, row) for row in reversed(range(size))]] for step, size in enumerate(sizes)],
        parts=[[None]] * len(sizes),
    )


def _calls(trainings: Trainings, rank: int) -> CallRows:
    """Which rows each forward of a rank took, and which forward of one process took the same."""
    seen, is_in_parts = trainings.seen, trainings.alone.parts is not None
    rows = [[forward.rows for forward in forwards] for forwards in seen.forwards[rank]]
    parts: list[list[int | None]] = []
    for step, forwards in enumerate(rows):
        before = sum(len(share) for share in seen.shares(step)[: seen.share_of[rank]])
        parts.append([before + i if is_in_parts else None for i in range(len(forwards))])
    return CallRows(rows=rows, parts=parts, partial=_partial_modules(trainings, rank))


def _partial_modules(trainings: Trainings, rank: int) -> frozenset[str]:
    """The modules of which the stage of a rank lacks some parameters."""
    plan, expected = trainings.plan, trainings.expected.steps[0]
    if plan is None or plan.pp == 1:
        return frozenset()
    first = rank // plan.data_size * plan.data_size
    stage = trainings.ranks[first : first + plan.data_size]
    present = {piece.name for values in stage for piece in values.parameters}
    absent = {piece.name for piece in expected.parameters} - present
    modules = expected.outputs
    return frozenset(
        module
        for module in modules
        if any(f".{name}".startswith(_inside(module)) for name in absent)
    )


def _inside(module: str) -> str:
    """How the names of all parameters in a module begin, after a dot."""
    return f".{module}." if module else "."


def _largest(rounding: Sequence[dict[ValueKind, float]]) -> dict[ValueKind, float]:
    kinds = {kind for by_kind in rounding for kind in by_kind}
    return {kind: max(by_kind.get(kind, 0.0) for by_kind in rounding) for kind in kinds}


def _notes(
    trainings: Trainings, skipped: Iterable[str], rounding: dict[ValueKind, float]
) -> Iterator[str]:
    """What was not compared, or not exactly."""
    missing = _missing_parameters(trainings)
    if missing:
        yield f"no rank trained these parameters: {listed(missing)}"
    names = [name or "the model itself" for name in skipped]
    if names:
        yield f"outputs without rows that could be compared: {listed(names)}"
    if not _is_sharded(trainings):
        yield (
            "the plan sharded no parameter, because each unit of the model is small: give the plan "
            "fsdp={'min_num_params': 0} to compare with shards"
        )
    apart = max(rounding.values(), default=0.0)
    if apart > CHAOTIC:
        yield (
            f"rounding alone changes values by {apart:.1e} of the largest: the loss or the model "
            "depends on the order of rows, or computes in a low precision; only differences above "
            "that are seen"
        )


def _is_sharded(trainings: Trainings) -> bool:
    """Whether a rank has only a part of some parameter, if a plan asks for that."""
    if trainings.plan is None or trainings.plan.shard == 1:
        return True
    pieces = (piece for values in trainings.ranks for piece in values.parameters)
    return any(piece.numel < prod(piece.shape) for piece in pieces)


def _missing_parameters(trainings: Trainings) -> list[str]:
    """Parameters that get a gradient on one process and are in no optimizer of a rank."""
    trained = {piece.name for values in trainings.ranks for piece in values.steps[0].gradients}
    return [name for name in _trained_alone(trainings) if name not in trained]


def _trained_alone(trainings: Trainings) -> list[str]:
    pieces = trainings.expected.steps[0].gradients
    return [piece.name for piece in pieces if piece.values is not None]


def _check_compared(trainings: Trainings, what: str) -> None:
    """Refuse a function that trained another model than the one that it was given."""
    missing = _missing_parameters(trainings)
    if missing and len(missing) == len(_trained_alone(trainings)):
        raise ArgumentError(
            f"{what} trained other parameters than those of the model that it was given: train "
            "that model, or return it as it was wrapped"
        )
