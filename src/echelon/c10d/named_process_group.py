"""What c10d wants to know of a process group before it calls it: names, devices and its store.

[Note: a process group in Python] c10d dispatches its collectives to a C++ ``Backend`` that Python
cannot subclass (torch 2.13), but a creator may return a whole ``ProcessGroup``, which it can. C++
code (DDP's reducer, functional collectives) reaches such a group through trampolines, and
``torch.distributed`` calls it by name. So it takes the place of all backends of a process group and
cannot share one with NCCL, as in ``"cpu:echelon,cuda:nccl"``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from echelon.comm.group import Group
from echelon.errors import StateError, UnsupportedError

BACKEND = "echelon"
"""The name under which ``torch.distributed`` knows the backend."""


class _NoBackendError(UnsupportedError, RuntimeError):
    """There is no backend for a device; c10d asks for some and expects a ``RuntimeError``."""


class NamedProcessGroup(dist.ProcessGroup):
    """A process group of c10d that a subclass lets communicate.

    Args:
        group: of this library.
        store: of c10d, for the ranks of this group.
    """

    def __init__(self, group: Group, store: c10d.Store) -> None:
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]  # as trampolines need it
        self._group = group
        self._store = store
        self._name: str | None = None

    def getBackendName(self) -> str:
        """The name under which the backend is registered."""
        return BACKEND

    def getGroupName(self) -> str:
        """The name that c10d gave to this process group."""
        if self._name is None:
            raise StateError("this process group has no name yet; torch.distributed gives it one")
        return self._name

    def setGroupName(self, name: str) -> None:
        """Take the name that c10d gives."""
        self._name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    @property
    def _device_types(self) -> list[torch.device]:
        return [self._group.device]

    def _get_backend(  # type: ignore[override]
        self, device: torch.device
    ) -> NamedProcessGroup:
        """The backend for a device: this process group is its own."""
        if torch.device(device) != self._group.device:
            raise _NoBackendError(
                f"the backend {BACKEND!r} communicates tensors on {self._group.device}, not on "
                f"{device}: make another process group for those"
            )
        return self

    @property
    def supports_coalescing(self) -> bool:
        """Whether c10d may bracket calls to issue them as one; nothing is gained from it here."""
        return False

    def get_group_store(self) -> c10d.Store:
        """The store of the ranks of this process group."""
        return self._store
