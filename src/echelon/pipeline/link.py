"""Point-to-point messages between the two ranks on the sides of a stage boundary.

::

    forward:    header + small ─ [spec ─ small] ─ large ─ large ...    stage s ──> stage s + 1
    backward:   header + small ─ large ─ large ...                     stage s <── stage s + 1

Small tensors travel in one message with the header, a number: 0 if the value has the spec of the
same microbatch in the last step, else the length of the new spec. A receiver that knows the spec
posts the buffers of all messages at once. If the spec has changed, the sender first fills those
buffers with zeros that are dropped, and then sends the new spec and its tensors. Gradients have the
dtypes and shapes of the tensors they belong to; their header has one byte for each, 1 where there
is no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from echelon.comm.group import Group
from echelon.comm.object_bytes import checked_nbytes
from echelon.comm.torch_function import without_torch_function
from echelon.comm.work import Work
from echelon.pipeline.boundary import BoundarySpec, BoundaryValue, TensorSpec
from echelon.pipeline.packed_message import MessagePool, PackedMessage

_PACKED, _SPEC, _LARGE, _PACKED_GRADIENTS, _LARGE_GRADIENT, _NUM_TAGS = range(6)
_LENGTH_NBYTES = 8  # of a header that is the length of a spec


@final
class PendingSend:
    """A send that may not be complete, and the memory that it reads.

    ``on_done`` is called when the memory may be used again. Unless ``is_poll_cheap``, asking a work
    whether it is done may take a thread.
    """

    def __init__(
        self,
        works: list[Work],
        memory: list[Tensor],
        *,
        is_poll_cheap: bool = True,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._works, self._memory = works, memory
        self._is_poll_cheap, self._on_done = is_poll_cheap, on_done

    def is_done(self, *, poll: bool) -> bool:
        """Whether ``wait`` is known to return at once; ``poll`` asks even where that is costly."""
        return (self._is_poll_cheap or poll) and all(work.done() for work in self._works)

    def wait(self) -> None:
        """Wait until the memory may be used again, and release it. Called once."""
        for work in self._works:
            work.wait()
        self._works, self._memory = [], []
        self._on_done()


@final
class Link:
    """This rank's side of one stage boundary, which is numbered by the stage before it.

    Messages of different boundaries have different tags.
    """

    def __init__(self, group: Group, peer: int, boundary: int, num_microbatches: int) -> None:
        self._group, self._peer, self._boundary = group, peer, boundary
        self._first_tag = boundary * num_microbatches * _NUM_TAGS
        self._last_specs: dict[tuple[bool, int], BoundarySpec] = {}  # by training and microbatch
        self._send_pool, self._recv_pool = MessagePool(group.device), MessagePool(group.device)

    def _tag(self, microbatch: int, kind: int) -> int:
        return self._first_tag + microbatch * _NUM_TAGS + kind

    def _isend(self, microbatch: int, kind: int, tensor: Tensor) -> list[Work]:
        if not tensor.numel():
            return []
        return [self._group.isend(tensor, self._peer, self._tag(microbatch, kind))]

    def _irecv(self, microbatch: int, kind: int, tensor: Tensor) -> list[Work]:
        if not tensor.numel():
            return []
        return [self._group.irecv(tensor, self._peer, self._tag(microbatch, kind))]

    @without_torch_function
    def send_forward(self, microbatch: int, value: BoundaryValue, *, training: bool) -> PendingSend:
        """Send the output of a stage to the next one."""
        works: list[Work] = []
        memory: list[Tensor] = []

        def isend(kind: int, tensor: Tensor) -> None:
            memory.append(tensor)
            works.extend(self._isend(microbatch, kind, tensor))

        last_spec = self._last_specs.get((training, microbatch))
        if last_spec is None or not last_spec.is_identical(value.spec):
            self._send_spec(value.spec, () if last_spec is None else last_spec.tensors, isend)
            self._last_specs[training, microbatch] = value.spec
        message = self._send_pool.acquire(_LENGTH_NBYTES, value.spec.tensors)
        message.about = f"outputs of stage {self._boundary} for microbatch {microbatch}"
        large = []
        for view, tensor in zip(message.views, value.tensors, strict=True):
            if view is None:
                large.append(tensor)
            else:
                view.copy_(tensor)
        isend(_PACKED, message.buffer)
        for tensor in large:
            isend(_LARGE, tensor.contiguous())
        return self._pending(works, memory, message)

    def _send_spec(
        self,
        spec: BoundarySpec,
        expected: tuple[TensorSpec, ...],
        isend: Callable[[int, Tensor], None],
    ) -> None:
        """Fill the buffers that the receiver posted for the last spec, and then send a new one."""
        device = self._group.device
        data = spec.to_bytes()
        message = PackedMessage(_LENGTH_NBYTES, expected, device)
        message.about = f"how many bytes the spec of outputs of stage {self._boundary} has"
        message.length.fill_(len(data))
        isend(_PACKED, message.buffer)
        for large in message.large_specs:
            isend(_LARGE, torch.zeros(large.shape, dtype=large.dtype, device=device))
        isend(_SPEC, torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device))

    def _pending(
        self, works: list[Work], memory: list[Tensor], message: PackedMessage
    ) -> PendingSend:
        def on_done() -> None:
            self._send_pool.release(message)

        return PendingSend(works, memory, is_poll_cheap=self._group.shares_memory, on_done=on_done)

    @without_torch_function
    def recv_forward(self, microbatch: int, *, training: bool) -> ForwardRecv:
        """Post the receive of the output of the previous stage."""
        return ForwardRecv(self, microbatch, training)

    @without_torch_function
    def send_backward(
        self, microbatch: int, specs: Sequence[TensorSpec], grads: Sequence[Tensor | None]
    ) -> PendingSend:
        """Send the gradients of a stage's inputs back; None where an input was not used."""
        if not specs:
            return PendingSend([], [])
        message = self._send_pool.acquire(len(specs), tuple(specs))
        message.about = f"gradients for stage {self._boundary} of microbatch {microbatch}"
        memory = [message.buffer]
        for index, (spec, view, grad) in enumerate(zip(specs, message.views, grads, strict=True)):
            if grad is None:
                message.header[index] = 1
            if view is None:
                filled = spec.empty(self._group.device).zero_() if grad is None else grad
                memory.append(filled.contiguous())
            elif grad is not None:
                view.copy_(grad)
        works = self._isend(microbatch, _PACKED_GRADIENTS, message.buffer)
        for tensor in memory[1:]:
            works += self._isend(microbatch, _LARGE_GRADIENT, tensor)
        if any(grad is None for grad in grads):  # the pool has messages with an empty header only
            return PendingSend(works, memory, is_poll_cheap=self._group.shares_memory)
        return self._pending(works, memory, message)

    @without_torch_function
    def recv_backward(self, microbatch: int, specs: Sequence[TensorSpec]) -> BackwardRecv:
        """Post the receive of the gradients of a value that was sent."""
        return BackwardRecv(self, microbatch, specs)


def links_of(
    placement: Sequence[int], group: Group, num_microbatches: int
) -> tuple[dict[int, Link], dict[int, Link]]:
    """The links of this rank's stages to the previous and to the next stage, by stage."""
    to_previous: dict[int, Link] = {}
    to_next: dict[int, Link] = {}
    for stage, (left, right) in enumerate(pairwise(placement)):
        if left == right or group.rank not in (left, right):
            continue
        link = Link(group, left + right - group.rank, stage, num_microbatches)
        if group.rank == left:
            to_next[stage] = link
        else:
            to_previous[stage + 1] = link
    return to_previous, to_next


@final
class _RecvBuffers:
    """A message and its large tensors while they are received."""

    def __init__(
        self,
        link: Link,
        microbatch: int,
        tags: tuple[int, int],
        header_nbytes: int,
        specs: Sequence[TensorSpec],
    ) -> None:
        self._pool = link._recv_pool
        self.message = self._pool.acquire(header_nbytes, tuple(specs))
        self._works = link._irecv(microbatch, tags[0], self.message.buffer)
        device = self.message.buffer.device
        self._large = [spec.empty(device) for spec in self.message.large_specs]
        for tensor in self._large:
            self._works += link._irecv(microbatch, tags[1], tensor)

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def take_tensors(self) -> list[Tensor]:
        """The received tensors, of which no two share memory. Called once, at the end."""
        large, self._large = iter(self._large), []
        tensors = [next(large) if view is None else view.clone() for view in self.message.views]
        self._pool.release(self.message)
        return tensors


@final
class ForwardRecv:
    """A posted receive of the input of a stage."""

    def __init__(self, link: Link, microbatch: int, training: bool) -> None:
        self._link, self._microbatch = link, microbatch
        self._key = training, microbatch
        self._spec = link._last_specs.get(self._key)
        self._buffers = self._post()

    def _post(self) -> _RecvBuffers:
        specs = () if self._spec is None else self._spec.tensors
        return _RecvBuffers(self._link, self._microbatch, (_PACKED, _LARGE), _LENGTH_NBYTES, specs)

    @without_torch_function
    def wait(self) -> BoundaryValue:
        """Wait for the input; its tensors are leaves that need a gradient where those sent did."""
        self._buffers.wait()
        length = int(self._buffers.message.length.item())
        if length:
            group = self._link._group
            sender = group.ranks[self._link._peer]
            nbytes = checked_nbytes(length, sender)
            data = torch.empty(nbytes, dtype=torch.uint8, device=group.device)
            for work in self._link._irecv(self._microbatch, _SPEC, data):
                work.wait()
            self._spec = BoundarySpec.from_bytes(data.cpu().numpy().tobytes(), sender)
            self._link._last_specs[self._key] = self._spec
            self._buffers = self._post()
            self._buffers.wait()
        assert self._spec is not None
        value = BoundaryValue(self._spec, self._buffers.take_tensors())
        value.require_grad()
        return value


@final
class BackwardRecv:
    """A posted receive of the gradients of a stage's output."""

    def __init__(self, link: Link, microbatch: int, specs: Sequence[TensorSpec]) -> None:
        self._buffers = None
        if specs:
            tags = _PACKED_GRADIENTS, _LARGE_GRADIENT
            self._buffers = _RecvBuffers(link, microbatch, tags, len(specs), specs)

    @without_torch_function
    def wait(self) -> list[Tensor | None]:
        """Wait for the gradients; None where the next stage did not use a tensor."""
        if self._buffers is None:
            return []
        self._buffers.wait()
        is_missing = self._buffers.message.header.tolist()
        grads = self._buffers.take_tensors()
        return [None if missing else grad for grad, missing in zip(grads, is_missing, strict=True)]
