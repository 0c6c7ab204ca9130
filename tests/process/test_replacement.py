"""Replacements of one function come and go in any order, and leave it as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from echelon.process import replacement
from echelon.process.replacement import Replacement


def original() -> str:
    return "original"


@pytest.fixture
def holder() -> Iterator[Any]:
    yield SimpleNamespace(function=original)
    replacement._put_in.clear()


def named(holder: Any, name: str, **options: Any) -> Replacement:
    """A replacement whose function says in what order it and others are called."""

    def function() -> str:
        return f"{name} {made.original()}"

    made = Replacement(holder, "function", function, **options)
    return made


@pytest.mark.parametrize("order", list(permutations("abc")))
def test_in_whatever_order_they_go_each_calls_those_that_are_still_in(
    holder: Any, order: tuple[str, ...]
) -> None:
    replacements = {name: named(holder, name) for name in "abc"}
    for each in replacements.values():
        each.put_in()
    assert holder.function() == "c b a original"
    left = ["c", "b", "a", "original"]
    for name in order:
        replacements[name].take_out()
        left.remove(name)
        assert holder.function() == " ".join(left)
    assert holder.function is original


def test_a_second_put_in_changes_nothing_even_below_another_one(holder: Any) -> None:
    lower, upper = named(holder, "lower"), named(holder, "upper")
    for each in (lower, lower, upper, lower, upper):
        each.put_in()
    assert holder.function() == "upper lower original"
    for each in (lower, lower, upper):
        each.take_out()
    assert holder.function is original


def test_what_somebody_else_has_put_there_stays_and_calls_ours_only_once(holder: Any) -> None:
    ours = named(holder, "ours")
    ours.put_in()
    inner = holder.function
    holder.function = theirs = lambda: f"theirs {inner()}"
    ours.take_out()
    assert holder.function is theirs
    ours.put_in()  # as the next run does
    assert holder.function() == "theirs ours original"
    holder.function = inner  # they are done
    ours.take_out()
    assert holder.function is original


def test_it_is_put_in_again_if_somebody_has_put_the_original_back(holder: Any) -> None:
    ours = named(holder, "ours")
    ours.put_in()
    holder.function = original
    ours.put_in()
    assert holder.function() == "ours original"
    ours.take_out()
    assert holder.function is original


def test_it_replaces_only_what_it_may(holder: Any) -> None:
    ours = named(holder, "ours", over=lambda current: current is original)
    holder.function = theirs = lambda: "theirs"
    ours.put_in()
    assert holder.function is theirs
    ours.take_out()
    assert holder.function is theirs
    holder.function = original
    ours.put_in()
    assert holder.function() == "ours original"


def test_threads_that_put_in_and_take_out_at_once_leave_it_as_it_was(holder: Any) -> None:
    def repeat(each: Replacement) -> Callable[[], None]:
        def run() -> None:
            for _ in range(500):
                each.put_in()
                holder.function()
                each.take_out()

        return run

    threads = [threading.Thread(target=repeat(named(holder, name))) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert holder.function is original


def test_one_that_somebody_has_put_back_does_not_call_itself() -> None:
    class Holder:
        value = staticmethod(lambda: "plain")

    first = Replacement(Holder, "value", lambda: f"first {first.original.__func__()}")
    plain = vars(Holder)["value"]
    first.put_in()
    seen = vars(Holder)["value"]
    first.take_out()
    Holder.value = seen  # as a test that restores what it has found
    second = Replacement(Holder, "value", lambda: f"second {second.original()}")
    second.put_in()
    first.put_in()
    assert Holder.value() == "second first plain"
    second.take_out()
    first.take_out()
    assert vars(Holder)["value"] is plain


def test_an_attribute_that_was_not_there_is_gone_again() -> None:
    class Holder:
        pass

    ours = Replacement(Holder, "function", original)
    ours.put_in()
    assert vars(Holder)["function"] is original
    ours.take_out()
    assert "function" not in vars(Holder)


def test_two_that_put_the_same_in_and_others_above_do_not_call_each_other_for_ever(
    holder: Any,
) -> None:
    def same() -> str:
        return "same"

    first = Replacement(holder, "function", same)
    first.put_in()
    Replacement(holder, "function", same).put_in()  # whose original is what it puts in
    upper = named(holder, "upper")
    upper.put_in()
    assert holder.function() == "upper same"
    upper.take_out()
    assert holder.function is same
