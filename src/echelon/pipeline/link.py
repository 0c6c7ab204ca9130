"""Values and gradients across one cut of the model, between the ranks on its two sides.

::

    values:     head + small ─ [form ─ small] ─ large ─ large ...      stage s ──> stage s + 1
    gradients:  head + small ─ large ─ large ...                       stage s <── stage s + 1

Small tensors travel in one message with the head, a number: 0 if the form is that of the same
microbatch in the last step, else the length of the new form. A receiver that knows a form posts
memory for all of its messages at once; should the form have changed, the sender fills that memory
with what is dropped, and then sends the new form and its tensors. Gradients have the dtypes and
shapes of the tensors they belong to; their head has a bit for each that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from echelon.comm.group import Group
from echelon.comm.object_bytes import checked_nbytes
from echelon.comm.threads.randomness import draws_nothing
from echelon.comm.work import Work
from echelon.pipeline.boundary import BoundarySpec, TensorSpec
from echelon.pipeline.message import MessageCodec, StageMessage
from echelon.pipeline.stage import Output

_PACKET, _FORM, _TENSOR, _GRADIENTS, _GRADIENT, _KINDS = range(6)
_LENGTH = 8  # bytes of a head that is the length of a form


@final
class Sending:
    """Messages under way, and the memory they are read from.

    Args:
        is_cheap: whether a work tells for nothing that it is done; else it may take a thread.
        then: called when the memory may be used again.
    """

    def __init__(
        self,
        works: list[Work],
        memory: list[Tensor],
        *,
        is_cheap: bool = True,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self._works, self._memory, self._is_cheap, self._then = works, memory, is_cheap, then

    def done(self, *, ask: bool) -> bool:
        """Whether ``wait`` is known to return at once.

        Args:
            ask: also where that is not for nothing.
        """
        return (self._is_cheap or ask) and all(work.done() for work in self._works)

    def wait(self) -> None:
        """Return when the memory may be used again, and let go of it. Called once."""
        for work in self._works:
            work.wait()
        self._works, self._memory = [], []
        self._then()


@final
class Link:
    """One side of a cut.

    Args:
        group: of both ranks.
        peer: the rank on the other side.
        cut: its number, the same on both sides; messages of different cuts never meet.
        num_microbatches: of a step.
    """

    def __init__(self, group: Group, peer: int, cut: int, num_microbatches: int) -> None:
        self._group, self._peer = group, peer
        self._first = cut * num_microbatches
        self._known: dict[tuple[bool, int], BoundarySpec] = {}  # by training and microbatch
        self._going, self._coming = MessageCodec(group.device), MessageCodec(group.device)

    def _tag(self, microbatch: int, kind: int) -> int:
        return (self._first + microbatch) * _KINDS + kind

    def _send(self, microbatch: int, kind: int, tensor: Tensor) -> list[Work]:
        if not tensor.numel():
            return []
        return [self._group.isend(tensor, self._peer, self._tag(microbatch, kind))]

    def _recv(self, microbatch: int, kind: int, tensor: Tensor) -> list[Work]:
        if not tensor.numel():
            return []
        return [self._group.irecv(tensor, self._peer, self._tag(microbatch, kind))]

    @draws_nothing
    def send(self, microbatch: int, output: Output, *, training: bool) -> Sending:
        """Send what a stage gave to the next one."""
        works: list[Work] = []
        memory: list[Tensor] = []

        def message(kind: int, tensor: Tensor) -> None:
            memory.append(tensor)
            works.extend(self._send(microbatch, kind, tensor))

        known = self._known.get((training, microbatch))
        if known is None or not known.same(output.form):
            self._announce(output.form, () if known is None else known.tensors, message)
            self._known[training, microbatch] = output.form
        packet = self._going.take(_LENGTH, output.form.tensors)
        large = []
        for room, tensor in zip(packet.rooms, output.tensors, strict=True):
            if room is None:
                large.append(tensor)
            else:
                room.copy_(tensor)
        message(_PACKET, packet.bytes)
        for tensor in large:
            message(_TENSOR, tensor.contiguous())
        return self._under_way(works, memory, packet)

    def _announce(
        self,
        form: BoundarySpec,
        expected: tuple[TensorSpec, ...],
        message: Callable[[int, Tensor], None],
    ) -> None:
        """Fill what the receiver made ready for another form, and then send this one."""
        device = self._group.device
        data = form.to_bytes()
        packet = StageMessage(_LENGTH, expected, device)
        packet.number.fill_(len(data))
        message(_PACKET, packet.bytes)
        for one in packet.large:
            message(_TENSOR, torch.zeros(one.shape, dtype=one.dtype, device=device))
        message(_FORM, torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device))

    def _under_way(self, works: list[Work], memory: list[Tensor], packet: StageMessage) -> Sending:
        def then() -> None:
            self._going.give_back(packet)

        return Sending(works, memory, is_cheap=self._group.shares_memory, then=then)

    @draws_nothing
    def expect(self, microbatch: int, *, training: bool) -> Arrival:
        """Make ready for what the stage before sends."""
        return Arrival(self, microbatch, training)

    @draws_nothing
    def send_gradients(
        self, microbatch: int, forms: Sequence[TensorSpec], grads: Sequence[Tensor | None]
    ) -> Sending:
        """Send gradients of the inputs of a stage back; None where a tensor was not used."""
        if not forms:
            return Sending([], [])
        packet = self._going.take(len(forms), tuple(forms))
        memory = [packet.bytes]
        for index, (form, room, grad) in enumerate(zip(forms, packet.rooms, grads, strict=True)):
            if grad is None:
                packet.head[index] = 1
            if room is None:
                filled = form.empty(self._group.device).zero_() if grad is None else grad
                memory.append(filled.contiguous())
            elif grad is not None:
                room.copy_(grad)
        works = self._send(microbatch, _GRADIENTS, packet.bytes)
        for tensor in memory[1:]:
            works += self._send(microbatch, _GRADIENT, tensor)
        if any(grad is None for grad in grads):
            return Sending(works, memory, is_cheap=self._group.shares_memory)  # its head is used
        return self._under_way(works, memory, packet)

    @draws_nothing
    def expect_gradients(self, microbatch: int, forms: Sequence[TensorSpec]) -> GradientArrival:
        """Make ready for the gradients of a value that was sent."""
        return GradientArrival(self, microbatch, forms)


@final
class _ReceiveBuffers:
    """A packet and the tensors that travel beside it, being received."""

    def __init__(
        self,
        link: Link,
        microbatch: int,
        kinds: tuple[int, int],
        head: int,
        forms: Sequence[TensorSpec],
    ) -> None:
        self._packets = link._coming
        self.packet = self._packets.take(head, tuple(forms))
        self._works = link._recv(microbatch, kinds[0], self.packet.bytes)
        self._large = [form.empty(self.packet.bytes.device) for form in self.packet.large]
        for tensor in self._large:
            self._works += link._recv(microbatch, kinds[1], tensor)

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def tensors(self) -> list[Tensor]:
        """All of them, none of which shares memory with another. Called once, at the end."""
        large, self._large = iter(self._large), []
        found = [next(large) if room is None else room.clone() for room in self.packet.rooms]
        self._packets.give_back(self.packet)
        return found


@final
class Arrival:
    """A value on its way here."""

    def __init__(self, link: Link, microbatch: int, training: bool) -> None:
        self._link, self._microbatch = link, microbatch
        self._key = training, microbatch
        self._form = link._known.get(self._key)
        self._memory = self._post()

    def _post(self) -> _ReceiveBuffers:
        forms = () if self._form is None else self._form.tensors
        return _ReceiveBuffers(self._link, self._microbatch, (_PACKET, _TENSOR), _LENGTH, forms)

    @draws_nothing
    def take(self) -> tuple[BoundarySpec, list[Tensor]]:
        """Wait for it; its tensors are leaves that need a gradient where those sent did."""
        self._memory.wait()
        length = int(self._memory.packet.number.item())
        if length:
            group = self._link._group
            sender = group.ranks[self._link._peer]
            nbytes = checked_nbytes(length, sender)
            raw = torch.empty(nbytes, dtype=torch.uint8, device=group.device)
            for work in self._link._recv(self._microbatch, _FORM, raw):
                work.wait()
            self._form = BoundarySpec.from_bytes(raw.cpu().numpy().tobytes(), sender)
            self._link._known[self._key] = self._form
            self._memory = self._post()
            self._memory.wait()
        assert self._form is not None
        tensors = self._memory.tensors()
        for one, tensor in zip(self._form.tensors, tensors, strict=True):
            if one.requires_grad:
                tensor.requires_grad_()
        return self._form, tensors


@final
class GradientArrival:
    """Gradients on their way back."""

    def __init__(self, link: Link, microbatch: int, forms: Sequence[TensorSpec]) -> None:
        self._memory = None
        if forms:
            kinds = _GRADIENTS, _GRADIENT
            self._memory = _ReceiveBuffers(link, microbatch, kinds, len(forms), forms)

    @draws_nothing
    def take(self) -> list[Tensor | None]:
        """Wait for them; None where a tensor was not used."""
        if self._memory is None:
            return []
        self._memory.wait()
        missing = self._memory.packet.head.tolist()
        grads = self._memory.tensors()
        return [None if gone else grad for grad, gone in zip(grads, missing, strict=True)]
