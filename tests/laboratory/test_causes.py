import torch

from echelon.laboratory.causes import equal, lower_precision, proportion, shortened, stream_cause
from echelon.laboratory.seen_rows import AlikeStreams

EXACT = torch.linspace(0, 1, 9, dtype=torch.float64) / 3


def test_each_lower_dtype_is_recognised_by_its_numbers() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert lower_precision(EXACT.to(dtype), EXACT) is dtype
        assert lower_precision(EXACT.to(dtype).double(), EXACT) is dtype


def test_values_that_are_wrong_and_not_rounded_went_through_no_lower_dtype() -> None:
    assert lower_precision(EXACT * 1.001, EXACT) is None
    assert lower_precision(torch.tensor([0.5, 2.0]).double(), EXACT[:2]) is None  # too few
    assert lower_precision(torch.full((9,), 1024.0).double(), EXACT) is None  # far away


def test_vectors_are_proportional_with_their_factor_and_error() -> None:
    assert proportion([EXACT * 2], [EXACT]).factor == 2
    assert proportion([EXACT.flip(0)], [EXACT]).error > 0.1
    assert proportion([EXACT], [torch.zeros(9)]).error == torch.inf


def test_vectors_of_different_lengths_or_unknown_ones_are_not_equal() -> None:
    assert equal([EXACT], [EXACT * (1 + 1e-9)])
    assert not equal([EXACT], [EXACT * 1.01])
    assert not equal([EXACT], [EXACT[:3]])
    assert not equal([EXACT], [None])


def test_long_lists_are_shortened() -> None:
    assert shortened(range(3)) == "0, 1, 2"
    assert shortened(range(9)) == "0, 1, 2, 3, 4, 5 and 3 more"


def test_the_cause_of_alike_streams_says_who_seeded_them() -> None:
    assert "ranks 0 and 2" in stream_cause(AlikeStreams(0, (0, 2), is_initial=True)).text
    assert "nobody seeded" in stream_cause(AlikeStreams(0, (0, 2), is_initial=True)).text
    assert "two forwards of rank 1" in stream_cause(AlikeStreams(0, (1, 1), is_initial=False)).text
