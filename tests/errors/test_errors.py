"""Errors build their sentences from facts, and reach other processes unchanged."""

import copy
import inspect
import pickle

import pytest

from echelon import errors
from echelon.errors import (
    ArgumentError,
    CollectiveMismatch,
    CommError,
    CommTimeout,
    DeadlockError,
    EchelonError,
    ModelMismatch,
    RankError,
    RankFailed,
    SharedMemoryError,
    StageError,
    StateError,
    WorldError,
)

EXAMPLES = [
    ArgumentError("no"),
    RankError("dst", 7, 4),
    errors.UnsupportedError("no"),
    errors.ScheduleError("it is there twice", rank=1, index=3, action="1F0"),
    StateError("no"),
    errors.DebuggerQuit(1, "train.py:8"),
    StageError(1, 2, "1F2", ["1F0", "1F1"], ValueError("too warm")),
    ModelMismatch("the shape of 'w'", {0: "[2]", 1: "[3]"}),
    errors.CheckpointError("no space left", "runs/a/x", rank=1, errno=28),
    errors.CheckpointNotFound("no committed step", "runs/a"),
    errors.CheckpointCorrupt("the checksum differs", "runs/a/x", tensor="model/w", rank=0),
    errors.CheckpointTooNew(2, 1, "runs/a/x"),
    errors.CheckpointMismatch("runs/a", ["w"], ["v"], {"u": "(2,) instead of (3,)"}),
    errors.BlackboxError("has no black box", "runs/a"),
    errors.BlackboxCorrupt("has no record at byte 19", "runs/a/x"),
    errors.ReplayMismatch("runs/a", {"torch": ("2.11.0", "2.13.0")}),
    errors.StepNotKept("step 9 was not kept", "runs/a", step=9, kept=[(1, 4)]),
    errors.NonFiniteError(7, {1: "nan"}, {"w": {0: "1 nan of 4", 1: "inf"}}, skipped=2),
    WorldError("no"),
    errors.AuthenticationError([1], "in group 'world'"),
    errors.StartMismatch("version of torch", {0: "2.11.0", 1: "2.13.0"}),
    SharedMemoryError("a window", 3 * 2**20, 2**20),
    errors.DeviceMemoryError("the gradients of unit 'a'", 3 * 2**20, "cuda:0", "out of memory"),
    CommError("no"),
    CollectiveMismatch("world", 3, {0: "barrier", 1: "broadcast", 2: "barrier"}),
    RankFailed(2, "raised KeyError: 'x'", "barrier"),
    DeadlockError({0: ("barrier", [1]), 1: ("recv", [0])}, finished=[]),
    CommTimeout("barrier", [1, 2], 0.5, stuck={2: "at step 3 computes"}),
]


def classes() -> set[type]:
    return {
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, EchelonError)
    }


def test_every_class_but_the_base_has_an_example_here() -> None:
    assert {type(error) for error in EXAMPLES} == classes() - {EchelonError}


def test_every_class_is_public_and_drawn_in_the_tree_of_the_docstring() -> None:
    assert {name.__name__ for name in classes()} == set(errors.__all__)
    assert all(name in errors.__doc__ for name in errors.__all__)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("travel", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_an_error_travels_with_its_sentence_its_facts_and_its_notes(error, travel) -> None:
    sent = copy.copy(error)
    sent.add_note("on rank 1")
    found = travel(sent)
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert found.__dict__ == {**error.__dict__, "__notes__": ["on rank 1"]}


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ArgumentError, ValueError),
        (RankError, ValueError),
        (StateError, RuntimeError),
        (CommTimeout, TimeoutError),
        (CollectiveMismatch, CommError),
        (SharedMemoryError, WorldError),
        (errors.StartMismatch, WorldError),
        (errors.NonFiniteError, FloatingPointError),
    ],
)
def test_errors_can_be_caught_as_what_python_calls_them(kind, builtin) -> None:
    assert issubclass(kind, builtin)
