import torch

from echelon.laboratory.comparison import ValueKind
from echelon.laboratory.pieces import Piece
from echelon.laboratory.value_pairs import distance, piece_pairs, rows_of


def test_rows_are_taken_in_the_dim_that_differs_and_with_all_their_entries() -> None:
    full = torch.arange(24).view(2, 6, 2)
    [taken] = rows_of(full, torch.zeros(2, 4, 2), [2, 0], 3)
    assert torch.equal(taken, full[:, [4, 5, 0, 1]])


def test_an_output_without_a_dim_of_rows_has_no_counterpart_for_some_rows() -> None:
    assert rows_of(torch.ones(()), torch.ones(()), [0], 2) == []
    assert rows_of(torch.ones(5), torch.ones(5), [0], 2) == []
    assert rows_of(torch.ones(4, 2), torch.ones(3, 3), [0], 2) == []


def test_an_output_of_all_rows_is_compared_in_their_order() -> None:
    full = torch.arange(3)
    assert rows_of(full, full, [0, 1, 2], 3) == [full]
    [taken] = rows_of(full, full, [2, 1, 0], 3)
    assert taken.tolist() == [2, 1, 0]


def test_equal_infinities_and_nans_are_not_apart_and_other_nans_are_infinitely_far() -> None:
    a = torch.tensor([torch.inf, torch.nan, 1.0, torch.nan])
    b = torch.tensor([torch.inf, torch.nan, 3.0, 0.0])
    assert distance(a, b).tolist() == [0.0, 0.0, 2.0, torch.inf]


def test_a_range_of_a_parameter_stands_beside_the_same_range_of_the_plain_one() -> None:
    full = Piece("w", (2, 3), 0, 6, torch.arange(6.0))
    ranges = [Piece("w", (2, 3), 4, 2, torch.ones(2)), Piece("other", (2,), 0, 2, torch.ones(2))]
    block = Piece("w", (2, 3), (slice(0, 2), slice(1, 2)), 2, torch.ones(2, 1))
    pairs = list(piece_pairs(ValueKind.PARAMETER, 1, [*ranges, block], [full]))
    assert [pair.expected.tolist() for pair in pairs] == [[4.0, 5.0], [1.0, 4.0]]
    assert [pair.rank for pair in pairs] == [1, 1]
