"""The members of a new group come together, before any of them makes an engine.

An engine waits in C++ for each member until time is up, whatever has become of it. Here a member
that has left or died is noticed at once, and only those are named that have not come.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch._C import _distributed_c10d as c10d

from echelon.comm.torch_dist.peers import PeerLost

_LONGEST_PAUSE_S = 0.1


def await_members(
    store: c10d.Store,
    rank: int,
    size: int,
    timeout: float,
    check: Callable[[], None],
    tell: Callable[[int | None], None],
) -> None:
    """Return when all members of a group have called this.

    Args:
        store: of this group alone.
        rank: in the group.
        timeout: seconds to wait for the others.
        check: raises if a member will never come.
        tell: called with the member that is waited for, and with None when all have come.

    Raises:
        PeerLost: names the members that have not come.
    """
    end = time.monotonic() + timeout
    keys = [f"here/{member}" for member in range(size)]
    store.set(keys[rank], "")
    pause_s = 0.0005
    while not store.check(keys):
        if pause_s == _LONGEST_PAUSE_S:  # it asks for each member
            missing = tuple(i for i, key in enumerate(keys) if not store.check([key]))
            if missing:
                tell(missing[0])
                if time.monotonic() > end:
                    raise PeerLost(missing, late=True)
                check()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    tell(None)
