"""Which simulated rank runs now, for code that only knows ``torch.distributed``.

Ranks take turns, so this is state of the process that is exchanged at each turn. So threads that a
rank starts are of the rank, too.
"""

from __future__ import annotations

import sys

from echelon.comm.threads.group import ThreadGroup
from echelon.comm.threads.process_state import register_variable
from echelon.errors import StateError

_group: ThreadGroup | None = None


def world_group() -> ThreadGroup | None:
    """The group of all simulated ranks, of the rank that runs now; None outside of any."""
    return _group


def require_world_group() -> ThreadGroup:
    """The same, where the caller must be a rank.

    Raises:
        StateError: no simulated rank runs now.
    """
    if _group is None:
        raise StateError("this is an object of a simulated rank, and none runs now")
    return _group


def set_world_group(group: ThreadGroup | None) -> None:
    """Record the group of all ranks of the rank that runs now."""
    global _group
    _group = group


register_variable("simulated rank", sys.modules[__name__], "_group", lambda group: None)
