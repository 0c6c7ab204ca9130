"""The memory in which the unsharded gradients of one storage travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class GradientBuffer(NamedTuple):
    """The memory in which the gradients of one storage travel, 1D.

    ``views`` has for each parameter a view in its shape; or, by rows, a list of views of its
    pieces, in order, with a dim for the ranks if a piece is that of several.
    """

    memory: Tensor
    views: Sequence[Tensor | list[Tensor]]

    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy unsharded gradients in; None counts as zero."""
        targets, sources = [], []
        for view, gradient in zip(self.views, gradients, strict=True):
            if gradient is None:
                for piece in view if isinstance(view, list) else [view]:
                    piece.zero_()
            elif isinstance(view, list):
                targets += view
                sources += _pieces(gradient, view)
            else:
                targets.append(view)
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)


def _pieces(gradient: Tensor, views: list[Tensor]) -> list[Tensor]:
    """Views of the rows of a gradient, with the shapes of ``views``; none if it has no rows."""
    if len(views) < 2:  # all rows lie together, or there are none
        return [gradient.view(view.shape) for view in views]
    rows = gradient if gradient.dim() else gradient.view(1)
    row = rows[0].numel()
    pieces = rows.split([view.numel() // row for view in views])
    return [piece.view(view.shape) for piece, view in zip(pieces, views, strict=True)]
