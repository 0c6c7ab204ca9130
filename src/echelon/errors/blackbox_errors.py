"""Steps that were kept by a black box and cannot be replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.errors.echelon_error import EchelonError
from echelon.errors.message_text import MAX_ROWS, printable, printable_line


class BlackboxError(EchelonError):
    """A black box that cannot be written or read.

    Somebody else may have written it, so names that it holds are shown with what a terminal would
    obey escaped.

    Attributes:
        path: of the file or folder.
    """

    def __init__(self, what: str, path: object) -> None:
        self.path = str(path)
        super().__init__(f"{printable_line(self.path)}: {printable(what)}")


class BlackboxCorrupt(BlackboxError):
    """The bytes of a black box are not those that were written, or are none."""


class StepNotKept(BlackboxError):
    """A step that cannot be replayed, because it was not kept or not all of it.

    Attributes:
        step: the number of the step; None if the newest one was asked for.
        kept: the first and the last step of each range that can be replayed.
    """

    def __init__(
        self, what: str, path: object, *, step: int | None, kept: Sequence[tuple[int, int]]
    ) -> None:
        self.step, self.kept = step, tuple(kept)
        ranges = [
            f"{first}" if first == last else f"{first} to {last}" for first, last in self.kept
        ]
        known = ", ".join(ranges) or "none"
        super().__init__(f"{what}. Steps that can be replayed: {known}", path)


class ReplayMismatch(BlackboxError):
    """What would be replayed is not what has run: another script, version or number of ranks.

    Attributes:
        differing: what is different, by name: how it was, and how it is now.
    """

    def __init__(self, path: object, differing: Mapping[str, tuple[str, str]]) -> None:
        self.differing = dict(differing)
        rows = [
            f"  {name}: {printable_line(then)} in the run, {printable_line(now)} here"
            for name, (then, now) in list(self.differing.items())[:MAX_ROWS]
        ]
        super().__init__(
            "the step would not be the one that has run:\n" + "\n".join(rows) + "\n"
            "Replay it where the run was, or with --anyway (anyway=True) as it is here; its bits "
            "may then be others.",
            path,
        )
