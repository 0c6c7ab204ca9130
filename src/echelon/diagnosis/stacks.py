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

import ctypes
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

from echelon.diagnosis.failure_record import is_user_file
from echelon.diagnosis.flight_recorder import Phase, RankStatus
from echelon.process.process_status import ProcessStatus

_NAME = "echelon stacks"
_SIGNAL = signal.SIGUSR2
_ANSWER_S = 1.0  # what a process gets to write; on a busy machine it may have to wait for a core
_LOOK_S = 0.02
_RECENT_S = 5.0  # ranks that give up at once need one stack, not one each
_NUM_FRAMES = 8  # of a stack that is shown with an error
_HEAD = "Stack (most recent call first):"

Stack = list[str]  # the innermost line last

_libc = ctypes.CDLL(None, use_errno=True)


@cache
def offer() -> int | None:
    """Answer the signal from now on; the descriptor of the file, None if the signal is taken."""
    status = Path("/proc/self/status").read_text()
    masks = re.findall(r"^Sig(?:Cgt|Ign):\s*(\w+)", status, re.M)  # that are caught, or ignored
    if any(int(mask, 16) >> (_SIGNAL - 1) & 1 for mask in masks):
        return None
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=False, chain=False)
    return descriptor


def is_ours() -> bool:
    """Whether the script has left the signal alone since ``offer``."""
    return signal.getsignal(_SIGNAL) is signal.SIG_DFL  # Python does not see faulthandler's


def ask(entries: Iterable[RankStatus], *, closed: bool = False) -> dict[int, Stack]:
    """The stacks of all ranks that can tell them, by rank.

    Args:
        closed: ask ranks, too, that have closed their world. One that is about to end has no
            handler any more, and the signal would end it in its own way.
    """
    found: dict[int, Stack] = {}
    asked: dict[int, RankStatus] = {}
    before: dict[int, int] = {}
    for entry in entries:
        if entry.pid == os.getpid():
            found[entry.rank] = of_this_process(entry.thread)
        elif entry.stacks is not None and (closed or entry.phase is not Phase.CLOSED):
            size, age_s = _look(entry)
            recent = size > 0 and age_s < _RECENT_S
            if recent or _send(entry):
                asked[entry.rank], before[entry.rank] = entry, 0 if recent else size
    end = time.monotonic() + _ANSWER_S
    sizes = dict.fromkeys(asked, -1)
    while time.monotonic() < end:  # until all have written, and write no more
        last, sizes = sizes, {rank: _look(entry)[0] for rank, entry in asked.items()}
        if sizes == last and all(sizes[rank] > before[rank] for rank in asked):
            break
        time.sleep(_LOOK_S)
    found |= {rank: _lines(_read(entry).rpartition(_HEAD)[2]) for rank, entry in asked.items()}
    return {rank: stack for rank, stack in sorted(found.items()) if stack}


def of_crash(log: str) -> Stack:
    """The stack that ``faulthandler`` has written of a process that crashed, if it has."""
    start = re.search(r"^Current (thread 0x.* .*\n(?:  .*\n?)*)", log, re.M)
    return _lines(start[1]) if start and "Fatal Python error:" in log else []


def of_this_process(thread: int) -> Stack:
    """The stack of a thread of this process, the innermost line last."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return []
    summary = traceback.extract_stack(frame)
    return [f"{found.filename}:{found.lineno} in {found.name}" for found in summary]


def innermost(stack: Sequence[str]) -> Stack:
    """The end of a stack, from the user's outermost line on, and always with the innermost one."""
    users = [i for i, line in enumerate(stack) if is_user_file(line)]
    own = list(stack[users[0] :] if users else stack)
    end = own[-_NUM_FRAMES:]
    if users and users[-1] < len(stack) - len(end):
        return [stack[users[-1]], "...", *end[2:]]
    return end


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


def _send(entry: RankStatus) -> bool:
    """Send the signal; False for another process, and a stopped one, which would get it later."""
    status = ProcessStatus.of(entry.pid)
    if status is None or status.born != entry.born or status.stopped or status.ended:
        return False
    with suppress(OSError):  # it has ended meanwhile, or is not ours
        # A process that became another program has closed the file, and the signal would end it.
        if _NAME in os.readlink(f"/proc/{entry.pid}/fd/{entry.stacks}"):
            return bool(_libc.tgkill(entry.pid, entry.native, _SIGNAL) == 0)
    return False


def _look(entry: RankStatus) -> tuple[int, float]:
    """The length of what a process has written, and how long ago, in seconds."""
    try:
        found = os.stat(f"/proc/{entry.pid}/fd/{entry.stacks}")
    except OSError:  # it has ended
        return 0, 0.0
    return found.st_size, time.time() - found.st_mtime


def _read(entry: RankStatus) -> str:
    try:
        return Path(f"/proc/{entry.pid}/fd/{entry.stacks}").read_text(errors="replace")
    except OSError:
        return ""
