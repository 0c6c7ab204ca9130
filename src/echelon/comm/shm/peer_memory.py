"""The ordinary memory of other processes of this host, read with ``process_vm_readv`` of Linux.

The kernel copies from the pages of the peer to those of this process, so data outside of windows is
copied once, and not to shared memory and out of it again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from torch import Tensor

_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)
_MAGIC = 0x6563_6865_6C6F_6E21


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)  # releases the GIL while it copies
_spans = ctypes.POINTER(_Span)
_read = _libc.process_vm_readv
_read.restype = ctypes.c_ssize_t
_read.argtypes = (
    ctypes.c_int,
    _spans,
    ctypes.c_ulong,
    _spans,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


def admit_readers() -> None:
    """Let processes of the same user read this one, where Yama allows only parents to do so."""
    with suppress(FileNotFoundError):  # this kernel has no Yama, so no permission is needed
        if Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip() == "1":
            _libc.prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)


@final
class PeerMemory:
    """The memory of the ranks of one group; ``pids`` has -1 for this rank."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = tuple(pids)
        self._probe = ctypes.c_uint64(_MAGIC)
        self.probe_address = ctypes.addressof(self._probe)

    def can_read(self, addresses: Sequence[int]) -> bool:
        """Whether this process can read the ``probe_address`` of every other rank.

        The kernel, a container or a security module may forbid it.
        """
        value = ctypes.c_uint64()
        here = ctypes.addressof(value)
        for rank, pid in enumerate(self._pids):
            if pid == -1:
                continue
            value.value = 0
            if self._copy(rank, addresses[rank], here, 8) != 8 or value.value != _MAGIC:
                return False
        return True

    def read(self, rank: int, address: int, output: Tensor) -> bool:
        """Fill ``output`` with bytes of another rank from ``address`` in its process on.

        ``output`` is contiguous and on the CPU. Return False if the memory was freed.
        """
        here, left = output.data_ptr(), output.nbytes
        while left:
            done = self._copy(rank, address, here, left)
            if done <= 0:
                return False
            address, here, left = address + done, here + done, left - done
        return True

    def _copy(self, rank: int, address: int, here: int, nbytes: int) -> int:
        """The number of bytes that one system call copied, or -1."""
        target, source = _Span(here, nbytes), _Span(address, nbytes)
        return int(_read(self._pids[rank], target, 1, source, 1, 0))
