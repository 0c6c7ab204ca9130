"""The memory in which the unsharded gradients of one storage travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class GradientBuffer(NamedTuple):
    """The memory in which the gradients of one storage travel, 1D.

    ``views`` has views for each parameter: one in its shape, or by rows those of its pieces, in
    order, with a dim for the ranks if a piece is that of several.
    """

    memory: Tensor
    views: list[list[Tensor]]

    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy unsharded gradients in; None counts as zero."""
        targets, sources = [], []
        for views, gradient in zip(self.views, gradients, strict=True):
            if not views:
                continue  # rows without elements belong to no rank
            if gradient is None:
                torch._foreach_zero_(views)
            elif len(views) == 1 and views[0].dim() == gradient.dim():
                targets.append(views[0])
                sources.append(gradient)
            else:
                rows = gradient if gradient.dim() else gradient.view(1)
                targets += views
                pieces = rows.split([view.shape.numel() // rows[0].numel() for view in views])
                sources += [p.view(v.shape) for p, v in zip(pieces, views, strict=True)]
        if targets:
            torch._foreach_copy_(targets, sources)
