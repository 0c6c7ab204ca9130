"""The sockets on which any process listens, as the kernel tells it."""

from __future__ import annotations

import ipaddress
import os
import sys
from contextlib import suppress
from pathlib import Path

from echelon.process.listeners import Listener

__all__ = ["listeners_of"]

_LISTEN = "0A"  # the state of a socket in /proc/net/tcp


def listeners_of(process: int) -> set[Listener]:
    """The sockets on which a process listens; empty if it has ended."""
    root = Path("/proc") / str(process)
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
    address = ipaddress.ip_address(packed)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return Listener(address, int(port, 16))
