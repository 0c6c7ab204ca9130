"""Which cause the first difference has: computes what its signatures need, and asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.errors.message_text import ranks_text
from echelon.laboratory.batch_rows import num_rows
from echelon.laboratory.causes import CLOSE, equal, lower_precision, precision_cause
from echelon.laboratory.comparison import Cause, CauseKind, ValueDifference, ValueKind
from echelon.laboratory.evidence import (
    GradientEvidence,
    StepAgain,
    norm_of,
    observed_norms,
    part_norms,
)
from echelon.laboratory.gradient_causes import StepFacts, gradient_causes, rounded_gradients_cause
from echelon.laboratory.one_process import OneProcess
from echelon.laboratory.pieces import Piece
from echelon.laboratory.seen_rows import SeenRows
from echelon.laboratory.value_pairs import ValuePair
from echelon.laboratory.value_recorder import StepValues, TrainingValues
from echelon.plans.plans import Plan

Differing = Sequence[tuple[ValueDifference, ValuePair]]

_TIMES_ROUNDING = 20.0
_LEAST_CLEAR = 1e-2  # relative; causes would be mistaken for one another


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Trainings:
    """All that is known of the trainings that are compared.

    Attributes:
        alone: how one process trains.
        expected: what it computed.
        ranks: what each rank computed.
        seen: which rows each forward of a rank took.
        plan: that shares the model; None for a function.
        rounding: the largest difference of a gradient that is rounding, relatively.
    """

    alone: OneProcess
    expected: TrainingValues
    ranks: Sequence[TrainingValues]
    seen: SeenRows
    plan: Plan | None
    rounding: float = 0.0


def causes_of(differing: Differing, buffers: Differing, trainings: Trainings) -> tuple[Cause, ...]:
    """The causes of differences of one kind in one step: of all of them, or of the first.

    Args:
        buffers: those that differ in the same step, by which an output may be wrong.
    """
    kind, step = differing[0][0].kind, differing[0][0].step
    if kind is ValueKind.GRADIENT:
        return _gradient_causes(differing, trainings, step)
    difference, pair = differing[0]
    cause = None
    if kind is ValueKind.OUTPUT:
        cause = _output_cause(pair, trainings, step)
        differing = [(other, pair) for other, pair in buffers if pair.kind is ValueKind.BUFFER]
    if cause is None and differing:
        difference, pair = differing[0]
        cause = _state_cause(difference, pair, trainings, step)
    return () if cause is None else (replace(cause, names=(difference.name,)),)


# Gradients -----------------------------------------------------------------------------------


def _gradient_causes(differing: Differing, trainings: Trainings, step: int) -> tuple[Cause, ...]:
    again = StepAgain(trainings.alone, trainings.expected, step)
    shares = trainings.seen.shares(step)
    evidence = GradientEvidence(again, shares, trainings.seen.share_of, trainings.alone.clip)
    ranks = [values.steps[step] for values in trainings.ranks]
    means, counts = evidence.mean_of_means, {len(share) for share in shares}
    facts = StepFacts(
        num_ranks=len(shares),
        num_replicas=len(ranks),
        close=min(max(CLOSE, _TIMES_ROUNDING * trainings.rounding), _LEAST_CLEAR),
        num_calls=max(1, counts.pop()) if len(counts) == 1 else 1,
        rows_per_call=tuple(len(f.rows or ()) for share in shares for f in share),
        by_rows=evidence.by_rows,
        coverage=trainings.seen.coverage(step),
        clip=trainings.alone.clip,
        whole_norm=norm_of(list(evidence.whole.values())),
        mean_norm=None if means is None else norm_of(list(means.values())),
        part_norms=part_norms(evidence.whole, ranks),
        mean_part_norms=part_norms(means, ranks),
        apart_part_norms=part_norms(evidence.clipped_apart, ranks),
        local_norms=evidence.local_norms(),
        observed_norms=observed_norms(ranks),
    )
    fulls = {piece.name: piece for piece in trainings.expected.steps[step].gradients}
    names = [difference.name for difference, _ in differing]
    past = [values.steps[step - 1] for values in trainings.ranks] if step else []
    parts = [
        evidence.parts(
            name, list(_pieces_of(name, ranks)), fulls[name], dict(_pieces_of(name, past))
        )
        for name in names
    ]
    everywhere = rounded_gradients_cause(parts, facts)
    if everywhere is not None:
        return (replace(everywhere, names=tuple(names)),)
    by_kind: dict[CauseKind, Cause] = {}
    names_of: dict[CauseKind, list[str]] = {}
    for name, of_tensor in zip(names, parts, strict=True):
        causes = gradient_causes(of_tensor, facts)
        if not causes and not by_kind:
            return ()  # the first difference has no known cause; others may follow from it
        for cause in causes:
            by_kind.setdefault(cause.kind, cause)
            names_of.setdefault(cause.kind, []).append(name)
    return tuple(replace(cause, names=tuple(names_of[kind])) for kind, cause in by_kind.items())


def _pieces_of(name: str, ranks: Sequence[StepValues]) -> Iterator[tuple[int, Piece]]:
    for rank, values in enumerate(ranks):
        for piece in values.gradients:
            if piece.name == name and piece.numel:
                yield rank, piece


# Outputs -------------------------------------------------------------------------------------


def _output_cause(pair: ValuePair, trainings: Trainings, step: int) -> Cause | None:
    dtype = lower_precision(pair.observed, pair.expected)
    if dtype is not None:
        return precision_cause(dtype, f"the output of {pair.name or 'the model'!r}")
    forwards = trainings.seen.forwards[pair.rank][step]
    assert pair.call is not None, "outputs belong to a forward"
    forward = forwards[pair.call]
    if not forward.rows or len(forward.rows) == num_rows(trainings.alone.batches[step]):
        return None
    again = StepAgain(trainings.alone, trainings.expected, step)
    values, _ = again.forward(forward)
    outputs = [tensor for output in values.outputs.get(pair.name, ()) for tensor in output.tensors]
    same = [t for t in outputs if t.shape == pair.observed.shape and equal([pair.observed], [t])]
    if not same:
        return None
    return _part_cause(trainings.alone.make().get_submodule(pair.name), len(forward.rows))


def _part_cause(module: nn.Module, num_rows: int) -> Cause:
    kind = type(module).__name__
    if isinstance(module, _BatchNorm):
        return Cause(
            kind=CauseKind.BATCH_NORM,
            text=f"{kind} takes the mean and variance of the {num_rows} rows of each forward",
            advice="Use SyncBatchNorm, or a norm that does not depend on the batch",
        )
    return Cause(
        kind=CauseKind.BATCH_NORM,
        text=f"{kind} gives rows other outputs with the other rows of the batch; it saw "
        f"{num_rows} of them",
        advice="Compute what it takes from the batch over all ranks",
    )


# Parameters, buffers and states --------------------------------------------------------------


def _state_cause(
    difference: ValueDifference, pair: ValuePair, trainings: Trainings, step: int
) -> Cause | None:
    dtype = lower_precision(pair.observed, pair.expected)
    if dtype is not None:
        return precision_cause(dtype, f"{pair.kind.value} {pair.name!r}")
    since = _equal_before(pair, trainings, step)
    if since is not None:
        when = "the start" if since == 0 else f"step {since - 1}"
        advice = "Send it to these ranks after it changes, or let each rank compute it"
        if pair.kind is ValueKind.PARAMETER:
            advice = (
                "Give it to the optimizer of these ranks, and see that it gets a gradient there"
            )
        return Cause(
            kind=CauseKind.STALE,
            text=f"{pair.kind.value} {pair.name!r} was not changed since {when} on "
            f"{ranks_text(difference.ranks)}",
            advice=advice,
        )
    if pair.kind is ValueKind.PARAMETER and step == 0:
        return Cause(
            kind=CauseKind.START,
            text=f"before the first step {pair.name!r} has other values than make_model gives, on "
            f"{ranks_text(difference.ranks)}",
            advice="Build the model from the same seed on all ranks, or broadcast it from one",
        )
    if pair.kind is ValueKind.PARAMETER:
        return _option_cause(trainings, step - 1)
    if pair.kind is ValueKind.STATE:
        return _option_cause(trainings, step)
    if pair.kind is ValueKind.BUFFER and step < len(trainings.seen.forwards[pair.rank]):
        return _buffer_cause(pair, trainings, step)
    return None


def _option_cause(trainings: Trainings, step: int) -> Cause | None:
    """Whether the optimizers of ranks made a step with options that one process does not have."""
    texts = []
    for name, values in trainings.expected.steps[step].options.items():
        of_ranks = [training.steps[step].options.get(name, []) for training in trainings.ranks]
        for other in dict.fromkeys(value for of_rank in of_ranks for value in of_rank):
            if other not in values:
                ranks = [rank for rank, of_rank in enumerate(of_ranks) if other in of_rank]
                alone = " and ".join(dict.fromkeys(values))
                texts.append(f"{name} is {other} on {ranks_text(ranks)} and {alone} in one process")
    if not texts:
        return None
    return Cause(
        kind=CauseKind.OPTIONS,
        text=f"in step {step} {'; '.join(texts)}",
        advice="One process makes a step for the whole batch with what optimizer() gives: set "
        "options there, and scale none of them by the number of ranks",
    )


def _equal_before(pair: ValuePair, trainings: Trainings, step: int) -> int | None:
    """The number of the last step before which one process had the value of the rank."""
    before: list[tuple[int, Sequence[Piece]]] = []
    steps = trainings.expected.steps
    if pair.kind is ValueKind.BUFFER:
        initial = trainings.alone.make()
        start = [
            Piece(name, tuple(b.shape), 0, b.numel(), b) for name, b in initial.named_buffers()
        ]
        before = [(0, start), *((i + 1, values.buffers) for i, values in enumerate(steps[:step]))]
    elif pair.kind is ValueKind.PARAMETER:
        before = [(i, values.parameters) for i, values in enumerate(steps[:step])]
    elif pair.kind is ValueKind.STATE:
        before = [(i + 1, values.states) for i, values in enumerate(steps[:step])]
    for number, pieces in reversed(before):
        for piece in pieces:
            if piece.name == pair.name and _same_range(pair, piece):
                return number
    return None


def _same_range(pair: ValuePair, full: Piece) -> bool:
    """Whether a rank has, in its range, the values of a full tensor."""
    if full.numel != pair.observed.numel():
        return False
    observed = pair.observed.reshape(-1).double()
    return bool(torch.allclose(observed, full.flat.double(), rtol=1e-9, atol=0.0))


def _buffer_cause(pair: ValuePair, trainings: Trainings, step: int) -> Cause | None:
    """Whether a buffer is what the forwards of this rank alone give."""
    forwards = trainings.seen.forwards[pair.rank][step]
    if len(forwards) != 1 or not forwards[0].rows:
        return None
    again = StepAgain(trainings.alone, trainings.expected, step)
    _, buffers = again.forward(forwards[0])
    alone: Tensor | None = buffers.get(pair.name)
    if alone is None or alone.numel() != pair.observed.numel():
        return None
    if not equal([pair.observed.double()], [alone.double()]):
        return None
    owner = trainings.alone.make().get_submodule(pair.name.rpartition(".")[0])
    return _part_cause(owner, len(forwards[0].rows))
