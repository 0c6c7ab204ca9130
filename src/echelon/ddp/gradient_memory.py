"""The memory of the gradients of a bucket, and whether somebody else holds some of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from echelon.modules.held_memory import count_references


@final
class GradientMemory:
    """Gradients in one tensor.

    Attributes:
        flat: the tensor, 1D.
        gradients: its first ``numel`` elements, in which the gradients lie.
        views: the gradients, in the shape of each parameter.
        flags: one element for each gradient, behind them; none where ``flat`` ends before.
        notices: what is behind the flags.
    """

    def __init__(
        self, flat: Tensor, numel: int, starts: Sequence[int], params: Sequence[nn.Parameter]
    ) -> None:
        self.flat, self.gradients = flat, flat[:numel]
        self.views = _views(self.gradients, starts, params)
        self._addresses = list(map(Tensor.data_ptr, self.views))
        self._starts, self._params = starts, params
        self.flags, self.notices = flat[numel:][: len(params)], flat[numel:][len(params) :]
        self._held_by_us = count_references(flat, self.views)

    def is_held(self) -> bool:
        """Whether somebody holds a gradient, or a view of one. No ``.grad`` may be one of them."""
        return count_references(self.flat, self.views) != self._held_by_us

    def is_left(self) -> bool:
        """Whether somebody keeps what was here of gradients that were given other memory.

        As in ``old = p.grad.data; p.grad.data = another``.
        """
        memory = self.flat.untyped_storage()._cdata
        elsewhere = sum(view.untyped_storage()._cdata != memory for view in self.views)
        return bool(count_references(self.flat, ())[0] != self._held_by_us[0] - elsewhere)

    @torch.no_grad()
    def bring_back(self, grads: Iterable[Tensor | None]) -> None:
        """Bring views back here of which somebody has replaced the memory (``grad.data = tensor``).

        Those that are one of ``grads``, which are ``.grad`` of the parameters, keep the values that
        they were given. Others are left to whoever has them, and new views take their places.
        """
        exchanged = self.exchanged()
        if not exchanged:
            return
        fresh = _views(self.gradients, self._starts, self._params)
        values = {slot: self.views[slot].clone() for slot in exchanged}  # maybe of other slots here
        for slot, grad in enumerate(grads):
            if slot in values and grad is self.views[slot]:
                grad.data = fresh[slot].copy_(values[slot])
            elif slot in values:
                self.views[slot] = fresh[slot]

    def exchanged(self) -> list[int]:
        """The slots of views of which somebody has replaced the memory."""
        # Runs once or twice in each backward: a loop that stays in C. Other strides need no test:
        # what is written through a view is read through it.
        addresses = list(map(Tensor.data_ptr, self.views))
        if addresses == self._addresses:
            return []
        pairs = zip(addresses, self._addresses, strict=True)
        return [slot for slot, (now, before) in enumerate(pairs) if now != before]


def _views(flat: Tensor, starts: Sequence[int], params: Sequence[nn.Parameter]) -> list[Tensor]:
    """The memory of ``flat`` for each parameter, in its shape and, where it is dense, its strides.

    None is a view for autograd, so that ``p.grad.detach_()`` works. Equal strides keep copies and
    optimizers on their fast paths (channels-last weights).
    """
    views = []
    for start, param in zip(starts, params, strict=True):
        dims = sorted(range(param.dim()), key=param.stride, reverse=True)
        if param.is_contiguous() or not param.detach().permute(dims).is_contiguous():
            views.append(flat[start : start + param.numel()].view(param.shape).detach())
        else:
            offset = flat.storage_offset() + start
            views.append(flat.as_strided(param.shape, param.stride(), offset).detach())
    return views
