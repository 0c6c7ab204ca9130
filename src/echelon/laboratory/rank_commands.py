"""Commands of a debugger that show other ranks, for any class that is derived from ``pdb.Pdb``."""

from __future__ import annotations

from collections.abc import Sequence
from pdb import Pdb
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from echelon.laboratory.rank_frames import (
    RankView,
    Stack,
    is_inside_echelon,
    table,
    users_innermost,
    without_echelon,
)

# They move the rank that has stopped.
_MOVES = ("n", "next", "s", "step", "r", "return", "unt", "until", "j", "jump")

if TYPE_CHECKING:
    _Base = Pdb
else:
    _Base = object


class RankCommands(_Base):
    """Adds ``ranks`` and ``rank N``, and leaves out frames of echelon. Comes before ``Pdb``.

    Attributes:
        stopped_rank: the rank that the commands of pdb move; None for what is no rank.
        stopped_stack: its frames.
        shown_rank: the rank whose frames are shown.
        shows_echelon: whether frames of echelon are shown, too.
    """

    stopped_rank: int | None = None
    stopped_stack: Stack = []  # noqa: RUF012  # replaced at each stop
    shown_rank: int | None = None
    shows_echelon = False

    def rank_views(self) -> list[RankView]:
        """All ranks, in their order."""
        raise NotImplementedError

    def shows(self, rank: int | None) -> None:
        """Say in the prompt which rank is shown."""
        self.shown_rank = rank
        self.prompt = "(Pdb) " if rank is None else f"(Pdb rank {rank}) "

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[Stack, int]:
        """The frames that are shown, and which of them is the current one."""
        stack, index = super().get_stack(f, t)
        current = stack[index][0]
        self.stopped_stack = stack
        shown = self._visible(stack)
        position = next((i for i, (frame, _) in enumerate(shown) if frame is current), None)
        return shown, users_innermost(shown) if position is None else position

    def _visible(self, stack: Stack) -> Stack:
        return stack if self.shows_echelon else without_echelon(stack)

    def stop_here(self, frame: FrameType) -> bool:
        """Whether a step ends in a frame."""
        return super().stop_here(frame) and (self.shows_echelon or not is_inside_echelon(frame))

    def onecmd(self, line: str) -> bool:
        """Obey one command, unless it would move another rank than the one that is shown."""
        name, _, _ = self.parseline(line)
        if name in _MOVES and self.shown_rank != self.stopped_rank:
            self.error(
                f"{name} moves rank {self.stopped_rank}: `rank {self.stopped_rank}` shows it again"
            )
            return False
        return super().onecmd(line)

    def do_ranks(self, arg: str) -> None:
        """ranks.

        Print a table of all ranks: function and line, and what each of them waits for.
        """
        views = self.rank_views()
        if not views:
            self.error("this thread is no rank")
            return
        for line in table(views, self.shown_rank):
            self.message(line)

    def do_rank(self, arg: str) -> None:
        """rank number.

        Look at the frames of another rank: p, up, down, where and l show it then. The
        commands that step move the rank that has stopped.
        """
        views = {str(view.rank): view for view in self.rank_views()}
        view = views.get(arg.strip())
        if view is None:
            self.error(f"give a rank: {', '.join(views)}" if views else "this thread is no rank")
        elif not view.stack:
            self.error(f"rank {view.rank} {view.doing}, and has no frames")
        else:
            self.shows(view.rank)
            self.stack = self._visible(view.stack)
            self._select_frame(users_innermost(self.stack))

    def do_internals(self, arg: str) -> None:
        """internals.

        Show frames of echelon, too, or leave them out again.
        """
        self.shows_echelon = not self.shows_echelon
        self.message(f"frames of echelon are {'shown' if self.shows_echelon else 'left out'}")
        if self.shown_rank is not None:
            self.do_rank(str(self.shown_rank))


class EndedRanks(RankCommands):
    """Commands that show where each rank has ended.

    Attributes:
        ended: all ranks with the frames of their errors.
    """

    ended: Sequence[RankView] = ()

    def rank_views(self) -> list[RankView]:
        """All ranks, in their order."""
        return list(self.ended)
