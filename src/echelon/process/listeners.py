"""The addresses on which this process listens, and lines that say so.

What is read is what was bound, whatever a library was asked for.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from echelon.errors.message_text import say

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, order=True, slots=True)
class Listener:
    """A TCP socket that waits for connections.

    Attributes:
        address: of the interface; the unspecified address stands for all of them.
        port: where.
    """

    address: Address
    port: int

    def __str__(self) -> str:
        host = f"[{self.address}]" if self.address.version == 6 else str(self.address)
        return f"{host}:{self.port}"


def listeners() -> set[Listener]:
    """The sockets on which this process listens; empty where its files have no list.

    Example:
        >>> with socket.create_server(("127.0.0.1", 0)) as server:
        ...     Listener(ipaddress.ip_address("127.0.0.1"), server.getsockname()[1]) in listeners()
        True
    """
    return _listening(_sockets())


def _sockets() -> set[tuple[int, int]]:
    """The sockets of this process: descriptor, and number of the socket."""
    sockets = set()
    with suppress(FileNotFoundError):
        for name in os.listdir("/dev/fd"):
            with suppress(OSError):  # it was closed while we looked
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    sockets.add((int(name), status.st_ino))
    return sockets


def _listening(sockets: Iterable[tuple[int, int]]) -> set[Listener]:
    """Those that wait for connections."""
    listening = set()
    for fd, _ in sockets:
        with suppress(OSError):  # it was closed while we looked
            listening.add(_listener(fd))
    return {listener for listener in listening if listener is not None}


def _listener(fd: int) -> Listener | None:
    """Where a socket listens; None if it does not."""
    opened = socket.socket(fileno=fd)
    try:
        if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            host, port, *_ = opened.getsockname()
            address: Address = ipaddress.ip_address(host)
            if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
                address = address.ipv4_mapped
            return Listener(address, port)
        return None
    finally:
        opened.detach()  # it is not ours to close


@contextmanager
def announced(rank: int, what: str, *, one_host: bool) -> Iterator[None]:
    """Say on standard error where this process listens after the block and did not before.

    On one host, only what other hosts can reach; on several, also what they cannot, because it
    should not be so.

    Args:
        what: listens, such as ``"the store"``.
        one_host: whether all ranks of the job are on this host.
    """
    before = _sockets()
    yield
    for listener in sorted(_listening(_sockets() - before), key=str):
        if one_host and listener.address.is_loopback:
            continue
        line = f"echelon: rank {rank}: {what} listens on {listener}"
        if listener.address.is_unspecified:
            line += (
                ": warning: that is every interface of this host, and nobody is asked for a "
                "password; let a firewall admit the hosts of the job alone"
            )
        elif listener.address.is_loopback:
            line += ": warning: the other hosts of the job cannot reach it"
        say(line)
