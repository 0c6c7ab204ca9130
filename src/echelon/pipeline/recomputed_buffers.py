"""Buffers of a stage that runs a second time in backward: as they were before its first forward.

A forward may write buffers: running statistics of ``BatchNorm``, the vectors of ``spectral_norm``.
The second forward of a microbatch must compute what the first one did, and leave no trace::

    forward    copy buffers to ``first``              the module writes its buffers
    backward   ``first`` takes their place in the module, the forward runs, they come back

Law: values, gradients and buffers after a step are those of a stage that runs each forward once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

# Fused kernels write running statistics, one number for each channel, and torch does not count
# that as a change of the tensor. Larger buffers have changed only if torch has counted it.
_UNCOUNTED_NUMEL = 1 << 16


@final
@dataclass(frozen=True, slots=True)
class _First:
    """A buffer of a module before a forward: the tensor, its version, and a copy of its values."""

    buffer: Tensor
    version: int
    values: Tensor

    def is_current(self, now: Tensor | None) -> bool:
        """Whether ``now`` is this tensor, with these values."""
        return (
            now is self.buffer
            and self.buffer._version == self.version
            and self.buffer.numel() > _UNCOUNTED_NUMEL
        )


_Slot = tuple[nn.Module, str]


@final
class RecomputedBuffers:
    """The buffers of ``module``, whose forwards run a second time.

    A large buffer that no forward writes is copied once, for all microbatches.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: dict[_Slot, _First] = {}

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What surrounds a forward and its second run, for ``torch.utils.checkpoint``."""
        self._known = self._copied()
        if not self._known:
            return nullcontext(), nullcontext()
        return nullcontext(), _Exchanged(self._known)

    def _copied(self) -> dict[_Slot, _First]:
        copies: dict[int, _First] = {}  # by id of the buffer, which several modules may have
        firsts: dict[_Slot, _First] = {}
        for module in self._module.modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                known = self._known.get((module, name)) or copies.get(id(buffer))
                if known is None or not known.is_current(buffer):
                    known = copies.get(id(buffer)) or _First(
                        buffer, buffer._version, buffer.detach().clone()
                    )
                copies[id(buffer)] = firsts[module, name] = known
        return firsts


@final
class _Exchanged(AbstractContextManager[None]):
    """A block in which modules have the first values of their buffers instead of the current ones.

    A large buffer that has not changed stays in its place. What the second forward writes is lost.
    """

    def __init__(self, firsts: dict[_Slot, _First]) -> None:
        self._firsts = firsts
        self._current: dict[_Slot, Tensor | None] = {}

    def __enter__(self) -> None:
        copies: dict[int, Tensor] = {}  # by id of the first values, which several modules may have
        for (module, name), first in self._firsts.items():
            self._current[module, name] = current = module._buffers.get(name)
            if not first.is_current(current):
                values = first.values
                module._buffers[name] = copies.setdefault(id(values), values.clone())

    def __exit__(self, *error: object) -> None:
        for (module, name), buffer in self._current.items():
            module._buffers[name] = buffer
        self._current = {}
