"""States of the process that belong to a rank, and the lock that keeps worlds apart."""

from __future__ import annotations

import os
import random
import threading
import time
import warnings
from collections.abc import Iterator

import pytest
import torch

from echelon.comm.threads import process_state
from echelon.comm.threads.process_state import OUTSIDE, ProcessLock, StateOwner, register_state


@pytest.fixture
def value() -> Iterator[list[int]]:
    """A state of the process, of which ranks start with a copy."""
    held = [0]

    def restore(saved: list[int]) -> None:
        held[:] = saved

    remove = register_state("of a test", lambda: list(held), restore, list)
    yield held
    OUTSIDE.load()
    remove()


def test_each_owner_finds_what_it_has_left(value: list[int]) -> None:
    value[0] = 1
    first, second = StateOwner(OUTSIDE), StateOwner(OUTSIDE)
    first.load()
    assert value == [1]
    value[0] = 2
    second.load()
    assert value == [1]
    value[0] = 3
    first.load()
    assert value == [2]
    OUTSIDE.load()
    assert value == [1]
    second.load()
    assert value == [3]


def test_a_state_that_is_registered_later_starts_as_it_was_then(value: list[int]) -> None:
    owner = StateOwner(OUTSIDE)
    owner.load()
    late = [5]
    remove = register_state("late", lambda: late[0], lambda saved: late.__setitem__(0, saved))
    try:
        late[0] = 6
        OUTSIDE.load()
        assert late == [5]
        owner.load()
        assert late == [6]
    finally:
        OUTSIDE.load()
        remove()


@pytest.mark.parametrize("name", sorted(process_state._states))
def test_what_is_restored_is_what_was_saved(name: str) -> None:
    state = process_state._states[name]
    saved = state.save()
    draws = torch.rand(3), random.random()
    state.restore(saved)
    if name == "torch":
        assert torch.equal(torch.rand(3), draws[0])
    elif name == "random":
        assert random.random() == draws[1]
    else:
        assert state.save() == saved


def test_variables_that_are_no_text_and_a_folder_that_is_gone_do_no_harm(tmp_path: str) -> None:
    owner = StateOwner(OUTSIDE)
    folder = os.path.join(tmp_path, "gone")
    os.mkdir(folder)
    before = os.getcwd()
    try:
        owner.load()
        os.environb[b"OF_TEST"] = b"\xff\xfe"
        os.chdir(folder)
        os.rmdir(folder)
        OUTSIDE.load()
        assert b"OF_TEST" not in os.environb
        assert os.getcwd() == before
        owner.load()
        assert os.environb[b"OF_TEST"] == b"\xff\xfe"
    finally:
        OUTSIDE.load()
    assert os.getcwd() == before


def test_a_warning_that_is_shown_once_is_not_shown_again_after_each_turn() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("once")
        owner = StateOwner(OUTSIDE)
        for _ in range(3):
            owner.load()
            warnings.warn("of a test", stacklevel=1)
            OUTSIDE.load()
    assert len(seen) == 1


def test_worlds_get_the_lock_in_the_order_in_which_they_came() -> None:
    lock, order = ProcessLock(), []
    lock.acquire("first")
    lock.acquire("first")  # it has it
    assert not lock.is_wanted()

    def come(name: str) -> None:
        lock.acquire(name)
        order.append(name)
        lock.release(name)

    threads = [threading.Thread(target=come, args=(name,)) for name in ("second", "third")]
    for number, thread in enumerate(threads):
        thread.start()
        while len(lock._queue) <= number:
            time.sleep(0.001)
    lock.release("third")  # which has it not
    assert lock.is_wanted()
    assert order == []
    lock.release("first")
    for thread in threads:
        thread.join()
    assert order == ["second", "third"]


def test_in_a_forked_child_the_lock_is_free_and_the_state_is_that_of_the_child() -> None:
    owner = StateOwner(OUTSIDE)
    owner.load()
    OUTSIDE.lock.acquire("a world of the parent")
    try:
        torch.manual_seed(11)
        child = os.fork()
        if child == 0:
            OUTSIDE.lock.acquire("a world of the child")
            inner = StateOwner(OUTSIDE)
            inner.load()
            os._exit(0 if torch.initial_seed() == 11 else 3)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        OUTSIDE.lock.release("a world of the parent")
        OUTSIDE.load()
