"""Simulated ranks of ``echelon run``: one thread runs the script for each rank."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import TYPE_CHECKING, Any, TextIO

from echelon.diagnosis.failure_record import FailureRecord
from echelon.diagnosis.failure_report import MAX_LINES, failure_report
from echelon.diagnosis.stragglers import END
from echelon.errors import ArgumentError, CommTimeout, DeadlockError
from echelon.launch.program import Program, threads_per_rank
from echelon.launch.rank_output import rank_prefix
from echelon.process import time_limits

if TYPE_CHECKING:
    from echelon.comm.world import World

_printing = threading.local()  # which rank runs on a thread


def run_threads(
    program: Program,
    arguments: Sequence[str],
    ranks: int,
    timeout: float | None = None,
    *,
    tee: bool = False,
) -> int:
    """Run ``program`` once for each of ``ranks`` threads; the exit code.

    Each rank has its own ``__main__`` namespace; imported modules are shared.

    Args:
        timeout: seconds that a rank waits for others in one call; None: as long as by default.
        tee: write the number of the rank before each line that it prints.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))  # torch reads it once
    sys.path.insert(0, program.folder())
    raised: list[tuple[BaseException, FailureRecord]] = []
    try:
        code, names = program.read()
    except (ArgumentError, SyntaxError, ValueError) as error:
        return _fail(error, raised, ranks)
    sys.argv = [names["__file__"], *arguments]
    # They bring torch; mistakes above need not wait for it.
    from echelon.comm.threads.exit_handlers import guard_exit
    from echelon.comm.world import DEFAULT_TIMEOUT_S
    from echelon.launch.run import run

    timeout = DEFAULT_TIMEOUT_S if timeout is None else timeout
    guard_exit(timeout)
    before = frozenset(threading.enumerate())  # of them, none is a rank of this run
    output = sys.stdout
    sys.stdout = _WholeLines(output, tee)
    try:
        run(
            _rank_main,
            ranks,
            world="threads",
            args=(code, names, raised),
            timeout=timeout,
        )
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _leave(130, before)
    except SystemExit as error:
        return _leave(_exit_code(error), before)
    except BaseException as error:
        return _leave(_fail(error, raised, ranks), before)
    finally:
        sys.stdout.flush()
        sys.stdout = output
    return 0


class _WholeLines(io.TextIOBase):
    """Standard output for many threads, whose lines do not run into each other."""

    def __init__(self, stream: TextIO, tee: bool) -> None:
        self._stream = stream
        self._tee = tee
        self._open = threading.local()  # what a thread wrote since its last newline
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Write up to the last newline, and keep the rest for later."""
        whole, newline, rest = (self._kept() + text).rpartition("\n")
        self._open.text = rest
        if newline:
            with self._lock:
                self._stream.write(self._marked(whole) + newline)
        return len(text)

    def flush(self) -> None:
        """Write what this thread has kept; where lines show their ranks, whole lines only."""
        kept = ""
        if not self._tee:
            kept, self._open.text = self._kept(), ""
        with self._lock:
            self._stream.write(kept)
            self._stream.flush()

    def end(self) -> None:
        """Write what a rank has kept that ends."""
        if self._tee and self._kept():
            self.write("\n")
        self.flush()

    def isatty(self) -> bool:
        """Whether a person watches."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The file underneath."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream underneath."""
        return self._stream.encoding

    def _marked(self, text: str) -> str:
        """``text`` with the rank that prints it before each line, if that is wanted."""
        rank: int | None = getattr(_printing, "rank", None)
        if rank is None or not self._tee:
            return text
        prefix = rank_prefix(rank)
        return "\n".join(f"{prefix}{line}" for line in text.split("\n"))

    def _kept(self) -> str:
        return getattr(self._open, "text", "")


def _rank_main(
    world: World,
    code: CodeType,
    names: Mapping[str, Any],
    raised: list[tuple[BaseException, FailureRecord]],
) -> None:
    """Run the script as if it were the only one; ``echelon.init`` finds the world by the thread."""
    _printing.rank = world.rank
    try:
        exec(code, {**names, "__name__": "__main__", "__builtins__": __builtins__})
    except BaseException as error:
        raised.append((error, FailureRecord.of(error, world.rank, f"at step {world.step}")))
        raise
    finally:
        if isinstance(sys.stdout, _WholeLines):
            sys.stdout.end()


def _fail(
    error: BaseException, raised: Sequence[tuple[BaseException, FailureRecord]], ranks: int
) -> int:
    """Print what happened; the exit code."""
    notes = [f"simulated ranks: {ranks}, threads of one process"]
    if isinstance(error, DeadlockError):  # of all ranks, and it names their lines itself
        lines = [line[:200] for line in str(error).splitlines()]
        print("\n".join([*lines[: MAX_LINES - 2], "", *notes]), file=sys.stderr)
        return 1
    records = {record.rank: replace(record, stacks="") for _, record in raised}  # no file has them
    missing = error.missing if isinstance(error, CommTimeout) and error.doing == END else ()
    first = next((record.rank for seen, record in raised if seen is error), next(iter(missing), 0))
    records.setdefault(first, replace(FailureRecord.of(error, first), stacks=""))
    print("\n".join(failure_report(records.values(), notes)), file=sys.stderr)
    return 1


def _exit_code(error: SystemExit) -> int:
    """The exit code that Python would give."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _leave(code: int, before: frozenset[threading.Thread]) -> int:
    """Wait for the threads that came since ``before``; end the process here if one still computes.

    A thread that runs in torch while the interpreter is taken down would crash it.
    """
    # Python itself waits for those that are no daemons, as it does without ranks.
    ranks = [t for t in threading.enumerate() if t.daemon and t not in before]
    for thread in ranks:
        thread.join(time_limits.NOTICE_IN_THREADS_S / len(ranks))
    if any(thread.is_alive() for thread in ranks):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
