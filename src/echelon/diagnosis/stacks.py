"""The Python stacks of ranks, also of those that hold a lock, compute in C or never wake up.

A process writes the stack of its script to a memfd of its own when it gets SIGUSR2: Python's
``faulthandler`` does that within the signal, and no code of the rank has to run. Whoever wants it
sends the signal and reads the file through ``/proc``. A process that is stopped cannot do that, and
one whose script has its own use for the signal is not asked.

[Note: one thread] The signal goes to the thread that runs the script, which writes its own stack
and no other one. ``faulthandler`` can write those of all threads, but it does not hold the
interpreter meanwhile: where another thread runs or ends, it reads memory that is gone. In a test
in which a rank over gloo looked at itself, that crashed 3 processes of 40.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType

from echelon.diagnosis.flight_recorder import Phase, RankStatus
from echelon.process import time_limits
from echelon.process.operating_system import c_function
from echelon.process.process_status import ProcessStatus
from echelon.process.thread_frames import current_frames

_NAME = "echelon stacks"
if sys.platform != "win32":
    _SIGNAL = signal.SIGUSR2
_LOOK_S = 0.02
_RECENT_S = 5.0  # ranks that give up at once need one stack, not one each
_NUM_FRAMES = 8  # of a stack that is shown with an error
_hidden: set[CodeType] = set()
_HEAD = "Stack (most recent call first):"

Stack = list[str]  # the innermost line last

_NOT_THE_USERS = (
    str(Path(__file__).resolve().parent.parent) + os.sep,
    os.path.dirname(os.__file__) + os.sep,  # Python's own modules, and mostly what is installed
    "<frozen",
    "<string>",  # as of multiprocessing's server
)

_tgkill = c_function("tgkill")  # Linux has it


def is_user_file(path: str) -> bool:
    """Whether a file of Python code is neither of this package, nor Python's own, nor installed."""
    return not path.startswith(_NOT_THE_USERS) and f"{os.sep}site-packages{os.sep}" not in path


@cache
def offer() -> int | None:
    """Answer the signal from now on; the descriptor of the file.

    None if the signal is taken, and where others could not read the file.
    """
    if sys.platform != "linux":
        return None
    status = Path("/proc/self/status").read_text()
    masks = re.findall(r"^Sig(?:Cgt|Ign):\s*(\w+)", status, re.M)  # that are caught, or ignored
    if any(int(mask, 16) >> (_SIGNAL - 1) & 1 for mask in masks):
        return None
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=False, chain=False)
    return descriptor


def is_ours() -> bool:
    """Whether the script has left the signal alone since ``offer``."""
    if sys.platform == "win32":
        return True
    return signal.getsignal(_SIGNAL) is signal.SIG_DFL  # Python does not see faulthandler's


def ask(statuses: Iterable[RankStatus], *, closed: bool = False) -> dict[int, Stack]:
    """The stacks of all ranks that can tell them, by rank.

    Args:
        closed: ask ranks, too, that have closed their world. One that is about to end has no
            handler any more, and the signal would end it in its own way.
    """
    answers: dict[int, Stack] = {}
    asked: dict[int, RankStatus] = {}
    before: dict[int, int] = {}
    for status in statuses:
        if status.pid == os.getpid():
            answers[status.rank] = of_this_process(status.thread_id)
        elif status.stacks_fd is not None and (closed or status.phase is not Phase.CLOSED):
            size, age_s = _look(status)
            recent = size > 0 and age_s < _RECENT_S
            if recent or _send(status):
                asked[status.rank], before[status.rank] = status, 0 if recent else size
    end = time.monotonic() + time_limits.STACK_ANSWER_S
    sizes = dict.fromkeys(asked, -1)
    while time.monotonic() < end:  # until all have written, and write no more
        last, sizes = sizes, {rank: _look(status)[0] for rank, status in asked.items()}
        if sizes == last and all(sizes[rank] > before[rank] for rank in asked):
            break
        time.sleep(_LOOK_S)
    answers |= {rank: _lines(_read(status).rpartition(_HEAD)[2]) for rank, status in asked.items()}
    return {rank: stack for rank, stack in sorted(answers.items()) if stack}


def of_crash(log: str) -> Stack:
    """The stack that ``faulthandler`` has written of a process that crashed, if it has."""
    start = re.search(r"^Current (thread 0x.* .*\n(?:  .*\n?)*)", log, re.M)
    return _lines(start[1]) if start and "Fatal Python error:" in log else []


def hide(function: FunctionType) -> None:
    """Leave a function that stands in for one of Python out of the stacks of this process."""
    _hidden.add(function.__code__)


def of_this_process(thread: int) -> Stack:
    """The stack of a thread of this process, the innermost line last."""
    frame = current_frames().get(thread)
    if frame is None:
        return []
    frames = [f for f in traceback.walk_stack(frame) if f[0].f_code not in _hidden]
    summary = traceback.StackSummary.extract(iter(reversed(frames)), lookup_lines=False)
    return [f"{line.filename}:{line.lineno} in {line.name}" for line in summary]


def innermost(stack: Sequence[str]) -> Stack:
    """The end of a stack, from the user's outermost line on, and always with the innermost one."""
    users = [i for i, line in enumerate(stack) if is_user_file(line)]
    end = list(stack[users[0] :] if users else stack)[-_NUM_FRAMES:]
    if users and users[-1] < len(stack) - len(end):
        return [stack[users[-1]], "...", *end[2:]]
    return end


def stack_rows(stack: Sequence[str], silence: str) -> list[str]:
    """A stack as rows of an error, or ``silence``: why there is none."""
    if not stack:
        return [f"  its stack is not known: {silence}"]
    return ["  its stack:", *(f"    {line}" for line in innermost(stack))]


def shown(stacks: Mapping[int, Stack]) -> str:
    """All stacks as one text for a log."""
    return "\n".join(
        "\n".join([f"-- rank {rank}, the innermost line last --", *(f"  {line}" for line in stack)])
        for rank, stack in sorted(stacks.items())
    )


def _lines(section: str) -> Stack:
    """The lines of one thread, the innermost last."""
    lines = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', section, re.M)
    return [f"{file}:{line} in {function}" for file, line, function in reversed(lines)]


def _send(status: RankStatus) -> bool:
    """Send the signal; False for another process, and a stopped one, which would get it later."""
    process = ProcessStatus.of(status.pid)
    if process is None or process.start_ticks != status.start_ticks:
        return False
    if process.stopped or process.ended:
        return False
    with suppress(OSError):  # it has ended meanwhile, or is not ours
        # A process that became another program has closed the file, and the signal would end it.
        if _NAME in os.readlink(f"/proc/{status.pid}/fd/{status.stacks_fd}"):
            return bool(_tgkill(status.pid, status.native_id, _SIGNAL) == 0)
    return False


def _look(status: RankStatus) -> tuple[int, float]:
    """The length of what a process has written, and how long ago, in seconds."""
    try:
        written = os.stat(f"/proc/{status.pid}/fd/{status.stacks_fd}")
    except OSError:  # it has ended
        return 0, 0.0
    return written.st_size, time.time() - written.st_mtime


def _read(status: RankStatus) -> str:
    try:
        return Path(f"/proc/{status.pid}/fd/{status.stacks_fd}").read_text(errors="replace")
    except OSError:
        return ""
