"""Shared memory that no crash can leave behind.

A segment is a memfd: it has no name in ``/dev/shm``, peers open it through ``/proc/<pid>/fd``, and
the kernel frees it when the last process that maps it ends, for whatever reason.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import weakref
from typing import Self, final

import torch
from torch import Tensor

from echelon.comm.buffers import available_nbytes
from echelon.errors import SharedMemoryError, WorldError
from echelon.errors.message_text import printable
from echelon.process.memory_files import memory_error, open_memory

_PAGE = mmap.PAGESIZE
_NAME = "echelon"
_TOKEN = re.compile(r"[0-9]{1,10}:[0-9]{1,10}:[0-9]{1,18}")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
# The memory that must stay free for everyone else when a segment is made.
_RESERVE = 64 * 2**20


@final
class Segment:
    """A piece of memory that several processes map.

    Attributes:
        nbytes: the length, in whole pages.
        buffer: the bytes; tensors made by ``tensor`` keep it alive.
        token: tells other processes of this host how to open the segment, until ``unpublish``.
    """

    def __init__(self, fd: int, nbytes: int, *, populate: bool) -> None:
        self.nbytes = nbytes
        self._fd = fd
        self.buffer = _map(fd, nbytes, populate=populate)
        self.token = f"{os.getpid()}:{fd}:{nbytes}"

    @classmethod
    def create(cls, nbytes: int, *, what: str, reserve: bool) -> Self:
        """Make a segment of zeros; raise ``SharedMemoryError`` about ``what`` if memory is short.

        With ``reserve`` all pages are taken now, so that a lack of memory is an error here and not
        a crash later. Else pages are taken when they are first written.
        """
        nbytes = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        available = available_nbytes()
        if reserve and nbytes > available - _RESERVE:
            raise SharedMemoryError(what, nbytes, max(0, available - _RESERVE))
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            if reserve:
                os.posix_fallocate(fd, 0, nbytes)
            return cls(fd, nbytes, populate=reserve)
        except OSError as error:
            os.close(fd)
            raise memory_error(error, what, nbytes, available) from error

    @classmethod
    def open(cls, token: str, *, populate: bool = False) -> Self:
        """Map the segment that another process of this host has made."""
        if _TOKEN.fullmatch(token) is None:
            raise WorldError(f"{printable(repr(token[:80]))} is no shared memory of a rank")
        pid, fd, nbytes = (int(part) for part in token.split(":"))
        try:
            handle = open_memory(f"/proc/{pid}/fd/{fd}", _NAME)
        except OSError as error:
            raise WorldError(
                f"process {os.getpid()} cannot open the shared memory of process {pid} "
                f"({error.strerror or error}): the ranks must be processes of one user in one "
                "container; otherwise use backend='gloo'"
            ) from error
        if os.fstat(handle).st_size < nbytes:  # reading beyond its end would kill this process
            os.close(handle)
            raise WorldError(f"the shared memory of process {pid} is shorter than {nbytes} bytes")
        segment = cls(handle, nbytes, populate=populate)
        segment.unpublish()
        return segment

    def unpublish(self) -> None:
        """Close the file once all peers have mapped it; the memory lives while it is mapped."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def tensor(self, start: int, nbytes: int) -> Tensor:
        """The bytes ``[start, start + nbytes)`` as a uint8 tensor, 1D, without a copy."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        # The tensor outlives the inference mode of the caller, so it must be an ordinary one.
        with torch.inference_mode(False):
            return torch.frombuffer(self.buffer, dtype=torch.uint8, count=nbytes, offset=start)


def _map(fd: int, nbytes: int, *, populate: bool) -> memoryview:
    """Map a file, until nothing refers to its bytes any more.

    Python's ``mmap`` keeps a descriptor for each mapping. A rank maps each window of every peer, so
    some hundred windows would use up the 1024 descriptors that a process usually may have.
    """
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    content = (ctypes.c_char * nbytes).from_address(address)
    # Not at exit, because tensors may be used until the interpreter is gone.
    weakref.finalize(content, _libc.munmap, address, nbytes).atexit = False
    return memoryview(content).cast("B")
