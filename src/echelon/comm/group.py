"""Collectives, messages, subgroups and windows of a group of ranks.

All packages above this one communicate through ``Group``, and every world implements what
``Transport`` lists. A call passes through a method of ``Group``, then ``primitives`` or
``derived``, which check the arguments and flatten the tensors to 1D, then ``_launch``, which
numbers the call, and finally ``_start`` of the world.

Names and meanings are those of ``torch.distributed`` 2.13, except that a rank argument is a rank
inside the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from echelon import events
from echelon.comm import derived, objects, primitives
from echelon.comm.primitives import Derived, Request
from echelon.comm.profiler_spans import profiler_runs, profiler_span
from echelon.comm.torch_function import without_torch_function
from echelon.comm.transport import Transport
from echelon.comm.work import Window, Work, emit_issue, finish_call
from echelon.diagnosis import rank_time
from echelon.diagnosis.collective_call import CallSignature, CollectiveCall
from echelon.diagnosis.rank_time import RankTime
from echelon.errors import UnsupportedError


class Group(Transport):
    """Ranks that communicate with each other, like a process group of ``torch.distributed``.

    All ranks of the group call each collective, in the same order. With ``async_op=True`` a
    collective returns a ``Work`` at once; any number of them may be outstanding. ``label`` says
    what is communicated: errors repeat it, and ranks must agree on it.

    The class is abstract. A world implements the methods of ``Transport``.

    Attributes:
        rank: the rank of this process (or simulated rank) inside the group.
        size: the number of ranks in the group.
        ranks: the ranks of the members in the job, in order.
        name: ``"world"``, or a name derived from that of the parent; messages repeat it.
        device: the device of all tensors of this group.
        timeout: the seconds that a rank waits for others before it raises.
        shares_memory: whether windows of this group reach the peers' memory.
        parent: the group that this one is a subgroup of; None for the group of all ranks.
    """

    # Collectives -----------------------------------------------------------------------------

    @final
    @without_torch_function
    def all_reduce(
        self, tensor: Tensor, op: str = "sum", async_op: bool = False, *, label: str | None = None
    ) -> Work | None:
        """Replace ``tensor`` by its reduction over all ranks, which is bitwise the same on each.

        Args:
            op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"product"``; for integers also
                ``"band"``, ``"bor"`` or ``"bxor"``.

        Raises:
            ArgumentError: the operation has no meaning for the dtype, or the tensor is not dense.
            CollectiveMismatch: the ranks differ in operation, dtype, shape, label or order.
        """
        request = primitives.all_reduce(self._arguments, tensor, op, label)
        return self._issue(request, async_op)

    @final
    @without_torch_function
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
        """Reduce ``input`` over all ranks and write this rank's part of the result to ``output``.

        Args:
            output: ``numel`` elements; with ``splits``, ``splits[rank]``.
            input: ``size * numel`` elements: the parts for all ranks, end to end; with ``splits``,
                ``sum(splits)``.
            splits: the number of elements of each rank's part; None means equal parts.
        """
        request = primitives.reduce_scatter(self._arguments, output, input, op, splits, label)
        return self._issue(request, async_op)

    @final
    @without_torch_function
    def all_gather_single(
        self, output: Tensor, input: Tensor, async_op: bool = False, *, label: str | None = None
    ) -> Work | None:
        """Concatenate the ``input`` of all ranks, in rank order, into ``output``.

        Args:
            output: ``size * numel`` elements; its part for this rank may be ``input`` itself.
            input: ``numel`` elements.
        """
        request = primitives.all_gather_single(self._arguments, output, input, label)
        return self._issue(request, async_op)

    @final
    @without_torch_function
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
    @without_torch_function
    def broadcast(
        self, tensor: Tensor, src: int, async_op: bool = False, *, label: str | None = None
    ) -> Work | None:
        """Copy the ``tensor`` of rank ``src`` to all ranks."""
        request = primitives.broadcast(self._arguments, tensor, src, label)
        return self._issue(request, async_op)

    @final
    @without_torch_function
    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: str = "sum",
        async_op: bool = False,
        *,
        label: str | None = None,
    ) -> Work | None:
        """Replace ``tensor`` of rank ``dst`` by the reduction; other ranks' tensors stay as is."""
        request = derived.reduce(self._arguments, tensor, dst, op, label)
        return self._issue_derived(request, async_op)

    @final
    @without_torch_function
    def gather(
        self,
        tensor: Tensor,
        outputs: Sequence[Tensor] | None = None,
        dst: int = 0,
        async_op: bool = False,
        *,
        label: str | None = None,
    ) -> Work | None:
        """Copy ``tensor`` of rank ``r`` to ``outputs[r]`` of rank ``dst``.

        Only rank ``dst`` passes ``outputs``.
        """
        request = derived.gather(self._arguments, tensor, outputs, dst, label)
        return self._issue_derived(request, async_op)

    @final
    @without_torch_function
    def scatter(
        self,
        tensor: Tensor,
        inputs: Sequence[Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
        *,
        label: str | None = None,
    ) -> Work | None:
        """Copy ``inputs[r]`` of rank ``src`` to ``tensor`` of rank ``r``.

        Only rank ``src`` passes ``inputs``.
        """
        request = derived.scatter(self._arguments, tensor, inputs, src, label)
        return self._issue_derived(request, async_op)

    @final
    @without_torch_function
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
        """Send part ``r`` of ``input`` to rank ``r``, and receive part ``r`` of ``output`` from it.

        Args:
            output_splits: rows of dim 0 that each rank sends to this one; None: equal parts.
            input_splits: rows of dim 0 that this rank sends to each; None: equal parts.

        Raises:
            CollectiveMismatch: a rank sends more or fewer elements than its peer expects.
        """
        request = primitives.all_to_all_single(
            self._arguments, output, input, output_splits, input_splits, label
        )
        return self._issue(request, async_op)

    @final
    def barrier(self, async_op: bool = False, *, label: str | None = None) -> Work | None:
        """Return when all ranks of the group have called it."""
        return self._issue_derived(derived.barrier(self._arguments, label), async_op)

    # Objects ---------------------------------------------------------------------------------

    @final
    def all_gather_object(
        self, item: Any, *, pickle: bool = False, label: str | None = None
    ) -> list[Any]:
        """Return the ``item`` of every rank, in rank order. Meant for set-up, not for training.

        An item consists of the types that a checkpoint may hold. With ``pickle=True`` on all ranks
        it may be of any class. **Danger**: unpickling runs whatever code the sender, or anyone who
        poses as the sender, has put there. Errors repeat ``label``.
        """
        return objects.gather_objects(self, item, pickle, label)

    @final
    def all_gather_bytes(self, data: bytes, *, label: str = "bytes") -> list[bytes]:
        """Return the ``data`` of every rank, in rank order; lengths may differ."""
        return objects.all_gather_bytes(self, data, label)

    @final
    def gather_bytes(
        self, data: bytes, dst: int = 0, *, label: str = "bytes"
    ) -> list[bytes] | None:
        """Return the ``data`` of every rank, in rank order, on rank ``dst``, and None on others.

        Lengths may differ; the memory is that of the longest on each rank, and ``size`` times that
        on rank ``dst``.

        Raises:
            RankError: there is no rank ``dst``.

        Example:
            >>> import echelon as ec
            >>> ec.run(lambda world: world.group.gather_bytes(bytes(world.rank)), ranks=2)
            [[b'', b'\\x00'], None]
        """
        self._arguments.check_rank("dst", dst)
        return objects.gather_bytes(self, data, dst, label)

    @final
    def broadcast_object(self, item: Any = None, src: int = 0, *, pickle: bool = False) -> Any:
        """Return the ``item`` of rank ``src`` on every rank; see ``all_gather_object``."""
        self._arguments.check_rank("src", src)
        return objects.broadcast_object(self, item, src, pickle)

    # Point to point --------------------------------------------------------------------------

    @final
    @without_torch_function
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Start to send ``tensor`` to rank ``dst``; do not change it before you wait."""
        request = primitives.send(self._arguments, tensor, dst, tag)
        work = self._issue(request, True, is_message=True)
        assert work is not None
        return work

    @final
    @without_torch_function
    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        """Start to receive the next message of rank ``src`` with this ``tag`` into ``tensor``."""
        request = primitives.receive(self._arguments, tensor, src, tag)
        work = self._issue(request, True, is_message=True)
        assert work is not None
        return work

    @final
    @without_torch_function
    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send ``tensor`` to rank ``dst`` and return when it may be changed again.

        Do not rely on buffering: with simulated ranks, ``send`` returns only when the receiver has
        called ``recv``.
        """
        request = primitives.send(self._arguments, tensor, dst, tag)
        self._issue(request, False, is_message=True)

    @final
    @without_torch_function
    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> None:
        """Receive the next message of rank ``src`` with this ``tag`` into ``tensor``.

        Raises:
            CollectiveMismatch: the message has another dtype or number of elements.
        """
        request = primitives.receive(self._arguments, tensor, src, tag)
        self._issue(request, False, is_message=True)

    # Groups and windows ----------------------------------------------------------------------

    @final
    def subgroup(
        self, ranks: Sequence[int], *, device: torch.device | str | None = None
    ) -> Group | None:
        """Make a group of some ranks of this one; return None on ranks that are not in it.

        All ranks of this group call it with the same arguments. Another thread than that of the
        rank needs a group of its own, and on a device one with ``device="cpu"``: its calls then
        touch neither the device nor what training has queued there.

        Args:
            ranks: inside this group; their order and repetitions do not matter.
            device: of the tensors of the new group: None for that of this one, or ``"cpu"``, for
                which groups over NCCL and its like make connections of gloo.

        Raises:
            ArgumentError: a rank is not in this group, or ``device`` is another one.

        Example:
            >>> import echelon as ec
            >>> ec.run(lambda world: world.group.subgroup([0], device="cpu").size, ranks=1)
            [1]
        """
        members = self._arguments.members(ranks)
        place = self._arguments.device_of_subgroup(device)
        self._num_subgroups += 1
        name = f"{self.name}.{self._num_subgroups}"
        signature = CallSignature("subgroup", None, tuple(members), label=name)
        call = self._number_setup(signature)
        return self._with_parent(self._subgroup(call, name, members, place))

    @final
    def window(self, numel: int, dtype: torch.dtype = torch.float32) -> Window:
        """Allocate ``numel`` zeros on each rank, which peers can read and write in place.

        All ranks of the group call it. If the group does not share memory (``shares_memory``), the
        window holds the local region only. Collectives accept tensors of a window in every world,
        and are fastest where memory is shared.

        Raises:
            SharedMemoryError: there is not enough memory.
        """
        numel = self._arguments.memory("window", numel, dtype)
        call = self._number_setup(CallSignature("window", dtype, (numel,)))
        return self._window(call, numel, dtype)

    @final
    def shared_tensor(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate one 1D tensor of zeros that is the same memory on all ranks.

        All ranks of the group call it, and must coordinate who writes which part at what time.
        Collectives treat the tensor like ordinary memory.

        Raises:
            UnsupportedError: the ranks of this group do not share memory.
            SharedMemoryError: there is not enough memory.
        """
        numel = self._arguments.memory("shared_tensor", numel, dtype)
        if not self.shares_memory:
            raise UnsupportedError(
                f"the ranks of group {self.name!r} do not share memory, so a tensor cannot be the "
                "same on all of them: use a world of threads or processes, or gather"
            )
        call = self._number_setup(CallSignature("shared_tensor", dtype, (numel,)))
        return self._shared(call, numel, dtype)

    # Issuing ---------------------------------------------------------------------------------

    @final
    def _issue(self, request: Request, async_op: bool, *, is_message: bool = False) -> Work | None:
        """Start a call, and wait for it unless ``async_op``, in a span of the profiler if it runs.

        This is the hot path: a short blocking call takes about 10 µs. To post a message is too
        short to count as communication.
        """
        clock = None if is_message and async_op else rank_time.current()
        before = rank_time.NOTHING if clock is None else clock.begin_call()
        try:
            if not profiler_runs():
                return self._launch(request, async_op, is_message, clock)
            signature, _, _ = request
            with profiler_span(signature.op, signature, self.name):
                return self._launch(request, async_op, is_message, clock)
        finally:
            if clock is not None:
                clock.end(before)

    @final
    def _number_setup(self, signature: CallSignature) -> CollectiveCall:
        """Number a call that makes a subgroup or memory, and record that this rank came to it."""
        call = self._number(signature, blocking=True, depth=3)
        if events.listening():
            emit_issue(call)
        rank_time.arrive(call)
        return call

    @final
    def _issue_derived(self, request: Request, async_op: bool) -> Work | None:
        """Issue a derived collective, as its primitive unless the world overrides it."""
        signature, operation, finish = request
        if type(operation) in self.overrides:
            return self._issue(request, async_op)
        assert isinstance(operation, Derived)
        with torch._C.DisableTorchFunction():  # ``barrier`` has no such decorator
            primitive = operation.primitive(self.rank, self.size)
            return self._issue((signature, primitive, finish), async_op)

    @final
    def _launch(
        self, request: Request, async_op: bool, is_message: bool, clock: RankTime | None
    ) -> Work | None:
        """Number a call and start it; wait for it unless ``async_op``."""
        signature, operation, finish = request
        # Frames between here and the user: _issue, a decorator or _issue_derived, and the method.
        call = self._number(signature, not async_op, is_message, depth=5)
        is_heard = events.listening()
        if is_heard:
            emit_issue(call)
        if clock is not None and not is_message:
            clock.arrive(call)
        work = self._start(call, operation)
        if work is None:  # a blocking call that is over
            if finish or is_heard:
                finish_call(call, finish)
            return None
        for step in finish:
            work.then(step)
        if async_op:
            return work
        work.complete()
        return None
