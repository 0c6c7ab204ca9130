"""Counts the collectives of one process, and their bytes.

The size of a collective is that of its largest tensor: the input of a reduce-scatter, the output of
an all-gather. echelon's events count in this way, and PyTorch's collectives are counted alike.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import echelon as ec

__all__ = ["Traffic"]


class Traffic(TorchDispatchMode):
    """Counts while its block runs.

    PyTorch sends the collectives of its own backends through its dispatcher, where a mode sees
    them, C++ ones too. Groups of echelon emit events, also those that PyTorch communicates on.

    Attributes:
        calls: collectives.
        nbytes: total size of these collectives.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.calls = self.nbytes = 0
        self._rank, self._size = rank, size
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(ec.events.listen(self._hear))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def _hear(self, event: ec.events.Event) -> None:
        if event.name == "collective.issue" and event.facts["rank"] == self._rank:
            # This event alone tells the size of a part.
            parts = self._size if event.facts["op"] == "all_gather_single" else 1
            self._count(parts * event.facts["nbytes"])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            # The whole tensor, or its parts, is the largest argument.
            self._count(max(_nbytes(argument) for argument in args))
        return func(*args, **(kwargs or {}))

    def _count(self, nbytes: int) -> None:
        self.calls += 1
        self.nbytes += nbytes


def _nbytes(argument: object) -> int:
    """Of all tensors in it."""
    return sum(one.nbytes for one in tree_leaves(argument) if isinstance(one, Tensor))
