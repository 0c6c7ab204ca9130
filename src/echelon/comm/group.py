"""The narrow waist: ranks that communicate together.

Everything above takes a ``Group``; everything below writes only what ``backend`` lists. The public
methods are final: they check arguments, build the call that all ranks must agree on, tell the
observers, and make dense contiguous buffers of whatever tensor they are given.

Names and meaning follow ``torch.distributed`` as of 2.13; a rank argument is a rank inside the
group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from echelon.comm import objects, reduce_op
from echelon.comm.backend import Backend, check_tensors
from echelon.comm.flat import apart, flattened
from echelon.comm.threads.randomness import draws_nothing
from echelon.comm.work import Window, Work
from echelon.diagnosis.collective_call import CallSignature
from echelon.errors import ArgumentError, UnsupportedError


class Group(Backend):
    """Ranks that communicate together. Abstract: a backend writes the ``_`` methods of ``Backend``.

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
        reduce_op.check_op(op, self._check("all_reduce", written=[tensor]))
        signature = CallSignature("all_reduce", tensor.dtype, tuple(tensor.shape), op, None, label)
        call = self._number(signature, async_op)
        flat, restore = flattened(tensor)
        return self._started(self._all_reduce(call, flat, op), restore)

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
        reduce_op.check_op(op, self._check("reduce_scatter_single", [input], [output]))
        if splits is None:
            self._check_numel("input", input, self.size * output.numel(), "size * output.numel()")
            lengths = [output.numel()] * self.size
        else:
            lengths = self._check_splits("input", input, splits)
            self._check_numel("output", output, lengths[self.rank], f"splits[{self.rank}]")
        parts = () if splits is None else tuple(lengths)
        call = self._number(
            CallSignature(
                "reduce_scatter_single", input.dtype, tuple(input.shape), op, None, label, parts
            ),
            async_op,
        )
        flat, restore = flattened(output)
        work = self._reduce_scatter(call, flat, flattened(input)[0], lengths, op)
        return self._started(work, restore)

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
        self._check("all_gather_single", [input], [output])
        self._check_numel("output", output, self.size * input.numel(), "size * input.numel()")
        call = self._number(
            CallSignature("all_gather_single", input.dtype, tuple(input.shape), None, None, label),
            async_op,
        )
        flat, restore = flattened(output)
        parts = flat.view(self.size, -1).unbind(0) if flat.numel() else [flat] * self.size
        source = apart(flattened(input)[0], parts, self.rank)
        return self._started(self._all_gather(call, parts, source), restore)

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
        check_tensors("all_gather", "outputs", outputs)
        self._check("all_gather", [input], outputs)
        if len(outputs) != self.size:
            raise ArgumentError(f"all_gather got {len(outputs)} outputs for {self.size} ranks")
        self._check_numel(
            "input", input, outputs[self.rank].numel(), f"outputs[{self.rank}].numel()"
        )
        lengths = tuple(output.numel() for output in outputs)
        call = self._number(
            CallSignature("all_gather", input.dtype, (sum(lengths),), None, None, label, lengths),
            async_op,
        )
        flats, restores = zip(*map(flattened, outputs), strict=True)
        source = apart(flattened(input)[0], flats, self.rank)
        return self._started(self._all_gather(call, flats, source), *restores)

    @final
    @draws_nothing
    def broadcast(
        self, tensor: Tensor, src: int, async_op: bool = False, *, label: str | None = None
    ) -> Work | None:
        """Copy the ``tensor`` of rank ``src`` to all ranks."""
        self._check_rank("src", src)
        self._check("broadcast", *([tensor], ()) if src == self.rank else ((), [tensor]))
        signature = CallSignature("broadcast", tensor.dtype, tuple(tensor.shape), None, src, label)
        call = self._number(signature, async_op)
        flat, restore = flattened(tensor)
        return self._started(self._broadcast(call, flat, src), restore)

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
        self._check_rank("dst", dst)
        reduce_op.check_op(op, self._check("reduce", written=[tensor]))
        call = self._number(
            CallSignature("reduce", tensor.dtype, tuple(tensor.shape), op, dst, label), async_op
        )
        flat, restore = flattened(tensor)
        return self._started(self._reduce(call, flat, dst, op), restore)

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
        self._check_rank("dst", dst)
        given = self._check_list("gather", "outputs", outputs, root=dst)
        self._check("gather", [tensor], given)
        self._check_numels("gather", "outputs", given, tensor)
        call = self._number(
            CallSignature("gather", tensor.dtype, tuple(tensor.shape), None, dst, label), async_op
        )
        pairs = [flattened(output) for output in given]
        work = self._gather(call, [flat for flat, _ in pairs], flattened(tensor)[0], dst)
        return self._started(work, *(restore for _, restore in pairs))

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
        self._check_rank("src", src)
        given = self._check_list("scatter", "inputs", inputs, root=src)
        self._check("scatter", given, [tensor])
        self._check_numels("scatter", "inputs", given, tensor)
        call = self._number(
            CallSignature("scatter", tensor.dtype, tuple(tensor.shape), None, src, label), async_op
        )
        flat, restore = flattened(tensor)
        parts = [
            flattened(item)[0] if rank == src else apart(flattened(item)[0], [flat])
            for rank, item in enumerate(given)
        ]
        work = self._scatter(call, flat, parts, src)
        return self._started(work, restore)

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
        self._check("all_to_all_single", [input], [output])
        outs = self._split_numels("output", output, output_splits)
        ins = self._split_numels("input", input, input_splits)
        call = self._number(
            CallSignature("all_to_all_single", input.dtype, (), None, None, label), async_op
        )
        flat, restore = flattened(output)
        source = apart(flattened(input)[0], [flat])
        work = self._all_to_all(call, flat.split(outs), source.split(ins))
        return self._started(work, restore)

    @final
    @draws_nothing
    def barrier(self, async_op: bool = False, *, label: str | None = None) -> Work | None:
        """Return when all ranks of the group have called it."""
        call = self._number(CallSignature("barrier", label=label), async_op)
        return self._started(self._barrier(call))

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
        self._check_rank("src", src)
        return objects.broadcast_object(self, item, src, pickle)

    # Point to point --------------------------------------------------------------------------

    @final
    @draws_nothing
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Send ``tensor`` to rank ``dst``; it must not change before the work is waited for."""
        call = self._number_message("send", tensor, dst, tag, blocking=False)
        return self._send(call, flattened(tensor)[0], dst, tag)

    @final
    @draws_nothing
    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        """Receive into ``tensor`` what rank ``src`` sends with this ``tag``, first sent first."""
        call = self._number_message("recv", tensor, src, tag, blocking=False)
        flat, restore = flattened(tensor)
        work = self._recv(call, flat, src, tag)
        if restore is not None:
            work.then(restore)
        return work

    @final
    @draws_nothing
    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send ``tensor`` to rank ``dst`` and return when it may be changed again.

        A program must not count on buffering: simulated ranks return only when the receiver has
        come.
        """
        call = self._number_message("send", tensor, dst, tag, blocking=True)
        self._send(call, flattened(tensor)[0], dst, tag).wait()

    @final
    @draws_nothing
    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> None:
        """Receive into ``tensor`` what rank ``src`` sends with the same ``tag``.

        Raises:
            CollectiveMismatch: the peer sent another dtype or number of elements.
        """
        call = self._number_message("recv", tensor, src, tag, blocking=True)
        flat, restore = flattened(tensor)
        self._recv(call, flat, src, tag).wait()
        if restore is not None:
            restore()

    # Groups and windows ----------------------------------------------------------------------

    @final
    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """A group of some of these ranks, as numbered here; None where this rank is not in it.

        All ranks of this group call it, with the same ``ranks``; order and repeats do not count.
        """
        if isinstance(ranks, str) or not isinstance(ranks, Iterable):
            raise ArgumentError(f"ranks is {ranks!r:.80}; give a list of ranks of this group")
        given = list(ranks)
        if not given:
            raise ArgumentError("a subgroup needs at least one rank")
        for member in given:
            self._check_rank("a member of the subgroup", member)
        members = sorted(set(given))
        self._num_subgroups += 1
        name = f"{self.name}.{self._num_subgroups}"
        signature = CallSignature("subgroup", None, tuple(members), label=name)
        call = self._number(signature, async_op=False)
        return self._born(self._subgroup(call, name, members))

    @final
    def window(self, numel: int, dtype: torch.dtype = torch.float32) -> Window:
        """Memory of ``numel`` elements a rank that peers can reach in place; zeros at first.

        All ranks of the group call it. Where memory is not shared (``shares_memory``) the window
        holds the local region only; collectives on it work everywhere and are fastest where it is
        shared.

        Raises:
            SharedMemoryError: there is not enough.
        """
        numel = self._check_memory("window", numel, dtype)
        call = self._number(CallSignature("window", dtype, (numel,)), async_op=False)
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
        numel = self._check_memory("shared_tensor", numel, dtype)
        if not self.shares_memory:
            raise UnsupportedError(
                f"the ranks of group {self.name!r} do not share memory, so a tensor cannot be the "
                "same on all of them: use a world of threads or processes, or gather"
            )
        call = self._number(CallSignature("shared_tensor", dtype, (numel,)), async_op=False)
        return self._shared(call, numel, dtype)
