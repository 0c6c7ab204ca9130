from dataclasses import replace

import pytest
import torch
from torch import Tensor

from echelon.laboratory.comparison import CauseKind
from echelon.laboratory.gradient_causes import (
    GradientParts,
    StepFacts,
    clip_scale,
    gradient_cause,
    gradient_causes,
    rounded_gradients_cause,
    scale_cause,
)

LOCAL = [
    torch.tensor([1.0, 2.0, 3.0, 5.0, 7.0], dtype=torch.float64) / 3,
    torch.tensor([4.0, 1.0, -2.0, 1.0, 3.0], dtype=torch.float64) / 3,
]
TOTAL = LOCAL[0] + LOCAL[1]
WHOLE = TOTAL / 2
FACTS = StepFacts(num_ranks=2, part_norms=(1.0, 1.0), observed_norms=(1.0, 1.0))


def parts(observed: list[Tensor]) -> list[GradientParts]:
    return [
        GradientParts(
            rank=rank,
            observed=tensor,
            expected=WHOLE,
            whole=WHOLE,
            local=LOCAL[rank],
            total=TOTAL,
            mean_of_means=WHOLE,
        )
        for rank, tensor in enumerate(observed)
    ]


def kind_of(observed: list[Tensor], facts: StepFacts = FACTS) -> CauseKind | None:
    cause = gradient_cause(parts(observed), facts)
    return None if cause is None else cause.kind


def test_each_signature_of_a_gradient_gives_its_cause() -> None:
    assert kind_of([TOTAL, TOTAL]) is CauseKind.SUMMED
    assert kind_of([TOTAL / 4, TOTAL / 4]) is CauseKind.AVERAGED_TWICE
    assert kind_of(LOCAL) is CauseKind.NOT_REDUCED
    assert kind_of([WHOLE.float(), WHOLE.float()]) is CauseKind.PRECISION


def test_a_gradient_that_fits_no_signature_has_no_cause() -> None:
    assert kind_of([WHOLE + 1, WHOLE + 1]) is None
    assert kind_of([WHOLE * 1.5, WHOLE * 1.5]) is None
    assert kind_of([TOTAL, WHOLE]) is None


def test_a_parameter_that_nobody_reduces_is_seen_where_the_rows_are_unknown() -> None:
    unknown = [replace(part, local=None, total=None) for part in parts(LOCAL)]
    cause = gradient_cause(unknown, FACTS)
    assert cause is not None
    assert cause.kind is CauseKind.NOT_REDUCED


@pytest.mark.parametrize(
    ("factor", "reduced", "num_ranks", "num_calls", "kind"),
    [
        (4.0, 1.0, 4, 1, CauseKind.SUMMED),
        (0.25, 1 / 4, 4, 1, CauseKind.AVERAGED_TWICE),
        (0.25, 1 / 16, 4, 1, CauseKind.AVERAGED_TWICE),
        (2.0, 1 / 4, 4, 2, CauseKind.ACCUMULATION),
        (0.5, 1 / 4, 4, 2, CauseKind.ACCUMULATION),
        (4.0, 1.0, 4, 4, CauseKind.SUMMED),  # as many forwards as ranks
        (4.0, 1 / 4, 4, 4, CauseKind.ACCUMULATION),
        (4.0, None, 4, 1, CauseKind.SUMMED),
        (4.0, None, 4, 4, None),  # it may be one or the other
        (3.7, 1.0, 4, 1, None),
        (1.0, 1.0, 1, 1, None),
    ],
)
def test_a_factor_has_the_cause_that_explains_it(
    factor: float, reduced: float | None, num_ranks: int, num_calls: int, kind: CauseKind | None
) -> None:
    cause = scale_cause(factor, reduced, num_ranks, num_calls)
    assert (None if cause is None else cause.kind) is kind


def test_parts_that_are_scaled_to_one_norm_were_clipped_apart() -> None:
    limit, norms = 0.5, (1.0, 2.0)
    facts = replace(FACTS, clip=limit, part_norms=norms, whole_norm=5**0.5)
    scaled = [WHOLE * clip_scale(norm, limit) for norm in norms]
    assert kind_of(scaled, facts) is CauseKind.CLIPPING
    unknown = replace(facts, clip=None, observed_norms=(limit, limit))
    assert kind_of(scaled, unknown) is CauseKind.CLIPPING
    assert kind_of([WHOLE * 0.3, WHOLE * 0.7], facts) is None


def test_ranks_that_clip_rightly_where_one_process_does_not_are_told_how_to_compare() -> None:
    facts = replace(FACTS, whole_norm=2.0, part_norms=(2.0, 2.0), observed_norms=(0.3, 0.3))
    cause = gradient_cause(parts([WHOLE * 0.15, WHOLE * 0.15]), facts)
    assert cause is not None
    assert "clip=0.3" in cause.advice


def test_small_gradients_are_recognised_together_as_rounded() -> None:
    pieces = [
        [replace(part, observed=part.observed[:1].bfloat16(), expected=part.expected[:1])]
        for part in parts([WHOLE, WHOLE])
    ]
    cause = rounded_gradients_cause(pieces, FACTS)
    assert cause is None  # two elements say nothing
    cause = rounded_gradients_cause([parts([WHOLE.bfloat16().double()] * 2)], FACTS)
    assert cause is not None
    assert "bfloat16" in cause.text


MEANS = WHOLE + torch.tensor([0.1, -0.2, 0.3, 0.1, 0.0], dtype=torch.float64)
BEFORE = torch.tensor([1.0, 0.0, 2.0, 0.0, -1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("observed", "clip", "kinds"),
    [
        (MEANS * 0.3, None, [CauseKind.MEAN_OF_MEANS, CauseKind.CLIPPED_OTHERWISE]),
        (MEANS * 2, None, [CauseKind.MEAN_OF_MEANS, CauseKind.SUMMED]),
        (MEANS / 4, None, [CauseKind.MEAN_OF_MEANS, CauseKind.CLIPPED_OTHERWISE]),
        (MEANS + BEFORE, None, [CauseKind.MEAN_OF_MEANS, CauseKind.NOT_ZEROED]),
        (MEANS * clip_scale(float(MEANS.norm()), 0.5), 0.5, [CauseKind.MEAN_OF_MEANS]),
        (MEANS * 0.3, 0.5, []),
        (MEANS + 1, None, []),
        (MEANS * 1.5, None, []),
    ],
)
def test_two_causes_at_once_are_both_told(
    observed: Tensor, clip: float | None, kinds: list[CauseKind]
) -> None:
    norm = float(MEANS.norm())
    facts = replace(
        FACTS,
        clip=clip,
        rows_per_call=(3, 2),
        by_rows=True,
        whole_norm=float(WHOLE.norm()),
        mean_norm=norm,
        mean_part_norms=(norm, norm),
        observed_norms=(float(observed.norm()),) * 2,
    )
    given = [
        replace(part, mean_of_means=MEANS, total=MEANS * 2, before=BEFORE)
        for part in parts([observed, observed])
    ]
    assert gradient_cause(given, facts) is None
    causes = gradient_causes(given, facts)
    assert [cause.kind for cause in causes] == kinds
    assert not any("one process" in cause.text for cause in causes)
