"""Groups over a c10d engine: the base of all, and the group whose engine only carries messages."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from echelon.comm.buffers import zeros
from echelon.comm.group import Group
from echelon.comm.ordered_executor import OrderedExecutor
from echelon.comm.primitives import Derived, Exchange, Message, Primitive, Receive, Send
from echelon.comm.torch_dist.algorithms import Algorithms
from echelon.comm.torch_dist.job import Job
from echelon.comm.torch_dist.peers import Mailroom, PeerLost, Peers, Posted, collective_tag
from echelon.comm.torch_dist.signature_check import SignatureCheck
from echelon.comm.work import Window, Work
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.diagnosis.failure_record import FailureRecord
from echelon.errors import CommError, CommTimeout
from echelon.process.background_threads import run_in_background

# Elements sent to and expected from each rank, where ranks may differ in them.
Lengths = tuple[list[int], list[int]]
# Makes the group of the given name and ranks (in the job), with tensors on the given device; all of
# these ranks call it.
Connect = Callable[[str, tuple[int, ...], torch.device], "TorchGroup"]


@final
@dataclass(frozen=True)
class GroupSpec:
    """What every group of this package is made of, whatever its engine.

    Attributes:
        job: shared by all groups of this rank.
        name: for messages and for the store.
        ranks: in the job, in order.
        device: where tensors live.
        timeout: seconds that a rank waits for others.
        connect: makes subgroups.
    """

    job: Job
    name: str
    ranks: tuple[int, ...]
    device: torch.device
    timeout: float
    connect: Connect


class TorchGroup(Group):
    """Ranks that communicate through ``torch.distributed``. Each kind of engine has a subclass.

    Args:
        agreement: compares the calls of the ranks before each collective; None: they are trusted.
    """

    def __init__(self, spec: GroupSpec, agreement: SignatureCheck | None) -> None:
        super().__init__(
            spec.name,
            spec.ranks.index(spec.job.rank),
            spec.ranks,
            spec.device,
            spec.timeout,
            shares_memory=False,
            note=spec.job.monitor.record_call,
        )
        self._job = spec.job
        self._connect = spec.connect
        self._agreement = agreement

    @final
    def close(self, error: BaseException | None = None) -> None:
        """End communication of all groups of this job on this rank, in good order.

        Args:
            error: why this rank leaves early; the other ranks name it as the cause.
        """
        self._job.close(error)

    @abstractmethod
    def _synchronize(self, call: CollectiveCall) -> None:
        """Return when all ranks have issued this call."""

    @final
    def _diagnose(
        self, call: CollectiveCall, lost: PeerLost, start_s: float, lengths: Lengths | None = None
    ) -> CommError:
        """What to raise for peers that did not answer in this call."""
        sends, expects = lengths or ((), ())
        record = FailureRecord.of_call(
            call,
            late=lost.late,
            missing=[self.ranks[rank] for rank in lost.missing],
            seconds=time.monotonic() - start_s,
            sends=sends,
            expects=expects,
        )
        return self._job.diagnose(record, self.ranks)

    @final
    def _subgroup(
        self, call: CollectiveCall, name: str, members: Sequence[int], device: torch.device | None
    ) -> TorchGroup | None:
        self._job.check()
        if self._agreement is not None:
            self._synchronize(call)
        if self.rank not in members:
            return None
        start_s = time.monotonic()
        others = tuple(member for member in members if member != self.rank)
        try:
            ranks = tuple(self.ranks[member] for member in members)
            return self._connect(name, ranks, device or self.device)
        except PeerLost as lost:
            # ``lost`` counts ranks in the new group, and the record in this group.
            missing = tuple(members[rank] for rank in lost.missing) or others
            raise self._diagnose(call, PeerLost(missing, lost.late), start_s) from lost
        except RuntimeError as error:
            late = time.monotonic() - start_s >= self.timeout
            raise self._diagnose(call, PeerLost(others, late), start_s) from error

    @final
    def _window(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Window:
        self._job.check()
        if self._agreement is not None:
            self._synchronize(call)
        local = zeros(numel, dtype, self.device, what=f"a window of {numel} elements")
        return Window(local, [local], shared=False)


@final
class MessageWork(Work):
    """A message under way. Its work of the engine can only be waited for, and only once.

    Attributes:
        has_ended: whether a wait has ended.
        waiter: the thread that waits beside the caller, if one was needed.
    """

    def __init__(self, call: CollectiveCall, wait: Callable[[], None], peer: int) -> None:
        super().__init__(call)
        self._await: Callable[[], None] | None = wait
        self._peer = peer
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self.has_ended = False
        self.waiter: threading.Thread | None = None

    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        self._wait_beside()
        return self.has_ended

    def _is_over(self) -> bool:
        return self.has_ended

    def _wait(self, timeout: float | None) -> None:
        if timeout is None:
            self._wait_here()
        else:
            # A wait of the engine that times out breaks its connections, so it must not be short.
            self._wait_beside()
            if self.waiter is not None:
                self.waiter.join(timeout)
            if not self.has_ended:
                raise CommTimeout(str(self.call), (self._peer,), timeout)
        if self._error is not None:
            raise self._error

    def _wait_beside(self) -> None:
        if self.waiter is None and not self.has_ended:
            self.waiter = run_in_background("echelon message", self._wait_here)

    def _wait_here(self) -> None:
        with self._lock:
            if self.has_ended:
                return
            step, self._await = self._await, None
            assert step is not None
            try:
                step()
            except BaseException as error:
                self._error = error
            self.has_ended = True


@final
class PeerGroup(TorchGroup):
    """Ranks whose engine carries tagged messages (gloo): the collectives are our own.

    Sums run in rank order and are bitwise equal on all ranks; every dtype works, because only
    bytes travel; any number of collectives may be outstanding.
    """

    def __init__(self, spec: GroupSpec, peers: Peers, *, check: bool) -> None:
        super().__init__(spec, SignatureCheck(peers, spec.ranks) if check else None)
        self._peers = peers
        self._algorithms = Algorithms(peers, spec.device)
        self._executor = OrderedExecutor(f"echelon collectives {spec.name}", self._awaited)
        self._mailroom = Mailroom()
        self._messages: list[MessageWork] = []
        spec.job.join(peers.sever, self._drop)

    def _use_timeout(self, seconds: float) -> None:
        self._peers.timeout = seconds

    def _start(self, call: CollectiveCall, operation: Primitive | Derived) -> Work | None:
        if isinstance(operation, Send):
            return self._post(call, self._peers.send, operation, operation.dst)
        if isinstance(operation, Receive):
            return self._post(call, self._peers.recv, operation, operation.src)
        if isinstance(operation, Exchange) and not operation.lengths_agreed:
            return self._issue_in_turn(call, operation, _lengths(operation))
        return self._issue_in_turn(call, operation)

    # Collectives -----------------------------------------------------------------------------

    def _issue_in_turn(
        self,
        call: CollectiveCall,
        operation: Primitive | Derived | None,
        lengths: Lengths | None = None,
    ) -> Work | None:
        self._job.check()
        return self._executor.issue(call, lambda: self._carry_out(call, operation, lengths))

    def _carry_out(
        self,
        call: CollectiveCall,
        operation: Primitive | Derived | None,
        lengths: Lengths | None,
    ) -> None:
        """Run one collective; without an operation, only the check of its call."""
        self._job.check()
        start_s = time.monotonic()
        try:
            if self._agreement is not None:
                self._agreement.check(call, lengths)
            if operation is not None:
                tag = collective_tag(call.signature, call.position)
                self._algorithms.run(tag, operation)
        except PeerLost as lost:
            raise self._diagnose(call, lost, start_s, lengths) from lost.__cause__

    def _awaited(self) -> tuple[int, ...]:
        return tuple(self.ranks[rank] for rank in self._peers.awaited)

    def _synchronize(self, call: CollectiveCall) -> None:
        work = self._issue_in_turn(call, None)
        if work is not None:
            work.wait()

    # Point to point --------------------------------------------------------------------------

    def _post(
        self,
        call: CollectiveCall,
        post: Callable[[Tensor, int, int], Posted],
        message: Message,
        peer: int,
    ) -> Work:
        self._job.check()
        tensor = message.tensor
        engine_tag = self._mailroom.tag(call.signature.op, tensor, peer, message.tag)
        start_s = time.monotonic()
        # One byte stands for an empty tensor: its length is in the tag, and the receiver must wait.
        body = tensor if tensor.numel() else torch.zeros(1, dtype=torch.uint8, device=self.device)
        try:
            posted = post(body, peer, engine_tag)
        except PeerLost as lost:
            raise self._diagnose(call, lost, start_s) from lost.__cause__

        def wait() -> None:
            waiting_s = time.monotonic()
            try:
                self._peers.wait([posted], self._peers.deadline(), is_message=True)
            except PeerLost as lost:
                raise self._diagnose(call, lost, waiting_s) from lost.__cause__

        work = MessageWork(call, wait, self.ranks[peer])
        if not call.blocking:
            self._messages = [old for old in self._messages if not old.has_ended]
            self._messages.append(work)
        return work

    # End -------------------------------------------------------------------------------------

    def _drop(self, failed: bool) -> None:
        """End outstanding work and drop the engine.

        A thread that returned from the engine while Python ends would abort the process, so no
        thread is left in it.
        """
        if not self._executor.close(drop=failed, seconds=self.timeout):
            self._peers.sever()
        waiters = [work.waiter for work in self._messages if work.waiter is not None]
        if any(waiter.is_alive() for waiter in waiters):
            self._peers.sever()
            for waiter in waiters:
                waiter.join()
        self._peers.close()


def _lengths(exchange: Exchange) -> Lengths:
    """The numbers of elements, which the signature does not contain."""
    sends = [part.numel() for part in exchange.inputs]
    return sends, [part.numel() for part in exchange.outputs]
