"""The memory in which the unsharded gradients of one storage travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class GradientBuffer(NamedTuple):
    """The memory in which the gradients of one storage travel, 1D.

    ``views`` has one view for each parameter, or by rows one for each parameter and rank.
    """

    memory: Tensor
    views: list[list[Tensor]]

    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy unsharded gradients in; None counts as zero."""
        targets, sources = [], []
        for views, gradient in zip(self.views, gradients, strict=True):
            if gradient is None:
                torch._foreach_zero_(views)
            elif not gradient.numel():
                continue  # rows without elements belong to no rank
            elif len(views) == 1:
                targets.append(views[0])
                sources.append(gradient)
            else:
                rows = gradient if gradient.dim() else gradient.view(1)
                targets += views
                sources += rows.split([view.shape[0] for view in views])
        if targets:
            torch._foreach_copy_(targets, sources)
