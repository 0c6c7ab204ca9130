"""Read the ordinary memory of other processes of this host, with Linux's ``process_vm_readv``.

The kernel copies from the peer's pages straight to ours: data that lies in no window crosses once,
without a copy into shared memory and another one out of it.
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
    """Let processes of the same user read this one, where Yama allows that to parents only."""
    with suppress(FileNotFoundError):  # no Yama in this kernel: nothing to ask for
        if Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip() == "1":
            _libc.prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)


@final
class PeerMemory:
    """The memory of the ranks of one group.

    Args:
        pids: of all ranks; -1 for this one.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = tuple(pids)
        self._probe = ctypes.c_uint64(_MAGIC)
        self.probe_address = ctypes.addressof(self._probe)

    def can_read(self, addresses: Sequence[int]) -> bool:
        """Whether the ``probe_address`` of every other rank can be read from here.

        A kernel, a container or a security module may refuse it.
        """
        found = ctypes.c_uint64()
        here = ctypes.addressof(found)
        for rank, pid in enumerate(self._pids):
            if pid == -1:
                continue
            found.value = 0
            if self._copy(rank, addresses[rank], here, 8) != 8 or found.value != _MAGIC:
                return False
        return True

    def read(self, rank: int, address: int, output: Tensor) -> bool:
        """Fill ``output`` with the bytes of ``rank`` from ``address`` on; False if they are gone.

        Args:
            rank: another rank of the group.
            address: in that process.
            output: contiguous, on the CPU.
        """
        here, left = output.data_ptr(), output.nbytes
        while left:
            done = self._copy(rank, address, here, left)
            if done <= 0:
                return False
            address, here, left = address + done, here + done, left - done
        return True

    def _copy(self, rank: int, address: int, here: int, nbytes: int) -> int:
        """One call; the number of bytes that it copied, or -1."""
        to, of = _Span(here, nbytes), _Span(address, nbytes)
        return int(_read(self._pids[rank], to, 1, of, 1, 0))
