"""The Python stacks of ranks, also of those that hold a lock, compute in C or never wake up.

A process writes the stacks of its threads to a memfd of its own when it gets SIGUSR2: Python's
``faulthandler`` does that within the signal, whatever the threads do, and no code of the rank has
to run. Whoever wants them sends the signal and reads the file through ``/proc``. A process that is
stopped cannot do that, and one whose script has its own use for the signal is not asked.
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

from echelon.world.failure import is_user_file
from echelon.world.logbook import Entry
from echelon.world.process_status import ProcessStatus

__all__ = [
    "ask",
    "innermost",
    "is_ours",
    "of_crash",
    "of_this_process",
    "of_thread",
    "offer",
    "shown",
]

_NAME = "echelon stacks"
_SIGNAL = signal.SIGUSR2
_ANSWER_S = 1.0  # what a process gets to write; on a busy machine it may have to wait for a core
_LOOK_S = 0.02
_RECENT_S = 5.0  # ranks that give up at once need one dump, not one each
_NUM_FRAMES = 8  # of a stack that is shown with an error

Stack = list[str]  # the innermost line last


@cache
def offer() -> int | None:
    """Answer the signal from now on; the descriptor of the file, None if the signal is taken."""
    status = Path("/proc/self/status").read_text()
    masks = re.findall(r"^Sig(?:Cgt|Ign):\s*(\w+)", status, re.M)  # that are caught, or ignored
    if any(int(mask, 16) >> (_SIGNAL - 1) & 1 for mask in masks):
        return None
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=True, chain=False)
    return descriptor


def is_ours() -> bool:
    """Whether the script has left the signal alone since ``offer``."""
    return signal.getsignal(_SIGNAL) is signal.SIG_DFL  # Python does not see faulthandler's


def ask(entries: Iterable[Entry]) -> dict[int, str]:
    """The stacks of all ranks that can answer, as ``faulthandler`` writes them, by rank."""
    asked = {entry.rank: entry for entry in entries if entry.stacks is not None}
    before: dict[int, int] = {}
    for rank, entry in asked.items():
        size, age_s = _look(entry)
        recent = size > 0 and age_s < _RECENT_S
        before[rank] = 0 if recent else size
        if not recent:
            _send(entry)
    end = time.monotonic() + _ANSWER_S
    sizes: dict[int, int] = {}
    while time.monotonic() < end:
        time.sleep(_LOOK_S)
        seen = {rank: _look(entry)[0] for rank, entry in asked.items()}
        if seen == sizes and all(
            seen[rank] > before[rank] for rank in asked if _answers(asked[rank])
        ):
            break
        sizes = seen
    texts = {rank: _last_dump(_read(entry)) for rank, entry in asked.items() if sizes.get(rank)}
    return {rank: text for rank, text in texts.items() if text}


def _last_dump(text: str) -> str:
    """The last of several dumps: each thread as it was written last."""
    parts = re.split(r"^(?=(?:Current t|T)hread 0x)", text, flags=re.M)
    by_thread: dict[str, str] = {}
    for part in parts:
        if found := re.match(r"(?:Current t|T)hread (0x[0-9a-f]+)", part):
            by_thread.pop(found[1], None)
            by_thread[found[1]] = part.rstrip() + "\n"
    return "\n".join(by_thread.values())


def of_thread(dump: str, thread: int) -> Stack:
    """The stack of one thread in a dump, the innermost line last."""
    found = re.search(rf"hread 0x0*{thread:x} .*\n((?:  .*\n?)*)", dump)
    return _lines(found[1]) if found else []


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


def shown(stacks: Mapping[int, str]) -> str:
    """All stacks as one text for a log."""
    return "\n".join(
        f"-- rank {rank}, most recent call first --\n{text}"
        for rank, text in sorted(stacks.items())
    )


def _lines(section: str) -> Stack:
    """The lines of one thread, the innermost last."""
    lines = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', section, re.M)
    return [f"{file}:{line} in {function}" for file, line, function in reversed(lines)]


def _answers(entry: Entry) -> bool:
    status = ProcessStatus.of(entry.pid)
    return status is not None and not (status.stopped or status.ended)


def _send(entry: Entry) -> None:
    """Send the signal, unless the process is another one or stopped: it would get it later."""
    with suppress(OSError):  # it has ended, or is not ours
        descriptor = os.pidfd_open(entry.pid)
        try:
            status = ProcessStatus.of(entry.pid)
            same = status is not None and status.born == entry.born and not status.stopped
            # A process that became another program has closed it, and the signal would end it.
            if same and _NAME in os.readlink(f"/proc/{entry.pid}/fd/{entry.stacks}"):
                signal.pidfd_send_signal(descriptor, _SIGNAL)
        finally:
            os.close(descriptor)


def _look(entry: Entry) -> tuple[int, float]:
    """The length of what a process has written, and how long ago, in seconds."""
    try:
        found = os.stat(f"/proc/{entry.pid}/fd/{entry.stacks}")
    except OSError:  # it has ended
        return 0, 0.0
    return found.st_size, time.time() - found.st_mtime


def _read(entry: Entry) -> str:
    try:
        return Path(f"/proc/{entry.pid}/fd/{entry.stacks}").read_text(errors="replace")
    except OSError:
        return ""
