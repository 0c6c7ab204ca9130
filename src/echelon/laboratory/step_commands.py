"""What a user types between two calls of ``SteppedRun.interact``, and what it does."""

from __future__ import annotations

import sys
from typing import final

from rich.console import Console

from echelon.laboratory.stepped_call import SteppedCall

HELP = """\
Enter    on to the next call
/TEXT    on to the next call whose first line has TEXT
v RANK   all values that were kept of a rank
c        on to the end, without a stop
q        end the ranks here
?        this list"""
_SHORT = "Enter: next call, c: run on, q: end, ?: more > "
_PROMPT = "> "


@final
class StepCommands:
    """Asks after each call what comes next. The end of the input is ``q``."""

    def __init__(self) -> None:
        self._prompt = _SHORT
        self._wanted = ""  # text of the call to stop at

    def stops_at(self, call: SteppedCall) -> bool:
        """Whether the user wants to see this call."""
        return self._wanted in call.title

    def asks(self, call: SteppedCall) -> bool | None:
        """Show a call and do what is typed, until the ranks go on.

        Returns:
            whether they are to be held again; None if they are to be ended.
        """
        # Ranks of one process may each have their own output, so that the stream is asked for now.
        console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        console.print(call)
        while True:
            try:
                line = input(self._prompt).strip()
            except EOFError:
                console.print()
                return None
            self._prompt, self._wanted = _PROMPT, line[1:] if line.startswith("/") else ""
            if not line or line.startswith("/"):
                return True
            if line in ("c", "q"):
                return None if line == "q" else False
            command, _, rank = line.partition(" ")
            if command == "v" and rank.isdecimal() and int(rank) in call.ranks:
                console.print(_values(call, int(rank)))
            else:
                console.print(HELP)


def _values(call: SteppedCall, rank: int) -> str:
    """The values of a rank before and after a call, as torch prints them."""
    seen = {"before": call.before.get(rank), "after": call.after.get(rank)}
    lines = []
    for name, glance in seen.items():
        if glance is not None and glance.objects:
            lines.append(f"{name}: {' | '.join(glance.objects)}")
        elif glance is not None:
            few = "" if glance.is_whole else f", {glance.values.numel():,} of {glance.numel:,}"
            lines.append(f"{name}{few}: {glance.values}")
    return "\n".join(lines) or f"rank {rank} moves nothing in this call"
