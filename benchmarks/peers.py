"""One rank of a benchmark: a member of echelon, of gloo and of MPICH at once.

Because all of them live in the same processes, they can be measured in alternation, and whatever
disturbs the machine disturbs them alike. A barrier of echelon lines the ranks up for all of them.

``ranks`` starts this file with the folder that holds the job.
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
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from echelon.world import shm
from echelon.world.group import Group

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Peers"]

TIMEOUT_S = 120.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The worlds that this process is a member of, with one rank and size in all of them.

    Attributes:
        group: echelon's; gloo's is the default group of ``torch.distributed``.
        mpi: MPICH's, or None.
    """

    group: Group
    mpi: Intracomm | None

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size


def _mpi_world() -> Intracomm:
    import mpi4py

    mpi4py.rc.thread_level = "funneled"  # one thread calls it, so it needs no locks
    from mpi4py import MPI

    return MPI.COMM_WORLD


def main(folder: Path) -> None:
    """Enter all worlds, run the job, leave; rank 0 leaves the result in the folder."""
    # mpiexec does not tell its children when it dies.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(1)
    mpi = _mpi_world() if job["mpi"] else None
    rank = mpi.rank if mpi else int(os.environ["RANK"])
    size = mpi.size if mpi else int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S)
    )
    group = shm.connect(rank, size, store, timeout=TIMEOUT_S, name="benchmark")
    module, _, name = job["target"].partition(":")
    try:
        peers = Peers(group=group, mpi=mpi)
        result = getattr(importlib.import_module(module), name)(peers, job["settings"])
    except BaseException as error:
        group.close(f"raised {type(error).__name__}: {error}")
        raise
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    # mpi4py's runner does not put the folder of the script first, as Python does.
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main(Path(sys.argv[1]))
