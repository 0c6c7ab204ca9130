"""What ``torch.distributed.breakpoint`` opens on simulated ranks: the debugger of all ranks."""

from __future__ import annotations

import sys
from typing import final

from echelon.process.offered_debugger import open_debugger


@final
class BreakpointOfRank:
    """Stands for torch's debugger, which reads from a terminal that each process has for itself."""

    def message(self, text: str) -> None:
        """Leave out the advice to go up a frame, since this debugger stops in that frame."""

    def set_trace(self) -> None:
        """Stop in the line that has called ``torch.distributed.breakpoint``."""
        frame = sys._getframe(1).f_back  # its caller
        assert frame is not None
        open_debugger(frame)
