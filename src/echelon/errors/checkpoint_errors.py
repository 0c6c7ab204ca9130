"""Checkpoints that could not be written or read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from echelon.errors.echelon_error import EchelonError, revive
from echelon.errors.message_text import (
    fair_rows,
    misfit_counts,
    prefix_advice,
    printable,
    printable_line,
)

_MAX_NAMES = 6  # of a mismatch: the report of a job shows so many lines of a message


class CheckpointError(EchelonError):
    """A checkpoint that could not be written or read.

    Somebody else may have written it, so names that it holds are shown with what a terminal would
    obey escaped.

    Attributes:
        path: of the file or folder.
        rank: the rank in the job on which it happened; None where it is the same on all.
        errno: of the operating system; None where it raised nothing.
    """

    def __init__(
        self, what: str, path: object, *, rank: int | None = None, errno: int | None = None
    ) -> None:
        self.path, self.rank, self.errno = str(path), rank, errno
        where = "" if rank is None else f"rank {rank}: "
        super().__init__(f"{where}{printable_line(self.path)}: {printable(what)}")

    def on_rank(self, rank: int) -> Self:
        """A copy of the error that names ``rank`` as the place where it happened."""
        error = revive(type(self), f"rank {rank}: {self}", {**self.__dict__, "rank": rank})
        error.__cause__, error.__traceback__ = self.__cause__, self.__traceback__
        return error


class CheckpointNotFound(CheckpointError):
    """There is no committed checkpoint where one was asked for."""


class CheckpointCorrupt(CheckpointError):
    """The bytes of a checkpoint are not those that were written, or are no checkpoint.

    Attributes:
        tensor: whose bytes they are; None where they belong to no single tensor.
    """

    def __init__(
        self, what: str, path: object, *, tensor: str | None = None, rank: int | None = None
    ) -> None:
        super().__init__(what if tensor is None else f"{tensor!r}: {what}", path, rank=rank)
        self.tensor = tensor


class CheckpointTooNew(CheckpointError):
    """A checkpoint that a newer version of this library has written; nothing says it is damaged.

    Attributes:
        schema: of its files.
        known: the newest schema that is known here.
    """

    def __init__(self, schema: int, known: int, path: object, *, rank: int | None = None) -> None:
        super().__init__(
            f"was written by a newer version of echelon, in schema {schema}, and this version "
            f"reads up to {known}. It is neither loaded nor replaced: upgrade echelon, or choose "
            "another step",
            path,
            rank=rank,
        )
        self.schema, self.known = schema, known


class CheckpointMismatch(CheckpointError):
    """A checkpoint of another model, optimizer or state; nothing was changed.

    Attributes:
        missing: what the checkpoint does not have.
        unexpected: what it has and nothing here takes.
        differing: what does not fit, by name.
    """

    def __init__(
        self,
        path: object,
        missing: Sequence[str],
        unexpected: Sequence[str],
        differing: Mapping[str, str],
        *,
        rank: int | None = None,
    ) -> None:
        self.missing, self.unexpected = tuple(missing), tuple(unexpected)
        self.differing = dict(differing)
        kinds = [
            [f"missing: {printable_line(name)}" for name in self.missing],
            [f"unexpected: {printable_line(name)}" for name in self.unexpected],
            [printable_line(f"{name}: {what}") for name, what in self.differing.items()],
        ]
        rows = "\n".join(f"  {row}" for row in fair_rows(kinds, _MAX_NAMES))
        advice = prefix_advice(self.missing, self.unexpected)
        super().__init__(
            f"the checkpoint does not fit ({misfit_counts(*kinds)}), and nothing was loaded:\n"
            f"{rows}\n{advice}{advice and '. '}"
            "Build what was saved, or load with strict=False what fits.",
            path,
            rank=rank,
        )
