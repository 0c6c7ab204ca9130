"""A condition waits for any other rank, a collective for all."""

from echelon.comm.threads.pending import Pending, PendingCondition


def test_a_condition_names_all_others_unless_it_knows_better() -> None:
    assert PendingCondition(1, [0, 2], lambda: False, None).absent == {0, 2}
    known = PendingCondition(1, [0, 2], lambda: False, lambda: {2})
    assert known.absent == {2}
    assert known.expected == (1,)


def test_a_collective_waits_for_those_that_have_not_joined() -> None:
    pending = Pending([0, 1, 2])
    pending.absent.discard(1)
    assert pending.absent == {0, 2}
    assert not pending.complete
