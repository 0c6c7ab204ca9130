"""The end of a rank's process: it leaves a record of what ends it, and ends in time.

An exception that ends the script leaves a failure record for the launcher. And a rank that does not
come to its end, although others have left, says so itself, and ends: nobody else may be there to do
it, because the others have ended, and torch's agent waits for ever. The guard is a thread that
sleeps, mostly. It also sees what nobody outside can see: for which thread Python waits when the
script has ended. Where the interpreter is held by a call in C, or the process is stopped, it cannot
run; then the agent of ``echelon run`` does it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

from echelon.diagnosis import stacks
from echelon.diagnosis.failure_record import FailureRecord
from echelon.diagnosis.flight_recorder import VARIABLE
from echelon.diagnosis.rank_monitor import RankMonitor
from echelon.diagnosis.stuck_ranks import NO_PYTHON, StuckRank, StuckRankRule, error_of, sign_of
from echelon.errors import CommTimeout, WorldError
from echelon.errors.message_text import say
from echelon.process import time_limits
from echelon.process.background_threads import run_in_background
from echelon.process.process_end import end_now, failing_process
from echelon.process.process_status import activity
from echelon.process.replacement import Replacement

# Of these, the first one set names the file; torchrun sets the second in every rank.
ERROR_FILE_VARIABLES = ("ECHELON_ERROR_FILE", "TORCHELASTIC_ERROR_FILE")

_MIN_LOOKS = 20  # in one timeout
_MAX_PAUSE_S = 2.0


def error_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where this rank's launcher wants its record, or None where nobody asked."""
    for name in ERROR_FILE_VARIABLES:
        if environ.get(name):
            return Path(environ[name])
    return None


def before_failing(act: Callable[[BaseException], None]) -> Callable[[], None]:
    """Call ``act`` with the exception that ends this process, before Python reports it.

    Returns:
        a function that takes the hook out again.
    """
    owner = os.getpid()

    def act_and_report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # multiprocessing calls the hook, too, for its thread that serves files to others, mostly in
        # a fork of a rank that loads data for it.
        if os.getpid() == owner and threading.current_thread() is threading.main_thread():
            act(error)
        hook.original(kind, error, trace)

    hook = Replacement(sys, "excepthook", act_and_report)
    hook.put_in()
    return hook.take_out


def install_failure_record(
    path: str | os.PathLike[str], rank: int, where: Callable[[], str] = lambda: ""
) -> Callable[[], None]:
    """Write a record to ``path`` when an exception ends this process.

    Python's own report of the exception still follows. A second call replaces the first one's
    path and rank.

    Args:
        where: says how far the rank has come.

    Returns:
        a function that takes the hook out again.
    """

    def record(error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            return
        try:
            FailureRecord.of(error, rank, where()).write(path)
        except OSError as problem:  # the exception itself must still be seen
            say(f"cannot write the failure record {path}: {problem}")

    return before_failing(record)


def guard_script(
    rank: int,
    where: Callable[[], str],
    *,
    fail: Callable[[BaseException], None],
    leave: Callable[[], None],
) -> None:
    """Have the launcher and the other ranks told how the script of this process ends.

    Args:
        where: says how far the rank has come.
        fail: tells the others of an exception that ends it.
        leave: tells them that it has ended in good order.
    """
    if path := error_file():
        install_failure_record(path, rank, where)
        outlive_termination()
    before_failing(fail)
    atexit.register(failing_process(leave))


def outlive_termination() -> None:
    """Let the first SIGTERM end this process only after ``LAST_WORDS_S``.

    When a rank is killed, torchrun ends all others within a tenth of a second: before they have
    seen that a peer is gone, and can say in which call they needed it. Does nothing where the
    script, or another thread than the main one, decides about the signal.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    owner = os.getpid()

    def end_later(number: int) -> None:
        time.sleep(time_limits.LAST_WORDS_S)
        os.kill(owner, number)

    def end_soon(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
        if os.getpid() != owner:  # a fork of this process, such as a worker that loads data
            os.kill(os.getpid(), number)
        run_in_background("echelon last words", end_later, number, until_the_end=True)

    signal.signal(signal.SIGTERM, end_soon)
    # On the way out a signal must not change the exit code: the agent may already see a follower.
    atexit.register(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))


def start_exit_guard(
    monitor: RankMonitor, timeout_s: float, close: Callable[[BaseException], None]
) -> None:
    """Guard this process from now on; it is a rank of a job of several.

    Args:
        timeout_s: that it gets to follow the others.
        close: tells the others why this rank ends.
    """
    # The kernel ends ranks of ``echelon run`` with their agent; torch's own agent leaves them.
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and VARIABLE not in os.environ
    agent = os.getppid() if under_torchrun else None
    run_in_background(
        "echelon exit guard", _guard, monitor, timeout_s, agent, close, until_the_end=True
    )


def _guard(
    monitor: RankMonitor,
    timeout_s: float,
    agent: int | None,
    close: Callable[[BaseException], None],
) -> None:
    main = threading.main_thread()
    rule = StuckRankRule(timeout_s)
    pause_s = min(_MAX_PAUSE_S, timeout_s / _MIN_LOOKS)
    while True:
        if main.is_alive():
            main.join(pause_s)
        else:
            time.sleep(pause_s)
        if not main.is_alive():
            monitor.end_script()
        if agent is not None and os.getppid() != agent:
            _end_without_agent(agent, monitor, close)
        signs = {rank: sign_of(status) for rank, status in monitor.statuses().items()}
        if monitor.rank in rule.late(signs):
            _end_process(_error(monitor, timeout_s), monitor.rank)


def _end_without_agent(
    agent: int, monitor: RankMonitor, close: Callable[[BaseException], None]
) -> None:
    """Nobody would start this rank again, or end it: so it tells the others, and ends."""
    status = monitor.statuses()[monitor.rank]
    error = WorldError(
        f"the agent of torchrun on the host of rank {monitor.rank} (process {agent}) has ended, "
        "and its ranks end with it: look why it did, and start the job again"
    )
    say(f"rank {monitor.rank} {status.where}: {error}")
    with suppress(RuntimeError):  # Python starts no more threads at its end
        run_in_background("echelon last words", close, error).join(time_limits.TELL_S)
    end_now(1, flush_s=time_limits.FLUSH_S)


def _error(monitor: RankMonitor, timeout_s: float) -> CommTimeout:
    status = monitor.statuses()[monitor.rank]
    doing, thread = activity(status.pid, status.native_id), status.thread_id
    if status.script_ended:
        left = awaited_threads()
        if left:
            doing, thread = f"waits for its thread {left[0].name!r}", left[0].ident or 0
        else:
            doing += " in an exit handler"
        doing = f"has ended its script, but {doing}"
    stack = stacks.of_this_process(thread)
    return error_of([StuckRank.of(status, stack, doing, NO_PYTHON)], timeout_s)


def awaited_threads() -> list[threading.Thread]:
    """The threads for which Python waits at the end of the script."""
    main = threading.main_thread()
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]


def _end_process(error: CommTimeout, rank: int) -> None:
    """Leave a record of ``error``, print it where no launcher of ours reads that, and end."""
    record = FailureRecord.of(error, rank)
    path = error_file()
    if path is not None:
        with suppress(OSError):  # what it says is printed then
            record.write(path)
    if path is None or VARIABLE not in os.environ:
        say(record.headline, *str(error).split("\n")[1:])
    end_now(1, flush_s=time_limits.FLUSH_S)
