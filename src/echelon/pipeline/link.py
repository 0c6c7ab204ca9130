"""Values and gradients across one cut of the model, between the ranks on its two sides.

::

    values:     header ─ [form] ─ tensor ─ tensor ...        stage s ──> stage s + 1
    gradients:  which there are ─ tensor ─ tensor ...        stage s <── stage s + 1

The header is one number: 0 if the form is that of the same microbatch in the last step, else the
length of the new form. A receiver that knows a form posts memory for the tensors at once, with the
header; should the form have changed, the sender fills that memory with what is dropped, and then
sends the new one. Gradients have the dtypes and shapes of the tensors they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from echelon.pipeline.boundary import Form, TensorForm
from echelon.pipeline.stage import Output
from echelon.world.group import Group
from echelon.world.work import Work

__all__ = ["Arrival", "GradientArrival", "Link", "Sending"]

_HEADER, _FORM, _TENSOR, _MASK, _GRADIENT, _KINDS = range(6)


@final
class Sending:
    """Messages under way, and the memory they are read from."""

    def __init__(self, works: list[Work], memory: list[Tensor]) -> None:
        self._works, self._memory = works, memory

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return all(work.done() for work in self._works)

    def wait(self) -> None:
        """Return when the memory may be used again, and let go of it."""
        for work in self._works:
            work.wait()
        self._works, self._memory = [], []


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
        self._known: dict[tuple[bool, int], tuple[bytes, Form]] = {}  # by training and microbatch

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

    def send(self, microbatch: int, output: Output, *, training: bool) -> Sending:
        """Send what a stage gave to the next one."""
        data = output.form.to_bytes()
        key = training, microbatch
        known = self._known.get(key)
        device = self._group.device
        works: list[Work] = []
        memory: list[Tensor] = []

        def message(kind: int, tensor: Tensor) -> None:
            memory.append(tensor)
            works.extend(self._send(microbatch, kind, tensor))

        if known is not None and known[0] == data:
            message(_HEADER, torch.zeros(1, dtype=torch.int64, device=device))
        else:
            message(_HEADER, torch.tensor([len(data)], device=device))
            for form in () if known is None else known[1].tensors:
                message(_TENSOR, torch.zeros(form.shape, dtype=form.dtype, device=device))
            raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            message(_FORM, raw.to(device))
            self._known[key] = data, output.form
        for tensor in output.tensors:
            message(_TENSOR, tensor.contiguous())
        return Sending(works, memory)

    def expect(self, microbatch: int, *, training: bool) -> Arrival:
        """Make ready for what the stage before sends."""
        return Arrival(self, microbatch, training)

    def send_gradients(
        self, microbatch: int, forms: Sequence[TensorForm], grads: Sequence[Tensor | None]
    ) -> Sending:
        """Send gradients of the inputs of a stage back; None where a tensor was not used."""
        if not forms:
            return Sending([], [])
        device = self._group.device
        mask = torch.tensor([grad is not None for grad in grads], dtype=torch.uint8, device=device)
        memory = [mask]
        works = self._send(microbatch, _MASK, mask)
        for form, grad in zip(forms, grads, strict=True):
            filled = torch.zeros(form.shape, dtype=form.dtype, device=device)
            memory.append(filled if grad is None else grad.contiguous())
            works += self._send(microbatch, _GRADIENT, memory[-1])
        return Sending(works, memory)

    def expect_gradients(self, microbatch: int, forms: Sequence[TensorForm]) -> GradientArrival:
        """Make ready for the gradients of a value that was sent."""
        return GradientArrival(self, microbatch, forms)


@final
class Arrival:
    """A value on its way here."""

    def __init__(self, link: Link, microbatch: int, training: bool) -> None:
        self._link, self._microbatch = link, microbatch
        self._key = training, microbatch
        device = link._group.device
        self._header = torch.empty(1, dtype=torch.int64, device=device)
        self._works = link._recv(microbatch, _HEADER, self._header)
        known = link._known.get(self._key)
        self._form = None if known is None else known[1]
        self._tensors = self._post(self._form)

    def _post(self, form: Form | None) -> list[Tensor]:
        device = self._link._group.device
        tensors = [one.empty(device) for one in (() if form is None else form.tensors)]
        for tensor in tensors:
            self._works += self._link._recv(self._microbatch, _TENSOR, tensor)
        return tensors

    def _wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def take(self) -> tuple[Form, list[Tensor]]:
        """Wait for it; its tensors are leaves that need a gradient where those sent did."""
        self._wait()
        length = int(self._header.item())
        if length:
            device = self._link._group.device
            raw = torch.empty(length, dtype=torch.uint8, device=device)
            self._works = self._link._recv(self._microbatch, _FORM, raw)
            self._wait()
            data = raw.cpu().numpy().tobytes()
            self._form = Form.from_bytes(data)
            self._link._known[self._key] = data, self._form
            self._tensors = self._post(self._form)
            self._wait()
        assert self._form is not None
        for one, tensor in zip(self._form.tensors, self._tensors, strict=True):
            tensor.requires_grad_(one.requires_grad)
        tensors, self._tensors = self._tensors, []
        return self._form, tensors


@final
class GradientArrival:
    """Gradients on their way back."""

    def __init__(self, link: Link, microbatch: int, forms: Sequence[TensorForm]) -> None:
        device = link._group.device
        self._mask = torch.zeros(len(forms), dtype=torch.uint8, device=device)
        self._works = link._recv(microbatch, _MASK, self._mask)
        self._grads = [form.empty(device) for form in forms]
        for grad in self._grads:
            self._works += link._recv(microbatch, _GRADIENT, grad)

    def take(self) -> list[Tensor | None]:
        """Wait for them; None where a tensor was not used."""
        for work in self._works:
            work.wait()
        grads, self._grads, self._works = self._grads, [], []
        return [
            grad if there else None for grad, there in zip(grads, self._mask.tolist(), strict=True)
        ]
