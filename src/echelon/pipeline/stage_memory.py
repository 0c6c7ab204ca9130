"""``StageMemoryStats``: the bytes that a rank holds for its stages, by category."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class _HasMemoryStats(Protocol):
    """A stage in a wrapper that weighs what it holds, such as ``FSDP``."""

    def memory_stats(self) -> _ByCategory:
        """The bytes that it holds."""


class _ByCategory(Protocol):
    def by_category(self) -> Mapping[str, int]:
        """The current bytes, by name."""


@final
@dataclass(frozen=True, slots=True)
class StageMemoryStats:
    """The bytes that this rank holds for its stages between steps; activations are not in them.

    Attributes:
        stages: by the number of a stage, what its wrapper says, or its ``parameters``, ``buffers``
            and ``gradients``.
        optimizer: the state of the optimizer, or None if none was given.
    """

    stages: Mapping[int, Mapping[str, int]]
    optimizer: int | None

    @property
    def total(self) -> int:
        """All of them together."""
        return sum(self.by_category().values())

    def by_category(self) -> dict[str, int]:
        """The bytes of all stages by name; ``optimizer`` only where it is known."""
        nbytes = Counter[str]()
        for of_stage in self.stages.values():
            nbytes.update(of_stage)
        return {**nbytes} if self.optimizer is None else {**nbytes, "optimizer": self.optimizer}


def memory_of_stages(
    stages: Mapping[int, nn.Module], optimizer: torch.optim.Optimizer | None
) -> StageMemoryStats:
    """The bytes of ``stages``. A tensor that several of them share counts in the first."""
    seen: set[Tensor] = set()

    def nbytes(tensors: list[Tensor]) -> int:
        new = [tensor for tensor in tensors if tensor not in seen]
        seen.update(new)
        return sum(tensor.nbytes for tensor in new)

    by_stage: dict[int, Mapping[str, int]] = {}
    for index, stage in stages.items():
        if isinstance(stage, _HasMemoryStats):
            by_stage[index] = stage.memory_stats().by_category()
            continue
        params = [param for param in stage.parameters() if param not in seen]
        by_stage[index] = {
            "parameters": nbytes(list(params)),
            "buffers": nbytes(list(stage.buffers())),
            "gradients": nbytes([param.grad for param in params if param.grad is not None]),
        }
    if optimizer is None:
        return StageMemoryStats(by_stage, None)
    values = [value for state in optimizer.state.values() for value in state.values()]
    held = [value for value in values if isinstance(value, Tensor)]
    return StageMemoryStats(by_stage, sum(value.nbytes for value in held))
