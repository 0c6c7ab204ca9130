"""A rank that does not come to its end, although others have left: it says so itself, and ends.

Nobody else may be there to do it: the others have ended, and torch's agent waits for ever. The
guard is a thread that sleeps, mostly. It also sees what nobody outside can see: for which thread
Python waits when the script has ended. Where the interpreter is held by a call in C, or the process
is stopped, it cannot run; then the agent of ``echelon run`` does it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from echelon.diagnosis import stacks
from echelon.diagnosis.failure_record import FailureRecord, error_file
from echelon.diagnosis.flight_recorder import VARIABLE
from echelon.diagnosis.hang import SilentRank
from echelon.diagnosis.stragglers import StragglerRule, error_of, sign_of
from echelon.diagnosis.watch import Watch
from echelon.errors import CommTimeout, WorldError
from echelon.process.process_status import activity

_CLOSE_S = 5.0  # what it may take to tell the others
_FLUSH_S = 1.0  # what standard output gets to take what was printed
_FEWEST_LOOKS = 20  # in one timeout
_LONGEST_PAUSE_S = 2.0


def start_exit_guard(
    watch: Watch, timeout_s: float, close: Callable[[BaseException], None]
) -> None:
    """Guard this process from now on; it is a rank of a job of several.

    Args:
        timeout_s: that it gets to follow the others.
        close: tells the others why this rank ends.
    """
    # The kernel ends ranks of ``echelon run`` with their agent; torch's own agent leaves them.
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and VARIABLE not in os.environ
    agent = os.getppid() if under_torchrun else None
    thread = threading.Thread(
        target=_guard,
        args=(watch, timeout_s, agent, close),
        name="echelon exit guard",
        daemon=True,
    )
    thread.start()


def _guard(
    watch: Watch, timeout_s: float, agent: int | None, close: Callable[[BaseException], None]
) -> None:
    main = threading.main_thread()
    rule = StragglerRule(timeout_s)
    pause_s = min(_LONGEST_PAUSE_S, timeout_s / _FEWEST_LOOKS)
    while True:
        if main.is_alive():
            main.join(pause_s)
        else:
            time.sleep(pause_s)
        if not main.is_alive():
            watch.end_script()
        if agent is not None and os.getppid() != agent:
            _end_without_agent(agent, watch, close)
        signs = {rank: sign_of(entry) for rank, entry in watch.entries().items()}
        if watch.rank in rule.late(signs):
            _end_process(_error(watch, timeout_s), watch.rank)


def _end_without_agent(agent: int, watch: Watch, close: Callable[[BaseException], None]) -> None:
    """Nobody would start this rank again, or end it: so it tells the others, and ends."""
    entry = watch.entries()[watch.rank]
    error = WorldError(
        f"the agent of torchrun on the host of rank {watch.rank} (process {agent}) has ended, and "
        "its ranks end with it: look why it did, and start the job again"
    )
    print(f"rank {watch.rank} {entry.where}: {error}", file=sys.stderr, flush=True)
    telling = threading.Thread(target=close, args=(error,), daemon=True)
    with suppress(RuntimeError):  # Python starts no more threads at its end
        telling.start()
        telling.join(_CLOSE_S)
    end_now()


def _error(watch: Watch, timeout_s: float) -> CommTimeout:
    entry = watch.entries()[watch.rank]
    finding = SilentRank(
        rank=entry.rank,
        where=entry.where,
        activity=activity(entry.pid, entry.native),
        call=entry.call,
        stack=stacks.of_this_process(entry.thread),
        silence="it runs no code of Python",
    )
    if entry.script_ended:
        finding = _at_the_end(finding)
    return error_of([finding], timeout_s)


def awaited_threads() -> list[threading.Thread]:
    """The threads for which Python waits at the end of the script."""
    main = threading.main_thread()
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]


def _at_the_end(finding: SilentRank) -> SilentRank:
    """``finding`` of a process whose script has ended, with what keeps it from its end."""
    threads = awaited_threads()
    if not threads:
        doing = f"has ended its script, but {finding.activity} in an exit handler"
        return replace(finding, activity=doing)
    first = threads[0]
    return replace(
        finding,
        activity=f"has ended its script, but waits for its thread {first.name!r}",
        stack=stacks.of_this_process(first.ident or 0),
    )


def _end_process(error: CommTimeout, rank: int) -> None:
    """Leave a record of ``error``, print it where no launcher of ours reads that, and end."""
    record = FailureRecord.of(error, rank)
    path = error_file()
    if path is not None:
        with suppress(OSError):  # what it says is printed then
            record.write(path)
    if path is None or VARIABLE not in os.environ:
        rows = str(error).split("\n")[1:]
        print("\n".join([record.headline, *rows]), file=sys.stderr, flush=True)
    end_now()


def end_now() -> None:
    """End this process with exit code 1, and with what it has printed."""
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)  # another thread may hold it
    with suppress(RuntimeError):  # Python starts no more threads at its end
        flush.start()
        flush.join(_FLUSH_S)
    os._exit(1)
