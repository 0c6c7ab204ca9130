"""A script that ends its ranks in every way a script may end, many times.

It imports torch once and forks its ranks, because only a rank that leaves through Python's own
shutdown can show what that does to the threads of gloo. Prints one line a rank.
"""

import gc
import os
import sys
import time

import torch

from echelon.comm.torch_dist import connect
from tests.comm.gloo_ranks import local_job
from tests.processes import free_port


def rank_main(rank: int, port: int, how: str) -> None:
    """One rank of two, which ends as ``how`` says."""
    job = local_job(rank, 2, port)
    world = connect(job, "gloo", device=torch.device("cpu"), timeout=20.0)
    tensors = [torch.full((50_000,), float(rank)) for _ in range(4)]
    works = [world.group.all_reduce(tensor, async_op=True) for tensor in tensors]
    if how == "waits and closes":
        for work in works:
            work.wait()
        world.close()
    elif how == "closes with works outstanding":
        world.close()
    elif how == "waits and does not close":
        for work in works:
            work.wait()


def main() -> None:
    """Fork two ranks for each way and round, and print how they ended."""
    rounds, *ways = sys.argv[1:]
    gc.freeze()  # the shutdown of a fork need not take torch apart
    for how in ways:
        for _ in range(int(rounds)):
            port = free_port()
            children = []
            for rank in range(2):
                pid = os.fork()
                if pid == 0:
                    torch.set_num_threads(1)
                    rank_main(rank, port, how)
                    return  # through Python's shutdown
                children.append(pid)
                time.sleep(0.01)
            for pid in children:
                print(how, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
