"""The addresses on which this process listens, read from /proc, and lines that say so.

What is read is what was bound, whatever a library was asked for.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Listener", "announced", "listeners"]

_LISTEN = "0A"  # the state of a socket in /proc/net/tcp
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


def listeners(process: int | None = None) -> set[Listener]:
    """The sockets on which a process listens; empty where there is no /proc.

    Args:
        process: its number; None: this one.

    Example:
        >>> import socket
        >>> with socket.create_server(("127.0.0.1", 0)) as server:
        ...     Listener(ipaddress.ip_address("127.0.0.1"), server.getsockname()[1]) in listeners()
        True
    """
    root = Path("/proc") / ("self" if process is None else str(process))
    mine = set()
    with suppress(OSError):  # it ended
        for file in (root / "fd").iterdir():
            with suppress(OSError):  # it was closed while we looked
                mine.add(os.readlink(file))
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (root / "net" / table).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == _LISTEN and f"socket:[{columns[9]}]" in mine:
                    found.add(_listener(columns[1]))
    return found


def _listener(text: str) -> Listener:
    """``0100007F:1F90`` is 127.0.0.1:8080: words of four bytes in the order of this machine."""
    host, port = text.split(":")
    words = [bytes.fromhex(host[start : start + 8]) for start in range(0, len(host), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    address: Address = ipaddress.ip_address(packed)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return Listener(address, int(port, 16))


@contextmanager
def announced(rank: int, what: str, *, one_host: bool) -> Iterator[None]:
    """Say on standard error where this process listens after the block and did not before.

    On one host, only what other hosts can reach; on several, also what they cannot, because it
    should not be so.

    Args:
        what: listens, such as ``"the store"``.
        one_host: whether all ranks of the job are on this host.
    """
    before = listeners()
    yield
    for found in sorted(listeners() - before, key=str):
        if one_host and found.address.is_loopback:
            continue
        line = f"echelon: rank {rank}: {what} listens on {found}"
        if found.address.is_unspecified:
            line += (
                ": warning: that is every interface of this host, and nobody is asked for a "
                "password; let a firewall admit the hosts of the job alone"
            )
        elif found.address.is_loopback:
            line += ": warning: the other hosts of the job cannot reach it"
        print(line, file=sys.stderr, flush=True)
