"""Another user of the host, who attacks a job with all that such a user can do.

``python -m tests.regressions.stranger FOLDER HOW [PORT]`` imports what it needs as root, becomes
user 65534, and goes on until it is ended. What it got hold of it writes into ``FOLDER/spoils``, and
once it has reached what it attacks it makes ``FOLDER/reached``.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch._C import _distributed_c10d as c10d

from echelon.comm.torch_dist import proof
from tests.bomb import Bomb

NOBODY = 65534
# What follows a number that stands for a rank: nothing; or the head of a message of gloo, with the
# tag of the first one that is expected and a length that no memory holds.
KNOCKS = {
    "connect": b"",
    "length": struct.pack("<6Q", 48 + (1 << 60), 1, proof._NONCES, 0, 1 << 60, 0),
    "ready": struct.pack("<6Q", 48, 2, proof._NONCES, 0, 1 << 60, 0),
}
SHARED = ("echelon", "echelon store", "echelon flight recorder")  # names in /dev/shm that it takes
RED = "\x1b[2J\x1b[31m[bold red]pay here[/]\x07"


def become_nobody() -> None:
    """Give up all rights of root."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def listening() -> set[int]:
    """The ports of this host on which somebody listens, as everybody can read them."""
    rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return {int(row.split()[1].split(":")[1], 16) for row in rows if row.split()[3] == "0A"}


def keys(attempt: int = 0, size: int = 2) -> Iterator[str]:
    """Where ranks have ever written, and where an engine does, in the store of a job."""
    groups = ("world", "world.1", "world.2")
    for prefix in (f"echelon/{attempt}", f"echelon/{attempt}/{size}", "echelon", ""):
        for rank in range(size):
            yield from (
                f"{prefix}/{name}/{rank}" for name in ("facts", "notice", "failure", "closed")
            )
            for group in groups:
                for trial in ("", "0/", "1/", "2/"):
                    yield from (
                        f"{prefix}/group/{group}/{trial}{name}{rank}" for name in ("0/", "found/")
                    )
                    yield f"{prefix}/group/{group}/{trial}strangers"
        yield from (f"{prefix}/{name}" for name in ("difference", "secret", "num_here", "closed"))
        yield f"{prefix}/echelon/world {attempt}/segments"
        yield from (f"agent/1/{name}" for name in ("torchelastic/assigned_ranks/0", "role_info/0"))


def spoil_store(port: int, folder: Path) -> None:
    """Overwrite, delete and fill what is in the store behind ``port``, if there is one."""
    with suppress(RuntimeError):
        store = c10d.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False
        )
        bomb = pickle.dumps(Bomb(str(folder / "ran")))
        for key in keys():
            store.set(key, bomb)
            store.delete_key(key)
            store.set(key, bomb)
        (folder / "reached").touch()


def knock(port: int, more: bytes) -> list[socket.socket]:
    """Connections that say to an engine of gloo that they are a rank, and then ``more``.

    Empty if not all of them could be made.
    """
    words = [*(struct.pack("<q", number) + more for number in range(4)), b"\xff" * 100]
    made: list[socket.socket] = []
    try:
        for word in words:
            made.append(socket.create_connection(("127.0.0.1", port), 0.2))
            made[-1].sendall(word)
    except OSError:
        for line in made:
            line.close()
        return []
    return made


def overwrite(port: int, key: str, value: str, reached: Path) -> None:
    """Write a value into a store over and over, as long as it is there."""
    with suppress(RuntimeError):
        store = c10d.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False
        )
        while True:
            store.set(key, value)
            reached.touch()


def open_memory(spoils: Path) -> None:
    """Try to open the memory of all processes of others."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if process.stat().st_uid == os.getuid():
                continue  # another test may run a job of this user
            for link in (process / "fd").iterdir():
                if "memfd:echelon" in os.readlink(link):
                    spoils.write_text(f"opened {link}")


def main() -> None:
    """Attack until ended."""
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    given = set(map(int, sys.argv[3:]))
    before = listening()
    "127.0.0.1".encode("idna")  # imported now, because nobody may not read the files of root
    become_nobody()
    own = os.memfd_create("echelon store")  # the memory of a stranger, under the name of a store
    texts = {
        "path": ("echelon/0/private store", f"/proc/{os.getpid()}/fd/{own}"),
        "text": ("echelon/0/refused", RED),
        "plan": ("echelon/0/plan", "WORLD_SIZE=2, backend 'gloo'"),
    }
    for name in SHARED:
        with suppress(OSError):
            Path("/dev/shm", name).touch()
    (folder / "ready").touch()
    held: dict[int, list[socket.socket]] = {}  # connections, by port
    while True:
        new = (listening() - before) & (given or listening())
        for port in sorted(new):
            if mode == "store":
                spoil_store(port, folder)
            elif (folder / "enough").exists():
                continue
            elif mode in KNOCKS and not held.get(port):  # a busy host may have been too slow
                held[port] = knock(port, KNOCKS[mode])
                if held[port]:
                    (folder / f"knocked-{port}").touch()
            elif mode in texts:
                overwrite(port, *texts[mode], folder / "reached")
        open_memory(folder / "spoils")
        time.sleep(0.005)


if __name__ == "__main__":
    try:
        main()
    finally:
        for name in SHARED:
            with suppress(OSError):
                Path("/dev/shm", name).unlink()
