"""Messages over a stage boundary where order alone says what they are, as over NCCL.

::

    a step whose values are known:       small ─ large ─ large ...
    a step whose values are not:         length ─ [spec ─] small ─ large ─ large ...
    gradients, in such a step:           unused + small ─ large ...

A receiver that does not know the spec waits for it *where it posts the receive*, and not where it
needs the value, so both sides of a boundary issue the same messages in the same order. Nobody waits
in a circle, because the lists of all ranks follow one global order of transfers. In a step whose
values are known (see ``step_specs``) the host reads nothing that has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from echelon.comm.streams import device_of
from echelon.comm.torch_function import without_torch_function
from echelon.comm.work import Work
from echelon.pipeline.boundary import BoundaryValue, TensorSpec
from echelon.pipeline.link import (
    GRADIENTS,
    VALUE,
    Link,
    MessageKind,
    PendingSend,
    RecvBuffers,
)
from echelon.pipeline.step_specs import StepSpecs


@final
class OrderedLink(Link):
    """A link whose messages match in the order in which both sides issue them."""

    def _numbers(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return device_of(self._group.device).numbers(values, dtype)

    @without_torch_function
    def send_forward(self, microbatch: int, value: BoundaryValue, step: StepSpecs) -> PendingSend:
        """Send the output of a stage to the next one."""
        works: list[Work] = []
        memory: list[Tensor] = []

        def isend(kind: MessageKind, tensor: Tensor) -> None:
            memory.append(tensor)
            works.extend(self.isend(microbatch, kind, tensor))

        key = self.boundary, microbatch
        if step.is_known:
            step.require_value(key, value.spec)
        else:
            data = b""
            last_spec = step.values.get(key)
            if last_spec is None or not last_spec.is_identical(value.spec):
                data = value.spec.to_bytes()
                step.note_value(key, value.spec)
            isend(MessageKind.SPEC, self._numbers([len(data)], torch.int64))
            if data:
                spec = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                isend(MessageKind.SPEC, spec.to(self._group.device))
        message, large = self._packed(0, value.spec.tensors, value.tensors)
        sent, sent_memory = self._isend_packed(microbatch, VALUE, message, large)
        return self._pending(works + sent, memory + sent_memory, message)

    @without_torch_function
    def recv_forward(self, microbatch: int, step: StepSpecs) -> OrderedForward:
        """Post the receive of the output of the previous stage, once its spec is known."""
        key = self.boundary, microbatch
        if not step.is_known:
            length = torch.empty(1, dtype=torch.int64, device=self._group.device)
            for work in self.irecv(microbatch, MessageKind.SPEC, length):
                work.wait()
            if nbytes := int(length.item()):
                step.note_value(key, self.receive_spec(microbatch, nbytes))
        return OrderedForward(self, microbatch, step)

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
        key, unused = (self.boundary, microbatch), tuple(grad is None for grad in grads)
        if step.is_known:
            step.require_unused(key, unused)
        else:
            step.note_unused(key, unused)
        used = tuple(s for s, is_unused in zip(specs, unused, strict=True) if not is_unused)
        first: list[Work] = []
        masks: list[Tensor] = []
        if not step.is_known:
            masks = [self._numbers(unused, torch.uint8)]
            first = self.isend(microbatch, MessageKind.SPEC, masks[0])
        message, large = self._packed(0, used, (grad for grad in grads if grad is not None))
        works, memory = self._isend_packed(microbatch, GRADIENTS, message, large)
        return self._pending(first + works, masks + memory, message)

    @without_torch_function
    def recv_backward(
        self, microbatch: int, specs: Sequence[TensorSpec], step: StepSpecs
    ) -> OrderedBackward:
        """Post the receive of the gradients of a value, once it is known which come back."""
        key = self.boundary, microbatch
        if specs and not step.is_known:
            mask = torch.empty(len(specs), dtype=torch.uint8, device=self._group.device)
            for work in self.irecv(microbatch, MessageKind.SPEC, mask):
                work.wait()
            step.note_unused(key, [bool(is_unused) for is_unused in mask.tolist()])
        return OrderedBackward(self, microbatch, specs, step.unused[key] if specs else ())


@final
class OrderedForward:
    """A posted receive of the input of a stage."""

    def __init__(self, link: OrderedLink, microbatch: int, step: StepSpecs) -> None:
        self._spec = step.values[link.boundary, microbatch]
        self._buffers = RecvBuffers(link, microbatch, VALUE, 0, self._spec.tensors)

    @without_torch_function
    def wait(self) -> BoundaryValue:
        """Wait for the input; its tensors are leaves that need a gradient where those sent did."""
        self._buffers.wait()
        value = BoundaryValue(self._spec, self._buffers.take_tensors())
        value.require_grad()
        return value


@final
class OrderedBackward:
    """A posted receive of the gradients of a stage's output."""

    def __init__(
        self,
        link: OrderedLink,
        microbatch: int,
        specs: Sequence[TensorSpec],
        unused: tuple[bool, ...],
    ) -> None:
        self._unused = unused
        used = [s for s, is_unused in zip(specs, unused, strict=True) if not is_unused]
        self._buffers = RecvBuffers(link, microbatch, GRADIENTS, 0, used)

    @without_torch_function
    def wait(self) -> list[Tensor | None]:
        """Wait for the gradients; None where the next stage did not use a tensor."""
        self._buffers.wait()
        grads = iter(self._buffers.take_tensors())
        return [None if is_unused else next(grads) for is_unused in self._unused]
