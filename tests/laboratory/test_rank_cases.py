"""Marks become cases, and a mark that cannot be followed is refused with a sentence."""

from dataclasses import dataclass
from typing import Any

import pytest

from echelon.errors import ArgumentError
from echelon.laboratory.rank_cases import RankCase, case_ids, rank_cases
from echelon.testing import FAULTS, slow


@dataclass(frozen=True)
class Mark:
    """As pytest's, which makes none of our names where only its own are registered."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def ranks(*args: Any, **kwargs: Any) -> Mark:
    return Mark(args, kwargs)


faults = ranks


@pytest.mark.parametrize("mark", [ranks(4), ranks(ranks=4), ranks([4]), ranks((4, 4))])
def test_one_number_is_one_case(mark: Mark) -> None:
    assert rank_cases(mark) == [RankCase(4, "threads", 60.0)]


def test_several_numbers_and_worlds_are_their_product() -> None:
    cases = rank_cases(ranks([1, 4], world=["threads", "processes"], timeout=3))
    assert cases == [
        RankCase(size, world, 3.0) for size in (1, 4) for world in ("threads", "processes")
    ]


def test_a_chosen_world_replaces_that_of_the_mark() -> None:
    mark = ranks(2, world=["threads", "processes"])
    assert rank_cases(mark, world="processes") == [RankCase(2, "processes", 60.0)]


def test_a_chosen_timeout_does_not_replace_that_of_the_mark() -> None:
    assert rank_cases(ranks(2, timeout=3), timeout=9.0)[0].timeout == 3
    assert rank_cases(ranks(2), timeout=9.0)[0].timeout == 9


def test_names_say_what_differs_between_cases() -> None:
    assert case_ids(rank_cases(ranks([1, 2]))) == ["1rank", "2ranks"]
    assert case_ids(rank_cases(ranks(2, world=["threads", "processes"]))) == [
        "threads",
        "processes",
    ]
    ids = case_ids(rank_cases(ranks([2, 3]), faults("raises", "skips a call")))
    assert ids == ["2ranks-raises", "2ranks-skips_a_call", "3ranks-raises", "3ranks-skips_a_call"]


def test_without_names_there_are_all_faults_that_the_world_can_have() -> None:
    def names(world: str) -> list[str]:
        cases = rank_cases(ranks(2, world=world), faults(rank=1, at=2))
        assert all(case.faulty and case.faulty.rank == 1 and case.faulty.at == 2 for case in cases)
        return [case.faulty.fault.name for case in cases if case.faulty]

    assert names("processes") == [fault.name for fault in FAULTS]
    assert names("threads") == [fault.name for fault in FAULTS if not fault.needs_process]


def test_a_fault_may_be_one_of_the_users_own_and_shortens_the_timeout() -> None:
    (case,) = rank_cases(ranks(2), faults(slow(0.1)))
    assert str(case) == "2 ranks (threads), dawdles 0.1 s"
    assert case.timeout == 5.0


@pytest.mark.parametrize(
    ("mark", "sentence"),
    [
        (ranks(), "ranks of @pytest.mark.ranks is None: give 4, or"),
        (ranks(0), "is 0: give a number from 1"),
        (ranks(True), "is True: give a number"),
        (ranks([2, "3"]), "is '3': give a number"),
        (ranks([]), r"is \[\]: give 4, or"),
        (ranks(2.0), "is 2.0: give 4, or"),
        (ranks(2, 3), "has 2 arguments without a name"),
        (ranks(2, ranks=3), "says ranks twice"),
        (ranks(2, worlds="threads"), "has the unknown argument 'worlds'; it has ranks, world"),
        (ranks(2, world="gloo"), "world of @pytest.mark.ranks is 'gloo': use 'threads' or"),
        (ranks(2, world=3), "world of @pytest.mark.ranks is 3: give 'threads', 'processes'"),
        (ranks(2, timeout=0), "timeout of @pytest.mark.ranks is 0: give seconds"),
        (ranks(2, timeout="1"), "timeout of @pytest.mark.ranks is '1'"),
        (ranks(2, timeout=float("inf")), "timeout of @pytest.mark.ranks is inf"),
    ],
)
def test_a_mark_of_ranks_that_cannot_be_followed_is_refused(mark: Mark, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        rank_cases(mark)


@pytest.mark.parametrize(
    ("mark", "sentence"),
    [
        (faults("explodes"), "names the unknown fault 'explodes': use a Fault, or 'raises'"),
        (faults(3), "names the unknown fault 3"),
        (faults("is killed"), "needs world='processes': is killed ends a whole process"),
        (faults(rank=2), "names rank 2, which is not one of 2 ranks"),
        (faults(at=-1), "has at=-1: give the number of a call"),
        (faults(when=3), "has the unknown argument 'when'; it has rank and at"),
    ],
)
def test_a_mark_of_faults_that_cannot_be_followed_is_refused(mark: Mark, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        rank_cases(ranks(2), mark)
