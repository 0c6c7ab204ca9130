"""A job that waits while somebody looks at its sockets; and this machine's addresses."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from tests.cli.jobs import Job

__all__ = ["KINDS", "SCRIPT", "addresses", "exposed", "refuses"]

KINDS = ("shm", "gloo", "torch")

# Every rank uses a group and a subgroup, says so, and waits for the test to look.
SCRIPT = """
import os, pathlib, sys, time
import torch

kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
if kind == "torch":
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
    dist.new_group([0, 1])
else:
    import echelon as ec

    world = ec.init(kind)
    world.group.all_reduce(torch.ones(3))
    world.group.subgroup([0, 1]).all_reduce(torch.ones(3))
(folder / f"ready-{os.environ['RANK']}").touch()
while not (folder / "seen").exists():
    time.sleep(0.05)
if kind == "torch":
    os._exit(0)  # the end of PyTorch's own groups aborts at times, which is not the subject here
"""


def addresses() -> list[str]:
    """Addresses of this machine that other machines could use, if it has any.

    No packet is sent: connecting a datagram socket only looks up the way.
    """
    addresses = []
    for family, far in ((socket.AF_INET, "203.0.113.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            addresses.append(probe.getsockname()[0])
    return addresses


def refuses(host: str, port: int) -> bool:
    """Whether nothing listens there."""
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except ConnectionRefusedError:
        return True
    return False


def exposed(folder: Path, kind: str) -> tuple[list[str], list[str]]:
    """Where a job listens that uses this kind of group: all places, and those off loopback."""
    with Job(folder, SCRIPT, kind, str(folder)) as job:
        job.wait_for("ready-0", "ready-1")
        listeners = job.listeners()
        assert len(job.processes()) == 4  # the launcher, the agent and two ranks
        for listener in listeners:
            # An address of this machine that the store of torch's own agent answers on.
            for host in ("127.0.0.2", *addresses()):
                assert refuses(host, listener.port), f"{host} answers at {listener.port}"
        (folder / "seen").touch()
        code, _, errors = job.end()
        assert (code, errors) == (0, [])
    off = [str(listener) for listener in listeners if not listener.address.is_loopback]
    return [str(listener) for listener in listeners], off
