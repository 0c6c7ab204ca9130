"""The limits of waiting fit together: what one side waits for, the other side has time to do."""

from echelon.process import time_limits as limits


def test_every_limit_is_a_positive_number_of_seconds() -> None:
    known = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert known
    assert all(name.endswith("_S") for name in known)
    assert all(isinstance(value, float) and value > 0 for value in known.values())


def test_a_rank_says_its_last_words_before_it_is_killed() -> None:
    assert limits.LAST_WORDS_S < limits.END_S


def test_a_rank_that_closes_a_failed_world_can_tell_the_others_in_its_time() -> None:
    assert limits.CLOSE_FAILED_WORLD_S + limits.STORE_S <= limits.TELL_S


def test_records_are_read_the_longer_the_surer_it_is_that_one_will_come() -> None:
    assert limits.READ_RECORDS_S <= limits.READ_RECORD_OF_LOST_S < limits.READ_RECORD_OF_LIVING_S


def test_who_holds_the_store_stays_until_the_others_have_read_why_a_rank_failed() -> None:
    assert limits.CLOSE_FAILED_WORLD_S > limits.READ_RECORD_OF_LOST_S
    assert limits.CLOSE_WORLD_S >= limits.READ_RECORD_OF_LIVING_S


def test_threads_get_longer_to_notice_a_failure_because_they_cannot_be_killed() -> None:
    assert limits.NOTICE_S < limits.NOTICE_IN_THREADS_S


def test_a_rank_that_is_asked_twice_gets_no_longer_than_one_that_is_asked_once() -> None:
    assert limits.HURRY_S <= limits.SAVE_S
