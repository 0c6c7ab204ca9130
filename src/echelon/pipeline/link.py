"""Point-to-point messages between the two ranks on the sides of a stage boundary.

::

    forward:    header + small ─ [spec ─ small] ─ large ─ large ...    stage s ──> stage s + 1
    backward:   header + small ─ large ─ large ...                     stage s <── stage s + 1

Small tensors travel in one message with the header, a number: 0 if the value has the spec of the
same microbatch in the last step, else the length of the new spec. A receiver that knows the spec
posts the buffers of all messages at once. If the spec has changed, the sender first fills those
buffers with zeros that are dropped, and then sends the new spec and its tensors. Gradients have the
dtypes and shapes of the tensors they belong to; their header has one byte for each, 1 where there
is no gradient. That is a ``TaggedLink``; where messages have no tags, see ``ordered_link``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Protocol, TypeVar, final

import torch
from torch import Tensor

from echelon.comm.group import Group
from echelon.comm.object_bytes import checked_nbytes
from echelon.comm.torch_function import without_torch_function
from echelon.comm.work import Work
from echelon.pipeline.boundary import BoundarySpec, BoundaryValue, TensorSpec
from echelon.pipeline.packed_message import MessagePool, PackedMessage
from echelon.pipeline.step_specs import StepSpecs

LENGTH_NBYTES = 8  # of a header that is the length of a spec
_Value = TypeVar("_Value", covariant=True)


class MessageKind(IntEnum):
    """What a message of a microbatch over a boundary has; a part of its tag."""

    PACKED = 0
    SPEC = 1
    LARGE = 2
    PACKED_GRADIENTS = 3
    LARGE_GRADIENT = 4


_NUM_TAGS = len(MessageKind)
VALUE = MessageKind.PACKED, MessageKind.LARGE
GRADIENTS = MessageKind.PACKED_GRADIENTS, MessageKind.LARGE_GRADIENT


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


class Received(Protocol[_Value]):
    """A posted receive of the value or of the gradients of a microbatch."""

    def wait(self) -> _Value:
        """Wait for them. Called once."""


class Link(ABC):
    """This rank's side of a stage boundary, numbered by the stage before it. Abstract."""

    def __init__(self, group: Group, peer: int, boundary: int, num_microbatches: int) -> None:
        self._group, self._peer, self.boundary = group, peer, boundary
        # Messages of different boundaries have different tags.
        self._first_tag = boundary * num_microbatches * _NUM_TAGS
        self._send_pool, self.recv_pool = MessagePool(group.device), MessagePool(group.device)

    @abstractmethod
    def send_forward(self, microbatch: int, value: BoundaryValue, step: StepSpecs) -> PendingSend:
        """Send the output of a stage to the next one."""

    @abstractmethod
    def recv_forward(self, microbatch: int, step: StepSpecs) -> Received[BoundaryValue]:
        """Post the receive of the output of the previous stage."""

    @abstractmethod
    def send_backward(
        self,
        microbatch: int,
        specs: Sequence[TensorSpec],
        grads: Sequence[Tensor | None],
        step: StepSpecs,
    ) -> PendingSend:
        """Send the gradients of a stage's inputs back; None where an input was not used."""

    @abstractmethod
    def recv_backward(
        self, microbatch: int, specs: Sequence[TensorSpec], step: StepSpecs
    ) -> Received[list[Tensor | None]]:
        """Post the receive of the gradients of a value that was sent."""

    @final
    def isend(self, microbatch: int, kind: MessageKind, tensor: Tensor) -> list[Work]:
        """Start to send a message, if it has any elements."""
        if not tensor.numel():
            return []
        tag = self._first_tag + microbatch * _NUM_TAGS + kind
        return [self._group.isend(tensor, self._peer, tag)]

    @final
    def irecv(self, microbatch: int, kind: MessageKind, tensor: Tensor) -> list[Work]:
        """Start to receive a message, if it has any elements."""
        if not tensor.numel():
            return []
        tag = self._first_tag + microbatch * _NUM_TAGS + kind
        return [self._group.irecv(tensor, self._peer, tag)]

    @final
    def receive_spec(self, microbatch: int, length: int) -> BoundarySpec:
        """Receive the spec of a value, which has so many bytes."""
        sender = self._group.ranks[self._peer]
        nbytes = checked_nbytes(length, sender)
        data = torch.empty(nbytes, dtype=torch.uint8, device=self._group.device)
        for work in self.irecv(microbatch, MessageKind.SPEC, data):
            work.wait()
        return BoundarySpec.from_bytes(data.cpu().numpy().tobytes(), sender)

    @final
    def _packed(
        self, header_nbytes: int, specs: tuple[TensorSpec, ...], tensors: Iterable[Tensor]
    ) -> tuple[PackedMessage, list[Tensor]]:
        """A message with the small ones of some tensors, and the large ones."""
        message = self._send_pool.acquire(header_nbytes, specs)
        large = []
        for view, tensor in zip(message.views, tensors, strict=True):
            if view is None:
                large.append(tensor.contiguous())
            else:
                view.copy_(tensor)
        return message, large

    @final
    def _isend_packed(
        self,
        microbatch: int,
        kinds: tuple[MessageKind, MessageKind],
        message: PackedMessage,
        large: list[Tensor],
    ) -> tuple[list[Work], list[Tensor]]:
        """Start to send a message and the large tensors behind it; all that, and its memory."""
        what = "outputs of" if kinds == VALUE else "gradients for"
        message.about = f"{what} stage {self.boundary}, microbatch {microbatch}"
        works = self.isend(microbatch, kinds[0], message.buffer)
        for tensor in large:
            works += self.isend(microbatch, kinds[1], tensor)
        return works, [message.buffer, *large]

    @final
    def _pending(
        self, works: list[Work], memory: list[Tensor], message: PackedMessage
    ) -> PendingSend:
        def on_done() -> None:
            self._send_pool.release(message)

        return PendingSend(works, memory, is_poll_cheap=self._group.shares_memory, on_done=on_done)


@final
class TaggedLink(Link):
    """A link whose messages have tags, so that a value may have another spec at any time."""

    def __init__(self, group: Group, peer: int, boundary: int, num_microbatches: int) -> None:
        super().__init__(group, peer, boundary, num_microbatches)
        self.last_specs: dict[tuple[bool, int], BoundarySpec] = {}  # by training and microbatch

    @without_torch_function
    def send_forward(self, microbatch: int, value: BoundaryValue, step: StepSpecs) -> PendingSend:
        """Send the output of a stage to the next one."""
        works: list[Work] = []
        memory: list[Tensor] = []
        last_spec = self.last_specs.get((step.training, microbatch))
        if last_spec is None or not last_spec.is_identical(value.spec):
            expected = () if last_spec is None else last_spec.tensors
            works, memory = self._send_spec(microbatch, value.spec, expected)
            self.last_specs[step.training, microbatch] = value.spec
        message, large = self._packed(LENGTH_NBYTES, value.spec.tensors, value.tensors)
        sent, sent_memory = self._isend_packed(microbatch, VALUE, message, large)
        return self._pending(works + sent, memory + sent_memory, message)

    def _send_spec(
        self, microbatch: int, spec: BoundarySpec, expected: tuple[TensorSpec, ...]
    ) -> tuple[list[Work], list[Tensor]]:
        """Fill the buffers that the receiver posted for the last spec, and then send a new one.

        Returns all that, and its memory.
        """
        device = self._group.device
        works: list[Work] = []
        memory: list[Tensor] = []

        def isend(kind: MessageKind, tensor: Tensor) -> None:
            memory.append(tensor)
            works.extend(self.isend(microbatch, kind, tensor))

        data = spec.to_bytes()
        message = PackedMessage(LENGTH_NBYTES, expected, device)
        message.about = f"how many bytes the spec of outputs of stage {self.boundary} has"
        message.length.fill_(len(data))
        isend(MessageKind.PACKED, message.buffer)
        for large in message.large_specs:
            isend(MessageKind.LARGE, torch.zeros(large.shape, dtype=large.dtype, device=device))
        isend(MessageKind.SPEC, torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device))
        return works, memory

    @without_torch_function
    def recv_forward(self, microbatch: int, step: StepSpecs) -> ForwardRecv:
        """Post the receive of the output of the previous stage."""
        return ForwardRecv(self, microbatch, step.training)

    @without_torch_function
    def send_backward(
        self,
        microbatch: int,
        specs: Sequence[TensorSpec],
        grads: Sequence[Tensor | None],
        step: StepSpecs,
    ) -> PendingSend:
        """Send the gradients of a stage's inputs back; None where an input was not used."""
        if not specs:
            return PendingSend([], [])
        unused = [i for i, grad in enumerate(grads) if grad is None]
        filled = (
            spec.empty(self._group.device).zero_() if grad is None else grad
            for spec, grad in zip(specs, grads, strict=True)
        )
        message, large = self._packed(len(specs), tuple(specs), filled)
        for i in unused:
            message.header[i] = 1
        works, memory = self._isend_packed(microbatch, GRADIENTS, message, large)
        if unused:  # the pool has messages with an empty header only
            return PendingSend(works, memory, is_poll_cheap=self._group.shares_memory)
        return self._pending(works, memory, message)

    @without_torch_function
    def recv_backward(
        self, microbatch: int, specs: Sequence[TensorSpec], step: StepSpecs
    ) -> BackwardRecv:
        """Post the receive of the gradients of a value that was sent."""
        return BackwardRecv(self, microbatch, specs)


@final
class RecvBuffers:
    """A message and its large tensors while they are received."""

    def __init__(
        self,
        link: Link,
        microbatch: int,
        kinds: tuple[MessageKind, MessageKind],
        header_nbytes: int,
        specs: Sequence[TensorSpec],
    ) -> None:
        self._pool = link.recv_pool
        self.message = self._pool.acquire(header_nbytes, tuple(specs))
        self._works = link.irecv(microbatch, kinds[0], self.message.buffer)
        device = self.message.buffer.device
        self._large = [spec.empty(device) for spec in self.message.large_specs]
        for tensor in self._large:
            self._works += link.irecv(microbatch, kinds[1], tensor)

    def wait(self) -> None:
        """Wait for all of them."""
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

    def __init__(self, link: TaggedLink, microbatch: int, training: bool) -> None:
        self._link, self._microbatch = link, microbatch
        self._key = training, microbatch
        self._spec = link.last_specs.get(self._key)
        self._buffers = self._post()

    def _post(self) -> RecvBuffers:
        specs = () if self._spec is None else self._spec.tensors
        return RecvBuffers(self._link, self._microbatch, VALUE, LENGTH_NBYTES, specs)

    @without_torch_function
    def wait(self) -> BoundaryValue:
        """Wait for the input; its tensors are leaves that need a gradient where those sent did."""
        self._buffers.wait()
        length = int(self._buffers.message.length.item())
        if length:
            self._spec = self._link.receive_spec(self._microbatch, length)
            self._link.last_specs[self._key] = self._spec
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
            self._buffers = RecvBuffers(link, microbatch, GRADIENTS, len(specs), specs)

    @without_torch_function
    def wait(self) -> list[Tensor | None]:
        """Wait for the gradients; None where the next stage did not use a tensor."""
        if self._buffers is None:
            return []
        self._buffers.wait()
        is_missing = self._buffers.message.header.tolist()
        grads = self._buffers.take_tensors()
        return [None if missing else grad for grad, missing in zip(grads, is_missing, strict=True)]
