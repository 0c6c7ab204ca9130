"""One rank of a benchmark: a member of echelon, of gloo and of MPICH at once.

Because all of them live in the same processes, they can be measured in alternation, and a
disturbance of the machine affects all of them equally. A barrier of echelon synchronises the ranks.

``ranks`` starts this file under mpiexec, or calls ``on_process``.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import echelon as ec
from echelon.comm import shm

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Peers", "on_process"]

TIMEOUT_S = 120.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The worlds that this process is a member of, with one rank and size in all of them.

    Attributes:
        group: echelon's; gloo's is the default group of ``torch.distributed``.
        mpi: MPICH's, or None.
    """

    group: ec.Group
    mpi: Intracomm | None

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size


def on_process(world: ec.World, target: str, settings: dict[str, Any], folder: str) -> Any:
    """Rank function of ``ec.run``: join gloo too, and run the target."""
    join_gloo(world.rank, world.size, Path(folder))
    result = run(target, Peers(group=world.group, mpi=None), settings)
    dist.destroy_process_group()
    return result


def under_mpiexec(folder: Path) -> None:
    """Join all worlds and run the target; rank 0 leaves the result in the folder."""
    # mpiexec does not end its children when it is killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    import mpi4py

    mpi4py.rc.thread_level = "funneled"  # one thread calls it, so it needs no locks
    from mpi4py import MPI

    mpi = MPI.COMM_WORLD
    job = json.loads((folder / "job.json").read_text())
    store = join_gloo(mpi.rank, mpi.size, folder)
    group = shm.connect(mpi.rank, mpi.size, store, timeout=TIMEOUT_S, name="benchmark")
    try:
        result = run(job["target"], Peers(group=group, mpi=mpi), job["settings"])
    except BaseException as error:
        group.close(f"raised {type(error).__name__}: {error}")
        raise
    if mpi.rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    group.close()
    dist.destroy_process_group()


def join_gloo(rank: int, size: int, folder: Path) -> Any:
    """Make gloo the default group, over loopback; returns the store of the rendezvous."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    return store


def run(target: str, peers: Peers, settings: dict[str, Any]) -> Any:
    """Call the function of the name ``"module:function"``."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(peers, settings)


if __name__ == "__main__":
    # mpi4py's runner does not put the folder of the script first, as Python does.
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    under_mpiexec(Path(sys.argv[1]))
