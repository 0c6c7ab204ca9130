"""The narrow waist: ranks that communicate together.

Everything above takes a ``Group``; everything below writes what ``Transport`` lists. A call goes
through four files: a method here → ``primitives`` or ``derived``, which check the arguments and
make dense 1D tensors → ``_issue``, which numbers the call → ``_start`` of the world.

Names and meaning follow ``torch.distributed`` as of 2.13; a rank argument is a rank inside the
group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from echelon.comm import derived, objects, primitives
from echelon.comm.primitives import Derived, Request
from echelon.comm.threads.randomness import draws_nothing
from echelon.comm.transport import Transport
from echelon.comm.work import Window, Work
from echelon.diagnosis.collective_call import CallSignature
from echelon.errors import UnsupportedError


class Group(Transport):
    """Ranks that communicate together. Abstract: a world writes the methods of ``Transport``.

    Each collective is called by all ranks of the group, in the same order. With
    ``async_op=True`` it returns a ``Work`` at once; any number may be outstanding. ``label`` names
    what is communicated: errors repeat it, and ranks must agree on it.

    Attributes:
        rank: of this process (or simulated rank) inside the group.
        size: number of ranks in the group.
        ranks: their ranks in the job, in order.
        name: for messages; ``"world"`` or derived from the parent's.
        device: where tensors of this group live.
        timeout: seconds that a rank waits for others before it raises.
        shares_memory: whether windows of this group reach the peers' memory.
        parent: the group that it was made from; None for that of all ranks.
    """

    # Collectives -----------------------------------------------------------------------------

    @final
    @draws_nothing
    def all_reduce(
        self, tensor: Tensor, op: str = "sum", async_op: bool = False, *, label: str | None = None
    ) -> Work | None:
        """Replace ``tensor`` by its reduction over all ranks; bitwise the same on every rank.

        Args:
            op: ``"sum" "mean" "min" "max" "product"``, for integers also ``"band" "bor" "bxor"``.

        Raises:
            ArgumentError: the operation has no meaning for the dtype, or the tensor is not dense.
            CollectiveMismatch: ranks differ in operation, dtype, shape, label or order.
        """
        request = primitives.all_reduce(self._arguments, tensor, op, label)
        return self._issue(request, async_op)

    @final
    @draws_nothing
    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        op: str = "sum",
        async_op: bool = False,
        *,
        splits: Sequence[int] | None = None,
        label: str | None = None,
    ) -> Work | None:
        """Reduce ``input`` over ranks and leave part ``rank`` of it in ``output``.

        Args:
            output: ``numel`` elements.
            input: ``size * numel`` elements, the parts for all ranks end to end.
            splits: elements of the part of each rank; None: equal parts.
        """
        request = primitives.reduce_scatter(self._arguments, output, input, op, splits, label)
        return self._issue(request, async_op)

    @final
    @draws_nothing
    def all_gather_single(
        self, output: Tensor, input: Tensor, async_op: bool = False, *, label: str | None = None
    ) -> Work | None:
        """Put the ``input`` of all ranks end to end, in rank order, into ``output``.

        Args:
            output: ``size * numel`` elements; may contain ``input`` at this rank's place.
            input: ``numel`` elements.
        """
        request = primitives.all_gather_single(self._arguments, output, input, label)
        return self._issue(request, async_op)

    @final
    @draws_nothing
    def all_gather(
        self,
        outputs: Sequence[Tensor],
        input: Tensor,
        async_op: bool = False,
        *,
        label: str | None = None,
    ) -> Work | None:
        """Copy the ``input`` of rank ``r`` into ``outputs[r]`` on all ranks; lengths may differ."""
        request = primitives.all_gather(self._arguments, outputs, input, label)
        return self._issue(request, async_op)

    @final
    @draws_nothing
    def broadcast(
        self, tensor: Tensor, src: int, async_op: bool = False, *, label: str | None = None
    ) -> Work | None:
        """Copy the ``tensor`` of rank ``src`` to all ranks."""
        request = primitives.broadcast(self._arguments, tensor, src, label)
        return self._issue(request, async_op)

    @final
    @draws_nothing
    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: str = "sum",
        async_op: bool = False,
        *,
        label: str | None = None,
    ) -> Work | None:
        """Replace ``tensor`` of rank ``dst`` by the reduction over ranks; others keep theirs."""
        request = derived.reduce(self._arguments, tensor, dst, op, label)
        return self._issue_derived(request, async_op)

    @final
    @draws_nothing
    def gather(
        self,
        tensor: Tensor,
        outputs: Sequence[Tensor] | None = None,
        dst: int = 0,
        async_op: bool = False,
        *,
        label: str | None = None,
    ) -> Work | None:
        """Copy ``tensor`` of rank ``r`` to ``outputs[r]`` of rank ``dst``; others give none."""
        request = derived.gather(self._arguments, tensor, outputs, dst, label)
        return self._issue_derived(request, async_op)

    @final
    @draws_nothing
    def scatter(
        self,
        tensor: Tensor,
        inputs: Sequence[Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
        *,
        label: str | None = None,
    ) -> Work | None:
        """Copy ``inputs[r]`` of rank ``src`` to ``tensor`` of rank ``r``; only src gives inputs."""
        request = derived.scatter(self._arguments, tensor, inputs, src, label)
        return self._issue_derived(request, async_op)

    @final
    @draws_nothing
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
        *,
        label: str | None = None,
    ) -> Work | None:
        """Send part ``r`` of ``input`` to rank ``r``; what it sends is part ``r`` of ``output``.

        Args:
            output_splits: rows of dim 0 that come from each rank; None: equal parts.
            input_splits: rows of dim 0 that go to each rank; None: equal parts.

        Raises:
            CollectiveMismatch: a rank sends another number of elements than its peer expects.
        """
        request = primitives.all_to_all_single(
            self._arguments, output, input, output_splits, input_splits, label
        )
        return self._issue(request, async_op)

    @final
    @draws_nothing
    def barrier(self, async_op: bool = False, *, label: str | None = None) -> Work | None:
        """Return when all ranks of the group have called it."""
        return self._issue_derived(derived.barrier(self._arguments, label), async_op)

    # Objects ---------------------------------------------------------------------------------

    @final
    def all_gather_object(self, item: Any, *, pickle: bool = False) -> list[Any]:
        """The ``item`` of every rank, in rank order; for set-up, not for training.

        It holds what a checkpoint may hold. With ``pickle=True`` on all ranks it is of any class.
        **Danger**: reading a pickle runs code that its sender, or who speaks as it, has put there.
        """
        return objects.gather_objects(self, item, pickle)

    @final
    def all_gather_bytes(self, data: bytes, *, label: str = "bytes") -> list[bytes]:
        """The ``data`` of every rank, in rank order; lengths may differ."""
        return objects.gather_bytes(self, data, label)

    @final
    def broadcast_object(self, item: Any = None, src: int = 0, *, pickle: bool = False) -> Any:
        """The ``item`` of rank ``src``, on every rank; as for ``all_gather_object``."""
        self._arguments.check_rank("src", src)
        return objects.broadcast_object(self, item, src, pickle)

    # Point to point --------------------------------------------------------------------------

    @final
    @draws_nothing
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Send ``tensor`` to rank ``dst``; it must not change before the work is waited for."""
        request = primitives.send(self._arguments, tensor, dst, tag)
        return self._issue_message(request, blocking=False)

    @final
    @draws_nothing
    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        """Receive into ``tensor`` what rank ``src`` sends with this ``tag``, first sent first."""
        request = primitives.receive(self._arguments, tensor, src, tag)
        return self._issue_message(request, blocking=False)

    @final
    @draws_nothing
    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send ``tensor`` to rank ``dst`` and return when it may be changed again.

        A program must not count on buffering: simulated ranks return only when the receiver has
        come.
        """
        request = primitives.send(self._arguments, tensor, dst, tag)
        self._issue_message(request, blocking=True).wait()

    @final
    @draws_nothing
    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> None:
        """Receive into ``tensor`` what rank ``src`` sends with the same ``tag``.

        Raises:
            CollectiveMismatch: the peer sent another dtype or number of elements.
        """
        request = primitives.receive(self._arguments, tensor, src, tag)
        self._issue_message(request, blocking=True).wait()

    # Groups and windows ----------------------------------------------------------------------

    @final
    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """A group of some of these ranks, as numbered here; None where this rank is not in it.

        All ranks of this group call it, with the same ``ranks``; order and repeats do not count.
        """
        members = self._arguments.members(ranks)
        self._num_subgroups += 1
        name = f"{self.name}.{self._num_subgroups}"
        signature = CallSignature("subgroup", None, tuple(members), label=name)
        return self._born(self._subgroup(self._number(signature, True), name, members))

    @final
    def window(self, numel: int, dtype: torch.dtype = torch.float32) -> Window:
        """Memory of ``numel`` elements a rank that peers can reach in place; zeros at first.

        All ranks of the group call it. Where memory is not shared (``shares_memory``) the window
        holds the local region only; collectives on it work everywhere and are fastest where it is
        shared.

        Raises:
            SharedMemoryError: there is not enough.
        """
        numel = self._arguments.memory("window", numel, dtype)
        call = self._number(CallSignature("window", dtype, (numel,)), True)
        return self._window(call, numel, dtype)

    @final
    def shared_tensor(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """One tensor of zeros, 1D, that is the same memory on all ranks. All ranks call it.

        Who may write which part of it when is up to the ranks. Collectives take it for ordinary
        memory.

        Raises:
            UnsupportedError: the ranks of this group do not share memory.
            SharedMemoryError: there is not enough.
        """
        numel = self._arguments.memory("shared_tensor", numel, dtype)
        if not self.shares_memory:
            raise UnsupportedError(
                f"the ranks of group {self.name!r} do not share memory, so a tensor cannot be the "
                "same on all of them: use a world of threads or processes, or gather"
            )
        call = self._number(CallSignature("shared_tensor", dtype, (numel,)), True)
        return self._shared(call, numel, dtype)

    # How a call is issued --------------------------------------------------------------------

    @final
    def _issue(self, request: Request, async_op: bool) -> Work | None:
        """Number a collective and start it; wait for it here unless ``async_op``."""
        signature, operation, finish = request
        work = self._start(self._number(signature, not async_op), operation)
        for step in finish:
            if step is not None:
                work.then(step)
        if async_op:
            return work
        work.wait()
        return None

    @final
    def _issue_derived(self, request: Request, async_op: bool) -> Work | None:
        """Issue a collective as it is where the transport takes it, else as its primitive."""
        signature, operation, finish = request
        if isinstance(operation, Derived) and type(operation) not in self.overrides:
            operation = operation.primitive(self.rank, self.size)
        return self._issue((signature, operation, finish), async_op)

    @final
    def _issue_message(self, request: Request, *, blocking: bool) -> Work:
        """Number a message and start it."""
        signature, operation, finish = request
        work = self._start(self._number(signature, blocking, is_message=True), operation)
        for step in finish:
            if step is not None:
                work.then(step)
        return work
