import torch

from echelon.laboratory.seen_rows import RowFinder, coverage


def test_rows_are_found_by_their_contents_in_any_order() -> None:
    batches = [(torch.arange(8.0).view(4, 2), torch.zeros(4))]
    finder = RowFinder(batches)
    assert finder.rows(0, [batches[0][0][[2, 0]]]) == [(0, 2), (0, 0)]


def test_equal_rows_are_told_apart_by_the_order_in_which_they_are_seen() -> None:
    batches = [(torch.zeros(2, 2), torch.zeros(2))]
    finder = RowFinder(batches)
    assert finder.rows(0, [torch.zeros(1, 2)]) == [(0, 0)]
    assert finder.rows(0, [torch.zeros(1, 2)]) == [(0, 1)]


def test_a_row_of_another_batch_is_found_there() -> None:
    finder = RowFinder([torch.zeros(1, 2), torch.ones(1, 2)])
    assert finder.rows(0, [torch.ones(1, 2)]) == [(1, 0)]


def test_rows_are_found_in_the_dtype_of_the_call() -> None:
    batch = torch.rand(3, 2, dtype=torch.float64)
    assert RowFinder([batch]).rows(0, [batch[1:2].float()]) == [(0, 1)]


def test_rows_that_were_changed_are_of_no_batch() -> None:
    assert RowFinder([torch.zeros(2, 2)]).rows(0, [torch.ones(1, 2)]) is None
    assert RowFinder([torch.zeros(2, 2)]).rows(0, [torch.ones(1, 2, 2)]) is None


def test_a_coverage_says_what_was_seen_never_twice_and_of_other_steps() -> None:
    seen = coverage(0, 4, {0: [(0, 0), (0, 1)], 1: [(0, 1), (1, 3)]})
    assert seen.never == (2, 3)
    assert seen.repeated == {1: (0, 1)}
    assert seen.foreign == ((1, 3),)
    assert not seen.is_partition
    assert coverage(0, 2, {0: [(0, 1)], 1: [(0, 0)]}).is_partition
