"""The cause of a gradient that differs, by its signature; pure functions of numbers.

[Note: signatures of gradients]
``whole`` is the gradient of the loss of the whole batch, ``local`` the gradient that a rank's own
backwards gave, computed again on one process from the rank's rows and from the gradient of its
output. n ranks made k forwards each in the step. The optimizer got ``observed``::

    observed = local on each rank                       nobody reduced it
    mean of observed = whole, and ranks differ          the same, where local is not known
    observed = sum of local,        sum / n = whole     summed and not averaged
    observed = sum of local / n,    observed * n = whole  the loss was divided by n, too
    observed = sum of local / n**2                      the gradients were divided twice
    observed = sum of local / n,    observed * k = whole  the loss was divided by k twice
    observed = sum of local / n,    observed = k * whole  the loss was not divided by k
    observed = mean over forwards of the gradient of each one's loss: a mean of means
    observed = s[r] * whole, norm of the rank's part * s[r] = c for all ranks: clipped by parts
    observed = s[r] * whole, s[r] = 1 on some ranks     only the others clipped
    observed = whole, clip is given and smaller         no rank clipped
    observed = whole + what the optimizer got before    nobody set gradients to zero

Where none holds, they are tried with the mean over forwards in the place of ``whole``: rows that
are uneven, or seen twice, and another cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isclose
from typing import final

import torch
from torch import Tensor

from echelon.errors.message_text import ranks_text
from echelon.laboratory.causes import (
    CLOSE,
    equal,
    lower_precision,
    precision_cause,
    proportion,
    samples_cause,
    shortened,
)
from echelon.laboratory.comparison import Cause, CauseKind
from echelon.laboratory.seen_rows import Coverage


@final
@dataclass(frozen=True, slots=True, eq=False)
class GradientParts:
    """A rank's range of one gradient, and what it would be for one reason or another.

    Attributes:
        rank: whose it is.
        observed: what its optimizer got.
        expected: what it should have got.
        whole: the same without clipping.
        local: what the rank's own backwards gave; None if that is not known.
        total: the sum of ``local`` over ranks; None if that is not known.
        mean_of_means: the mean over forwards of the gradient of the loss of each.
        clipped_apart: the mean of ``local``, each clipped by its own norm; of norm 1 each where
            ``StepFacts.clip`` is None.
        before: what the optimizer got in the step before; None in the first.
    """

    rank: int
    observed: Tensor
    expected: Tensor
    whole: Tensor
    local: Tensor | None = None
    total: Tensor | None = None
    mean_of_means: Tensor | None = None
    clipped_apart: Tensor | None = None
    before: Tensor | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """What is known of the step in which gradients differ.

    Attributes:
        num_ranks: how many ranks have rows of their own.
        num_replicas: how many ranks there are in all, some of which may have the same rows.
        num_calls: forwards of each rank in the step; 1 if they differ between ranks.
        close: how far off an equation may be, as a part of the norm of a gradient.
        rows_per_call: rows of each forward of all ranks.
        by_rows: whether the gradient of the whole batch is the mean of those of the forwards,
            weighted by their rows.
        coverage: how often each row was seen; None if that is not known.
        clip: the largest norm of the gradient; None for any.
        whole_norm: the norm of the gradient of one process, before it is clipped.
        mean_norm: the norm of ``mean_of_means``; None if that is not known.
        part_norms: the norm of the whole gradient over each rank's ranges.
        mean_part_norms: the same of ``mean_of_means``; empty if that is not known.
        apart_part_norms: the same of ``clipped_apart``; empty if that is not known.
        local_norms: the norm of each rank's own gradient.
        observed_norms: the norm of what each rank's optimizer got.
    """

    num_ranks: int
    num_replicas: int = 1
    num_calls: int = 1
    close: float = CLOSE
    rows_per_call: tuple[int, ...] = ()
    by_rows: bool = False
    coverage: Coverage | None = None
    clip: float | None = None
    whole_norm: float | None = None
    mean_norm: float | None = None
    part_norms: tuple[float, ...] = ()
    mean_part_norms: tuple[float, ...] = ()
    apart_part_norms: tuple[float, ...] = ()
    local_norms: tuple[float, ...] = ()
    observed_norms: tuple[float, ...] = ()


def gradient_causes(parts: Sequence[GradientParts], facts: StepFacts) -> tuple[Cause, ...]:
    """The cause of the difference of one gradient, or two where none explains it alone.

    Args:
        parts: of the ranks that have this gradient.
    """
    cause = gradient_cause(parts, facts)
    if cause is None or cause.kind in (CauseKind.MEAN_OF_MEANS, CauseKind.SAMPLES):
        return _pair(parts, facts) or (() if cause is None else (cause,))
    return (cause,)


def _pair(parts: Sequence[GradientParts], facts: StepFacts) -> tuple[Cause, ...]:
    """That each forward's mean counts alike, and another cause besides it or right clipping."""
    means = [part.mean_of_means for part in parts if part.mean_of_means is not None]
    norm = facts.mean_norm
    if len(means) < len(parts) or norm is None:
        return ()
    first = _samples(parts, means, facts) or _mean_of_means(parts, means, facts)
    if first is None:
        return ()
    observed = [part.observed for part in parts]
    if facts.clip is not None:
        scale = clip_scale(norm, facts.clip)
        if equal(observed, [mean * scale for mean in means], facts.close):
            return (first,)
    of_means = [
        replace(part, whole=mean, expected=mean) for part, mean in zip(parts, means, strict=True)
    ]
    others = replace(facts, whole_norm=norm, part_norms=facts.mean_part_norms)
    seconds = (_not_clipped, _not_zeroed, _scaled, _clipped, _clipped_by_some)
    for find in seconds[:1] if equal(observed, means, facts.close) else seconds:
        second = find(of_means, observed, others)
        if second is not None:
            text = second.text.replace("those of one process", "what the other cause gives")
            return first, replace(second, text=text)
    return ()


def gradient_cause(parts: Sequence[GradientParts], facts: StepFacts) -> Cause | None:
    """The one cause of the difference of one gradient, of which each rank has a part.

    Args:
        parts: of the ranks that have this gradient.
    """
    observed = [part.observed for part in parts]
    signatures = (
        *(_precision, _samples, _not_zeroed, _not_reduced, _scaled, _mean_of_means),
        *(_clipped, _clipped_by_some, _not_clipped),
    )
    for find in signatures:
        cause = find(parts, observed, facts)
        if cause is not None:
            return cause
    return None


def _precision(
    parts: Sequence[GradientParts], observed: Sequence[Tensor], facts: StepFacts
) -> Cause | None:
    """A gradient that went through a lower dtype, or its sum, which was divided afterwards."""
    for times in (1, facts.num_ranks):
        dtypes = {lower_precision(part.observed * times, part.expected * times) for part in parts}
        dtype = dtypes.pop()
        if dtype is not None and not dtypes:
            return precision_cause(dtype, "the gradient")
    return None


def rounded_gradients_cause(
    gradients: Sequence[Sequence[GradientParts]], facts: StepFacts
) -> Cause | None:
    """The lower dtype through which all gradients went that differ, of which each may be small."""
    parts = [part for of_tensor in gradients for part in of_tensor]
    observed = torch.cat([part.observed.double().reshape(-1) for part in parts])
    expected = torch.cat([part.expected.double().reshape(-1) for part in parts])
    for times in (1, facts.num_ranks):
        dtype = lower_precision(observed * times, expected * times)
        if dtype is not None:
            return precision_cause(dtype, "these gradients")
    return None


def _samples(
    parts: Sequence[GradientParts], observed: Sequence[Tensor], facts: StepFacts
) -> Cause | None:
    if facts.coverage is None or facts.coverage.is_partition:
        return None
    means = equal(observed, [part.mean_of_means for part in parts], facts.close)
    totals = [None if part.total is None else part.total / facts.num_ranks for part in parts]
    if not means and not equal(observed, totals, facts.close):
        return None
    return samples_cause(facts.coverage)


def _not_zeroed(
    parts: Sequence[GradientParts], observed: Sequence[Tensor], facts: StepFacts
) -> Cause | None:
    """A gradient to which that of the step before was added."""
    before = [part.before for part in parts if part.before is not None]
    if len(before) < len(parts) or not any(bool(tensor.any()) for tensor in before):
        return None
    sums = [part.whole + old for part, old in zip(parts, before, strict=True)]
    if not equal(observed, sums, facts.close):
        return None
    return Cause(
        kind=CauseKind.NOT_ZEROED,
        text="the optimizer got the gradients of this step and of the step before, added up",
        advice="Call optimizer.zero_grad() in every step, after step() or before the first "
        "backward",
    )


def _not_reduced(
    parts: Sequence[GradientParts], observed: Sequence[Tensor], facts: StepFacts
) -> Cause | None:
    if len(parts) < 2 or all(equal([other], observed[:1], facts.close) for other in observed):
        return None  # all ranks have the same, so it was reduced
    if any(part.local is None for part in parts):
        if len({part.observed.numel() for part in parts}) > 1:
            return None
        mean = torch.stack([tensor.reshape(-1) for tensor in observed]).mean(0)
        if not all(equal([mean], [part.whole], facts.close) for part in parts):
            return None
    elif not equal(observed, [part.local for part in parts], facts.close):
        return None
    return Cause(
        kind=CauseKind.NOT_REDUCED,
        text="each rank's optimizer got the gradient of this rank's own backward",
        advice="Reduce it over the ranks before step(): is the parameter outside of the wrapper, "
        "ignored, or added after wrapping",
    )


def _scaled(
    parts: Sequence[GradientParts], observed: Sequence[Tensor], facts: StepFacts
) -> Cause | None:
    """A gradient that is a multiple of the right one."""
    factor, error = proportion(observed, [part.whole for part in parts])
    if error > facts.close or isclose(factor, 1.0, rel_tol=facts.close):
        return None
    totals = [part.total for part in parts if part.total is not None]
    reduced: float | None = None
    if len(totals) == len(parts):
        of_total = proportion(observed, totals)
        if of_total.error > facts.close:
            return None
        reduced = of_total.factor
    cause = scale_cause(factor, reduced, facts.num_ranks, facts.num_calls, facts.close)
    return cause or scale_cause(factor, None, facts.num_replicas, facts.num_calls, facts.close)


def scale_cause(
    factor: float, reduced: float | None, num_ranks: int, num_calls: int, close: float = CLOSE
) -> Cause | None:
    """The cause of a gradient that is ``factor`` times the right one.

    Args:
        reduced: how many times the sum of the ranks' own gradients it is: 1 if they were summed,
            and 1 / ``num_ranks`` if they were averaged. None if that is not known.
        num_calls: forwards of each rank in the step.
        close: how far off a factor may be, relatively.

    Example:
        >>> scale_cause(4.0, 1.0, 4, 1).kind
        <CauseKind.SUMMED: 'gradients were summed and not averaged'>
        >>> scale_cause(3.7, 1.0, 4, 1) is None
        True
    """

    n, k = num_ranks, num_calls
    is_clear = reduced is None and (k == 1 or k != n)
    summed = is_clear or _near(reduced, 1, close)
    averaged = is_clear or _near(reduced, 1 / n, close)
    if n > 1 and _near(factor, n, close) and summed:
        return Cause(
            kind=CauseKind.SUMMED,
            text=f"gradients are {n} times those of one process, on {n} ranks",
            advice=f"Divide them by {n}, or let the reduction take the mean",
        )
    if n > 1 and _near(factor, 1 / n, close) and _near(reduced, 1 / n**2, close):
        return _averaged_twice(n)
    if k > 1 and (averaged or summed) and (_near(factor, 1 / k, close) or _near(factor, k, close)):
        return _accumulation(factor, k)
    if n > 1 and _near(factor, 1 / n, close) and averaged:
        return _averaged_twice(n)
    return None


def _near(value: float | None, other: float, close: float) -> bool:
    return value is not None and isclose(value, other, rel_tol=close)


def _accumulation(factor: float, k: int) -> Cause:
    if factor < 1:
        how = f"1/{k} of"
        advice = f"Divide the loss by {k} once: not both in the loop and in the library"
    else:
        how = f"{k} times"
        advice = f"Divide the loss of each forward by {k}, or the sum of gradients"
    return Cause(
        kind=CauseKind.ACCUMULATION,
        text=f"gradients are {how} those of one process, and each rank accumulates {k} of them",
        advice=advice,
    )


def _averaged_twice(n: int) -> Cause:
    return Cause(
        kind=CauseKind.AVERAGED_TWICE,
        text=f"gradients are 1/{n} of those of one process, on {n} ranks",
        advice=f"Divide by {n} once: in the loss, in the reduction or after it",
    )


def _mean_of_means(
    parts: Sequence[GradientParts], observed: Sequence[Tensor], facts: StepFacts
) -> Cause | None:
    means = [part.mean_of_means for part in parts]
    if not equal(observed, means, facts.close) or equal(
        [part.whole for part in parts], means, facts.close
    ):
        return None
    if facts.coverage is not None and not facts.coverage.is_partition:
        return None
    sizes = facts.rows_per_call
    if facts.by_rows:
        return Cause(
            kind=CauseKind.MEAN_OF_MEANS,
            text=f"each forward's mean counts alike, and forwards have {shortened(sizes)} rows",
            advice="Weight each loss by its share of the rows of the whole batch",
        )
    return Cause(
        kind=CauseKind.MEAN_OF_MEANS,
        text=f"the mean of the losses of {len(sizes)} forwards is not the loss of the whole batch, "
        "because loss_fn divides by a number that differs between them, such as tokens, or sets "
        "rows in relation to each other",
        advice="Divide each forward's sum by the number of the whole batch, for instance of all "
        "ranks' tokens",
    )


def _clipped(
    parts: Sequence[GradientParts], observed: Sequence[Tensor], facts: StepFacts
) -> Cause | None:
    """Gradients of which each rank scaled its part by another number: to the same norm."""
    limit = facts.clip
    if limit is not None and equal(observed, [part.clipped_apart for part in parts], facts.close):
        return _clipping(limit, facts.local_norms, "gradient")
    scales = [proportion([part.observed], [part.whole]) for part in parts]
    norms = [facts.part_norms[part.rank] for part in parts]
    is_known = bool(norms) and all(scale.error <= facts.close for scale in scales)
    if limit is None:
        factors = [scale.factor for scale in scales]
        observed_norms = [facts.observed_norms[part.rank] for part in parts]
        # A gradient of one element is a multiple of any other; that of all says more.
        if (
            is_known
            and factors[0] < 1
            and all(
                isclose(factor, factors[0], rel_tol=10 * facts.close)
                and isclose(of_rank, factor * norm, rel_tol=1e-3)
                for factor, of_rank, norm in zip(factors, observed_norms, norms, strict=True)
            )
        ):
            return _clipped_only_there(factors[0], facts)
        if own := _clipped_to_one_norm(parts, observed, facts):
            return own
    if not is_known:
        return None
    if limit is None:
        limit = max(facts.observed_norms)
        if sum(norm > limit * (1 + facts.close) for norm in set(facts.part_norms)) < 2:
            return None  # a single scaled part tells no limit
    if all(isclose(norm, norms[0], rel_tol=facts.close) for norm in facts.part_norms):
        return None  # all ranks have the same gradient, so that each has the norm of all
    expected = [clip_scale(norm, limit) for norm in norms]
    if not all(
        isclose(scale.factor, other, rel_tol=10 * facts.close)
        for scale, other in zip(scales, expected, strict=True)
    ):
        return None
    return _clipping(limit, facts.part_norms, "part of the gradient")


def _clipped_to_one_norm(
    parts: Sequence[GradientParts], observed: Sequence[Tensor], facts: StepFacts
) -> Cause | None:
    """Gradients of ranks that all clipped their own, to a norm that follows from the mean."""
    apart = [part.clipped_apart for part in parts if part.clipped_apart is not None]
    if len(apart) < len(parts) or not facts.apart_part_norms:
        return None
    limit, error = proportion(observed, apart)
    norms = [facts.apart_part_norms[part.rank] for part in parts]
    observed_norms = [facts.observed_norms[part.rank] for part in parts]
    if error > facts.close or not 0 < limit <= min(facts.local_norms):
        return None
    if not all(
        isclose(of_rank, limit * norm, rel_tol=1e-3)
        for of_rank, norm in zip(observed_norms, norms, strict=True)
    ):
        return None
    return _clipping(limit, facts.local_norms, "gradient")


def _clipped_by_some(
    parts: Sequence[GradientParts], observed: Sequence[Tensor], facts: StepFacts
) -> Cause | None:
    """A gradient that is whole on some ranks and has a smaller norm on others."""
    whole_norm = facts.whole_norm
    if whole_norm is None or len(facts.observed_norms) < len(parts):
        return None
    others: list[int] = []
    clipped: dict[int, float] = {}
    for part in parts:
        factor, error = proportion([part.observed], [part.whole])
        norm = facts.observed_norms[part.rank]
        # All gradients of the rank have this factor, or it scaled one alone.
        if error > facts.close or not isclose(norm, factor * whole_norm, rel_tol=1e-3):
            return None
        if isclose(factor, 1.0, rel_tol=facts.close):
            others.append(part.rank)
        elif factor < 1:
            clipped[part.rank] = norm
    if not clipped or not others or len(clipped) + len(others) < len(parts):
        return None
    norms = shortened([f"{norm:.4g}" for norm in clipped.values()])
    return Cause(
        kind=CauseKind.CLIPPED_BY_SOME,
        text=f"{ranks_text(list(clipped))} clipped to the gradient norm {norms}, and "
        f"{ranks_text(others)} kept the norm {whole_norm:.4g}",
        advice="Clip on all ranks or on none, after gradients are reduced, as ec.clip_grad_norm_ "
        "does",
    )


def _not_clipped(
    parts: Sequence[GradientParts], observed: Sequence[Tensor], facts: StepFacts
) -> Cause | None:
    """That one process clipped, and no rank did."""
    limit, norm = facts.clip, facts.whole_norm
    if limit is None or norm is None or norm <= limit * (1 + facts.close):
        return None
    if not equal(observed, [part.whole for part in parts], facts.close):
        return None
    return Cause(
        kind=CauseKind.CLIPPED_OTHERWISE,
        text=f"the ranks kept the norm {norm:.4g}, and clip={limit:.4g} clips that of one process",
        advice=f"Call ec.clip_grad_norm_(model, {limit:.4g}) on all ranks before step(), or "
        "compare without clip",
    )


def _clipped_only_there(factor: float, facts: StepFacts) -> Cause | None:
    """That ranks clipped rightly, and one process did not."""
    if facts.whole_norm is None:
        return None
    limit = factor * facts.whole_norm
    return Cause(
        kind=CauseKind.CLIPPED_OTHERWISE,
        text=f"all gradients are {factor:.4g} times those of one process, so that their norm is "
        f"{limit:.4g} instead of {facts.whole_norm:.4g}",
        advice=f"If the ranks clip to this norm, compare with clip={limit:.4g}",
    )


def clip_scale(norm: float, limit: float) -> float:
    """What clipping multiplies a gradient of that norm by, as torch does."""
    return min(1.0, limit / (norm + 1e-6))


def _clipping(limit: float, norms: Sequence[float], what: str) -> Cause:
    return Cause(
        kind=CauseKind.CLIPPING,
        text=f"each rank clipped its {what} to the norm {limit:.4g} by itself; their norms were "
        f"{shortened([f'{norm:.4g}' for norm in norms])}",
        advice="Clip by the norm over all ranks, after gradients are reduced, as "
        "ec.clip_grad_norm_ does",
    )
