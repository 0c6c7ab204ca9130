"""How somebody looks at the calls of simulated ranks, as ``ec.step_through`` does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from echelon.diagnosis.collective_call import CollectiveCall

_NOTHING = nullcontext()


class CallWatch:
    """Is asked where values move: when all ranks of a call have joined it.

    A watch that looks at something overrides the method.
    """

    def around(
        self, ranks: Sequence[int], calls: Sequence[CollectiveCall], operations: Sequence[Any]
    ) -> AbstractContextManager[None]:
        """Values move in the body, on the thread that joined last.

        The context may hold the ranks: they go on when it ends. If the call is refused, the body
        raises.

        Args:
            ranks: that take part, in the job.
            calls: of these ranks, in the same order; of a message, the send and the receive.
            operations: what each of them has asked for.
        """
        return _NOTHING
