"""A network of one test alone, in which there are no ports of other tests."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_FLAGS, _UP = 0x8914, 0x1  # SIOCSIFFLAGS, IFF_UP
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def own_network() -> Iterator[None]:
    """Let this thread, and the processes that it starts, have a loopback of their own."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.unshare(_NEW_NETWORK):
            pytest.skip(f"no network of its own: {os.strerror(ctypes.get_errno())}")
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
            yield
        finally:
            assert _libc.setns(before, _NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
    finally:
        os.close(before)
