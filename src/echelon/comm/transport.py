"""The interface that a world implements so that its ranks form a ``Group``.

It is the lower half of ``Group``: worlds subclass ``Group``, and nothing else subclasses this.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self, final

import torch
from torch import Tensor

from echelon.checks import positive
from echelon.comm.call_arguments import Arguments
from echelon.comm.group_tree import GroupTree
from echelon.comm.primitives import Derived, Primitive
from echelon.comm.work import Window, Work
from echelon.diagnosis.collective_call import CallSignature, CollectiveCall, caller
from echelon.process.forks import disown_in_forks, keep_alive, refused


class Transport(GroupTree, ABC):
    """The part of a ``Group`` that differs between worlds.

    Attributes:
        overrides: the derived collectives that ``_start`` implements itself, because that is
            faster; it gets all others as primitives.
        has_tags: whether messages match by their tags. Where they do not, as over NCCL, messages of
            two ranks match in the order of issue.
    """

    overrides: frozenset[type[Derived]] = frozenset()
    has_tags = True

    def __init__(
        self,
        name: str,
        rank: int,
        ranks: Sequence[int],
        device: torch.device,
        timeout: float,
        *,
        shares_memory: bool,
        note: Callable[[CollectiveCall], None],
    ) -> None:
        super().__init__()
        self.name = name
        self.rank = rank
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.device = device
        self._timeout = timeout
        self.shares_memory = shares_memory
        self._arguments = Arguments(rank, self.size, device)
        self._note = note  # records each call, for reports that this rank died or hangs
        self._position = 0
        self._p2p_position = 0
        self._num_subgroups = 0
        disown_in_forks(self)

    @property
    def timeout(self) -> float:
        """The seconds that a rank waits for others before it raises; each rank may set its own."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._use_timeout(positive("timeout", seconds, threading.TIMEOUT_MAX))
        self._timeout = seconds

    # What a world implements -----------------------------------------------------------------

    @abstractmethod
    def _use_timeout(self, seconds: float) -> None:
        """Wait for so long in calls from now on."""

    @abstractmethod
    def _start(self, call: CollectiveCall, operation: Primitive | Derived) -> Work | None:
        """Start the operation and return without waiting for peers.

        All ranks of the group start their collectives in one order. If ``call.blocking``, the
        caller waits next, so the transport may run the operation on the caller's thread, and return
        None when it is over. Reports may keep ``call``, so it must not hold the tensors.

        Raises:
            CollectiveMismatch: on every rank, here or in the wait, if the signatures of the call
                differ, or a rank sends more or fewer elements than its peer expects.
        """

    @abstractmethod
    def _subgroup(
        self, call: CollectiveCall, name: str, members: Sequence[int], device: torch.device | None
    ) -> Self | None:
        """Make the group of these ranks of this group; return None on other ranks.

        ``device`` is that of its tensors: None for that of this group, or the CPU, where it is to
        communicate beside what is on a device.
        """

    @abstractmethod
    def _window(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Window:
        """Allocate a window of zeros on every rank."""

    def _shared(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate one tensor of zeros for all ranks, if the group ``shares_memory``."""
        raise NotImplementedError

    def _kept_in_forks(self) -> Sequence[object]:
        """Objects that a forked process must not finalize."""
        return ()

    # What all worlds share -------------------------------------------------------------------

    @final
    def disown(self) -> None:
        """Refuse all further calls, because this process is a fork of the rank's process."""
        for item in self._kept_in_forks():
            keep_alive(item)

        def refuse(call: CollectiveCall) -> None:
            raise refused(f"{call.signature} of group {call.group!r} at {call.place}", call.rank)

        self._note = refuse

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.size}, on {self.device}"
        return f"{type(self).__name__}({self.name!r}, {place})"

    @final
    def _number(
        self, signature: CallSignature, blocking: bool, is_message: bool = False, *, depth: int = 2
    ) -> CollectiveCall:
        """Give the next call of this rank its number; messages have numbers of their own.

        The caller is at least ``depth`` frames up from here.
        """
        position = self._p2p_position if is_message else self._position
        place = caller(depth + 1)
        call = CollectiveCall(
            signature, place, position, self.name, self.ranks[self.rank], blocking
        )
        self._note(call)  # which may refuse it
        if is_message:
            self._p2p_position += 1
        else:
            self._position += 1
        return call
