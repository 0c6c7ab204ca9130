from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

import echelon as ec
from echelon.diagnosis.failure_record import FailureRecord, Reason
from echelon.diagnosis.failure_report import MAX_LINES, failure_report
from echelon.diagnosis.flight_recorder import Phase, RankStatus, where_of
from echelon.errors import (
    ArgumentError,
    CheckpointError,
    CollectiveMismatch,
    CommTimeout,
    RankFailed,
    StateError,
)


def record(error: BaseException, rank: int, time_s: float = 0.0) -> FailureRecord:
    """What a rank writes that raised ``error`` at ``time_s``."""
    try:
        raise error
    except type(error) as raised:
        made = FailureRecord.of(raised, rank)
    return FailureRecord(
        **{name: getattr(made, name) for name in made.__slots__} | {"time_s": time_s}
    )


@dataclass(frozen=True)
class Exit:
    """How one process ended; ``closed``: after its agent had told it to."""

    code: int
    closed: bool


def text(
    records: Mapping[int, FailureRecord] | None = None,
    exits: Mapping[int, Exit] | None = None,
    logs: Mapping[int, str] | None = None,
    entries: Mapping[int, RankStatus] | None = None,
    agent_log: str = "",
) -> list[str]:
    """The report of ranks that left records, and of processes that could not."""
    ended = {
        rank: FailureRecord.of_process(
            rank,
            exit.code,
            was_signaled=exit.closed,
            where=where_of(rank, entries or {}),
            log=(logs or {}).get(rank, ""),
        )
        for rank, exit in (exits or {}).items()
    }
    return failure_report({**ended, **(records or {})}.values(), [], entries, agent_log)


# Rank 1 was killed, and the agent then told rank 0 to end.
KILLED = {0: Exit(-15, closed=True), 1: Exit(-9, closed=False)}


def noticed(rank: int, failed: int) -> FailureRecord:
    return record(RankFailed(failed, "died", "all_reduce #4"), rank)


def test_a_killed_rank_comes_before_those_that_noticed() -> None:
    lines = text(records={0: noticed(0, 1)}, exits=KILLED)
    assert lines[0] == "rank 1 was killed by SIGKILL"
    assert any(line.startswith("then rank 0 raised RankFailed: rank 1 died") for line in lines)


def test_the_exception_that_came_first_is_the_cause() -> None:
    records = {0: record(KeyError("late"), 0, 9.0), 2: record(ValueError("early"), 2, 8.0)}
    assert text(records=records)[0] == "rank 2 raised ValueError: early"


def test_an_exception_is_the_cause_even_if_another_rank_noticed_it_before() -> None:
    records = {0: noticed(0, 1), 1: record(ValueError("boom"), 1, time_s=9e9)}
    assert text(records=records)[0] == "rank 1 raised ValueError: boom"


def test_a_rank_that_left_with_code_0_is_found_by_those_that_waited() -> None:
    lines = text(records={0: noticed(0, 1)}, exits={0: Exit(1, closed=False)})
    assert lines[0] == "rank 1 exited with code 0 while others were waiting"


def test_a_rank_without_a_record_is_explained_by_its_standard_error() -> None:
    log = "Traceback (most recent call last):\n  File 'a.py'\nImportError: no such thing\n"
    exits = {1: Exit(1, closed=False)}
    assert text(exits=exits, logs={1: log})[0] == "rank 1 raised ImportError: no such thing"
    usage = "usage: a.py [-h]\na.py: error: unrecognized arguments: --bad\n"
    exits = {1: Exit(2, closed=False)}
    lines = text(exits=exits, logs={1: usage})
    assert lines[0] == "rank 1 exited with code 2"
    assert "  a.py: error: unrecognized arguments: --bad" in lines


def where(rank: int, **facts: Any) -> RankStatus:
    """The page of a rank at step 4."""
    defaults: dict[str, Any] = {
        "pid": 1,
        "start_ticks": 1,
        "attempt": 0,
        "phase": Phase.RUNNING,
        "step": 4,
        "call": "barrier (#7 of group 'world') at train.py:9 in main",
        "waits_for": None,
        "thread_id": 1,
        "native_id": 1,
        "stacks_fd": None,
    }
    return RankStatus(rank=rank, **defaults | facts)


def test_a_rank_that_died_is_told_with_its_step_and_its_last_call() -> None:
    lines = text(exits={1: Exit(-9, closed=False)}, entries={0: where(0), 1: where(1)})
    assert lines[:2] == [
        "rank 1 at step 4 was killed by SIGKILL",
        "  its last call: barrier (#7 of group 'world') at train.py:9 in main",
    ]


@pytest.mark.parametrize(
    ("entries", "place"),
    [
        ({0: where(0)}, " before echelon.init()"),
        ({0: where(0), 1: where(1, phase=Phase.STARTING)}, " in echelon.init()"),
        ({}, ""),  # the script may not use it at all
    ],
)
def test_a_rank_that_died_before_its_first_step_is_told_with_how_far_it_had_come(
    entries: dict[int, RankStatus], place: str
) -> None:
    lines = text(exits={1: Exit(-9, closed=False)}, entries=entries)
    assert lines[0] == f"rank 1{place} was killed by SIGKILL"


def test_an_exception_is_told_with_the_step() -> None:
    made = FailureRecord.of(ValueError("boom"), 1, "at step 4")
    assert text(records={1: made})[0] == "rank 1 at step 4 raised ValueError: boom"


def test_a_crash_is_told_with_its_stack() -> None:
    log = (
        "Fatal Python error: Segmentation fault\n\n"
        "Current thread 0x00007f01 (most recent call first):\n"
        '  File "train.py", line 3 in step\n  File "train.py", line 9 in <module>\n\n'
        "Extension modules: numpy (total: 1)\n"
    )
    lines = text(exits={1: Exit(-11, closed=False)}, logs={1: log})
    assert lines[1:4] == ["  its stack:", "    train.py:9 in <module>", "    train.py:3 in step"]


def stuck(rank: int, time_s: float = 0.0, **found: Any) -> FailureRecord:
    """What a rank writes that waited for rank 2 in vain."""
    error = CommTimeout("barrier at train.py:9 in main", [2], 10.0, **found)
    error.add_note("The Python stacks of the ranks of this host:\nstacks")
    return record(error, rank, time_s)


def test_of_a_hang_the_rank_that_is_stuck_comes_first() -> None:
    rows = "  rank 2 at step 4 computes\n  its last call: none\n  its stack:\n    train.py:3 in f"
    records = {
        0: stuck(0, 5.0),
        1: stuck(1, 6.0, others=rows, stuck={2: "at step 4 computes"}),
    }
    lines = text(records=records, exits={2: Exit(-15, closed=True)})
    assert lines[:7] == [
        "rank 2 at step 4 computes; rank 1 waited 10.0 s for it",
        "  its last call: none",
        "  its stack:",
        "    train.py:3 in f",
        "  rank 1 waited in barrier at train.py:9 in main",
        "  the stacks of all ranks are in error-stacks.txt, in the folder of rank 1",
        "",
    ]


def test_of_a_hang_that_nobody_could_look_into_the_place_is_told() -> None:
    lines = text(records={0: stuck(0)}, entries={0: where(0)})
    assert lines[0] == "rank 2 before echelon.init() did not come; rank 0 waited 10.0 s for it"
    lines = text(records={0: stuck(0)})
    assert lines[0] == "rank 2 did not come; rank 0 waited 10.0 s for it"


def test_an_exception_is_the_cause_even_if_others_waited_in_vain_for_its_rank() -> None:
    records = {0: stuck(0, 1.0), 2: record(ValueError("boom"), 2, 9.0)}
    assert text(records=records)[0] == "rank 2 raised ValueError: boom"


DISAGREEMENT = (
    "the ranks disagree: CollectiveMismatch: collective #3 of group 'world' differs between ranks:"
)


def test_ranks_that_disagree_are_all_shown() -> None:
    mismatch = CollectiveMismatch("world", 3, {0: "all_reduce", 1: "barrier", 2: "all_reduce"})
    lines = text(records={rank: record(mismatch, rank) for rank in range(3)})
    assert lines[:3] == [
        DISAGREEMENT,
        "    rank 0: all_reduce",
        "    rank 1: barrier   <-- differs",
    ]
    assert not any(line.startswith("then ") for line in lines)


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_ranks_that_disagree_none_is_blamed_whoever_raised_first(first: int) -> None:
    error = CollectiveMismatch("world", 3, {0: "all_reduce", 1: "barrier"})
    times = {first: 1.0, 1 - first: 2.0}
    lines = text(records={rank: record(error, rank, times[rank]) for rank in range(2)})
    assert lines[:5] == [
        DISAGREEMENT,
        "    rank 0: all_reduce",
        "    rank 1: barrier",
        "  No majority says which rank is right.",
        "  All ranks of a group must issue the same collectives in the same order.",
    ]
    assert not any("<-- differs" in line or line.startswith("then ") for line in lines)


def test_ranks_that_disagree_in_different_steps_are_told_with_their_steps() -> None:
    error = CollectiveMismatch("world", 3, {0: "all_reduce", 1: "barrier"})
    records = {rank: FailureRecord.of(error, rank, f"at step {rank + 4}") for rank in range(2)}
    lines = text(records=records)
    assert lines[0].startswith("the ranks disagree: CollectiveMismatch: ")
    assert lines[1] == "  at step 4 on rank 0; at step 5 on rank 1"


def test_a_rank_that_differs_is_shown_among_many() -> None:
    calls = dict.fromkeys(range(64), "all_reduce") | {40: "barrier"}
    lines = text(records={0: record(CollectiveMismatch("world", 3, calls), 0)})
    assert "    rank 40: barrier   <-- differs" in lines
    assert "  All ranks of a group must issue the same collectives in the same order." in lines


def test_of_an_error_raised_on_purpose_the_lines_of_the_user_are_shown() -> None:
    with pytest.raises(ArgumentError) as info:
        ec.units.by_type()
    lines = text(records={0: FailureRecord.of(info.value, 0)})
    assert "    ec.units.by_type()" in lines
    assert not any("src/echelon" in line for line in lines)


@pytest.mark.parametrize("num_inner", range(6))
def test_a_traceback_begins_with_a_whole_frame_and_not_with_what_starts_the_script(
    num_inner: int,
) -> None:
    outer = f'  File "{ec.__file__}", line 8, in run_program\n    exec(code, main)\n'
    users = '  File "/home/me/train.py", line 17, in <module>\n    check(loss)\n    ^^^^^^^^^^^\n'
    inner = '  File "/home/me/checks.py", line 3, in check\n    fail(loss)\n    ^^^^^^^^^^\n'
    trace = "Traceback (most recent call last):\n" + outer + users + inner * num_inner
    failure = FailureRecord(
        rank=0,
        reason=Reason.RAISED,
        type="ValueError",
        message="loss nan",
        traceback=f"{trace}ValueError: loss nan\n",
    )
    headline, empty, first, *others = text(records={0: failure})
    assert (headline, empty) == ("rank 0 raised ValueError: loss nan", "")
    assert first.startswith('  File "/home/me/')
    assert not any("run_program" in line for line in others)


def test_when_torchrun_itself_fails_its_words_are_shown() -> None:
    lines = text(agent_log="Traceback\nOSError: no port\n")
    assert lines == [
        "torch's agent could not run the ranks; it wrote:",
        "  Traceback",
        "  OSError: no port",
    ]


def deep(depth: int) -> None:
    if depth == 0:
        raise ValueError("\n".join(f"line {i}" for i in range(100)))
    deep(depth - 1)


def test_no_text_is_longer_than_its_limit() -> None:
    with pytest.raises(ValueError, match="line 99") as info:
        deep(50)
    long = FailureRecord.of(info.value, 0)
    others = [noticed(rank, 0) for rank in range(1, 64)]
    lines = failure_report([long, *others], ["logs"])
    assert len(lines) <= MAX_LINES
    assert lines[0] == "rank 0 raised ValueError: line 0"
    assert lines[-1] == "logs"
    assert "test_failure_report.py" in "".join(lines)
    assert any("60 more ranks" in line for line in lines)


def test_a_save_that_failed_elsewhere_is_the_cause_if_that_rank_went_on() -> None:
    heard = record(CheckpointError("raised ValueError: boom", "runs/a", rank=1), 0)
    lines = text(records={0: heard}, exits={0: Exit(1, closed=False)})
    assert lines[0] == "rank 0 raised CheckpointError: rank 1: runs/a: raised ValueError: boom"
    own = record(ValueError("boom"), 1, time_s=9e9)
    assert text(records={0: heard, 1: own})[0] == "rank 1 raised ValueError: boom"


def test_what_was_added_to_an_exception_is_shown() -> None:
    with pytest.raises(ValueError, match="no") as info:
        raise ValueError("no\nnot at all")
    info.value.add_note("the cause may be this")
    lines = failure_report([FailureRecord.of(info.value, 0)], ["logs"])
    assert lines[-4:] == ["", "the cause may be this", "", "logs"]
    empty = ValueError()
    empty.add_note("the cause may be this")
    assert failure_report([FailureRecord.of(empty, 0)], [])[0] == "rank 0 raised ValueError"


def test_what_an_error_of_ours_advises_is_told_whole() -> None:
    advice = "facts " * 80 + "call model.state_dict() " + "on all ranks " * 80 + "or ec.save"
    ours, theirs = (
        "\n".join(text({rank: record(kind(f"{rank}: {advice}"), rank, rank) for rank in range(2)}))
        for kind in (StateError, KeyError)
    )
    assert ours.count(advice) == 2
    assert theirs.count(advice) == 0


def test_an_error_that_several_ranks_raised_is_told_once_with_the_ranks() -> None:
    records = {rank: record(StateError("call it"), rank, rank) for rank in range(4)}
    lines = text(records)
    assert sum("call it" in line for line in lines if not line.startswith("    ")) == 1
    assert lines[0] == "rank 0 raised StateError: call it"
    assert lines[-1] == "then ranks 1, 2, 3 raised the same"
    lines = text(records | {0: record(ValueError("first"), 0)})
    assert lines[-2:] == [
        "then rank 1 raised StateError: call it",
        "and ranks 2, 3 raised the same",
    ]
    apart = {rank: record(StateError(f"row {rank}"), rank, rank) for rank in range(6)}
    assert text(apart)[-2:] == [
        "then rank 3 raised StateError: row 3",
        "and 2 more ranks failed after it",
    ]


def test_a_long_message_keeps_its_last_line_which_says_what_to_do() -> None:
    message = "\n".join(["does not fit", *(f"  missing: w{i}" for i in range(30)), "Do this."])
    lines = text({0: record(StateError(message), 0)})
    assert "    (24 more lines)" in lines
    assert "  Do this." in lines
