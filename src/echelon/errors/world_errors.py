"""Worlds that could not be started, and ranks that fail to communicate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from echelon.errors.echelon_error import EchelonError, revive
from echelon.errors.message_text import ranks_text, rows_text


class WorldError(EchelonError):
    """A world that could not be started."""


class SharedMemoryError(WorldError):
    """There is not enough shared memory for what was asked.

    Attributes:
        needed: bytes.
        available: bytes; with ``file_limit`` those that a file of the process may have.
        file_limit: whether the limit is that of the size of files, ``RLIMIT_FSIZE``.
    """

    def __init__(self, what: str, needed: int, available: int, *, file_limit: bool = False) -> None:
        self.needed, self.available, self.file_limit = needed, available, file_limit
        message = f"{what} needs {needed / 2**20:.1f} MiB of shared memory and "
        if file_limit:
            message += (
                f"a file of this process may have {available / 2**10:.0f} KiB at most, which is a "
                "limit of shared memory, too: raise it before the job starts (ulimit -f unlimited)"
            )
        else:
            message += (
                f"{available / 2**20:.1f} MiB are available: use fewer ranks or a smaller model, "
                "free memory, or raise the limit of the container"
            )
        super().__init__(message)


class DeviceMemoryError(EchelonError, RuntimeError):
    """A device has too little memory for what a wrapper gathers or reduces there.

    It is a ``RuntimeError`` that says "out of memory", as torch's own is, so that programs which
    look for that find it.

    Attributes:
        what: what the memory was for.
        needed: bytes.
    """

    def __init__(self, what: str, needed: int, device: str, said: str) -> None:
        self.what, self.needed = what, needed
        super().__init__(
            f"{what} needs {needed / 2**20:.1f} MiB of {device}, which is out of memory: give "
            "smaller batches, smaller units or more ranks, or offload=ec.Offload.ALL. "
            f"torch says: {said}"
        )


class AuthenticationError(WorldError):
    """What speaks as a rank of this job has not proved that it is one.

    Attributes:
        ranks: in the job, as which a stranger spoke; empty where that is not known.
    """

    def __init__(self, ranks: Sequence[int], where: str) -> None:
        self.ranks = tuple(ranks)
        super().__init__(
            f"what speaks as {ranks_text(self.ranks)} {where} does not know the secret of this "
            "job, or says nothing: another process has connected first, or ECHELON_SECRET is not "
            "the same for all ranks. Nothing that it sent was used. Look who else is on the host "
            "and in the network of this job, and start it again"
        )

    @classmethod
    def of_store(cls, key: str) -> Self:
        """A value in the store that no rank of this job has written."""
        message = (
            f"the value of {key!r} in the store was not written by a rank of this job: another "
            "process has access to the store and has overwritten it, or ECHELON_SECRET is not the "
            "same for all ranks. The value was not used. Start the job where nobody else reaches "
            "its store"
        )
        return revive(cls, message, {"ranks": ()})


class StartMismatch(WorldError):
    """The ranks were started differently: other versions, threads or options.

    Attributes:
        field: the first thing that differs.
        found: what each rank has, by rank in the job.
    """

    def __init__(self, field: str, found: Mapping[int, str]) -> None:
        self.field, self.found = field, dict(found)
        super().__init__(
            f"the ranks were started differently: {field} is not the same:\n"
            f"{rows_text(self.found)}\n"
            "Start every rank with the same versions, OMP_NUM_THREADS and options."
        )


class CommError(EchelonError):
    """Ranks that fail to communicate."""


class CollectiveMismatch(CommError):
    """The ranks of one group issued different collectives at the same position.

    Attributes:
        calls: what each rank issued, by rank in the job.
    """

    def __init__(self, group: str, position: int, calls: Mapping[int, str]) -> None:
        self.calls = dict(calls)
        super().__init__(
            f"collective #{position} of group {group!r} differs between ranks:\n"
            f"{rows_text(self.calls, _without_place)}\n"
            "All ranks of a group must issue the same collectives in the same order."
        )

    @classmethod
    def of_parts(cls, group: str, position: int, calls: Mapping[int, str]) -> Self:
        """Ranks that expect other parts of an all-to-all than their peers send."""
        message = (
            f"the parts of all_to_all_single #{position} of group {group!r} do not fit together:\n"
            f"{rows_text(calls, _without_place)}\n"
            "What rank s sends to rank r (input_splits[r] there) must be what r expects from s "
            "(output_splits[s])."
        )
        return revive(cls, message, {"calls": dict(calls)})

    @classmethod
    def of_message(cls, group: str, calls: Mapping[int, str], *, in_order: bool = False) -> Self:
        """A send and a receive that found each other and do not fit.

        Args:
            group: the name of the group.
            calls: what the two ranks issued, by rank.
            in_order: messages of two ranks match by the order of issue, and not by their tags.
        """
        why = "Messages of two ranks match in the order of issue here, whatever their tags.\n"
        rows = "\n".join(f"  rank {rank}: {text}" for rank, text in sorted(calls.items()))
        message = (
            f"a message in group {group!r} is received as something else than was sent:\n{rows}\n"
            f"{why if in_order else ''}"
            "The receiver must give a tensor of the same dtype and number of elements."
        )
        return revive(cls, message, {"calls": dict(calls)})

    @classmethod
    def of_groups(cls, name: str, calls: Mapping[int, str]) -> Self:
        """Ranks that make different groups of ``torch.distributed`` under one name."""
        message = (
            f"the ranks make different groups as number {name}:\n"
            f"{rows_text(calls, _without_place)}\n"
            "All ranks must make all groups in the same order, those that they are not in as well; "
            "or give new_group use_local_synchronization=True, so that only members make a group."
        )
        return revive(cls, message, {"calls": dict(calls)})


def _without_place(call: str) -> str:
    """A call as ranks must agree on it: they may issue it in different lines."""
    return call.rpartition(" at ")[0] or call


class RankFailed(CommError):
    """Another rank raised an exception, left or died while this one needed it.

    Attributes:
        failed_rank: rank of the one that failed, in the job.
    """

    def __init__(self, failed_rank: int, cause: str, doing: str) -> None:
        self.failed_rank, self.cause, self.doing = failed_rank, cause, doing
        super().__init__(f"rank {failed_rank} {cause}, while this rank was in {doing}")


class DeadlockError(CommError):
    """Ranks wait for one another and none of them can go on.

    Attributes:
        waits: for each rank that waits, the call it is in and the ranks that have not come, but for
            those that have not had their turn, if ranks take turns.
        last_calls: for ranks that have returned, what they called last, where that is told.
        reasons: for ranks that wait, why their call needs others, where the rules tell more.
    """

    def __init__(
        self,
        waits: Mapping[int, tuple[str, Sequence[int]]],
        finished: Iterable[int],
        last_calls: Mapping[int, str] | None = None,
        reasons: Mapping[int, str] | None = None,
    ) -> None:
        self.reasons = {rank: text for rank, text in (reasons or {}).items() if text}
        self.waits = {rank: (call, tuple(missing)) for rank, (call, missing) in waits.items()}
        self.last_calls = dict(last_calls or {})
        gone = sorted(finished)
        rows = "\n".join(
            f"  rank {rank} waits in {call} for {ranks_text(missing)}{self._reason(rank)}"
            for rank, (call, missing) in sorted(self.waits.items())
        )
        left = f"\n  {ranks_text(gone)} returned already" if gone else ""
        left += "".join(
            f"\n  rank {rank} called last {call}" for rank, call in sorted(self.last_calls.items())
        )
        super().__init__(f"deadlock: no rank can go on\n{rows}{left}")

    def _reason(self, rank: int) -> str:
        return f"\n    {self.reasons[rank]}" if rank in self.reasons else ""


class CommTimeout(CommError, TimeoutError):
    """A rank did not come in time.

    Attributes:
        missing: the ranks (in the job) that were waited for.
        doing: the call that waited, with its place.
        seconds: how long.
        others: what is known of the other ranks, a row each.
        stuck: the ranks that hold up the others, and what each was found to do; empty where
            nothing is known of them.
    """

    def __init__(
        self,
        doing: str,
        missing: Sequence[int],
        seconds: float,
        others: str = "",
        *,
        stuck: Mapping[int, str] | None = None,
    ) -> None:
        self.doing, self.missing, self.seconds = doing, tuple(missing), seconds
        self.others, self.stuck = others, dict(stuck or {})
        tail = f"\n{others}" if others else ""
        super().__init__(f"{doing} waited {seconds:.1f} s for {ranks_text(missing)} in vain{tail}")
