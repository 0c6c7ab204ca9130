"""Five classic hangs, as programs of torch.distributed: give the name of one as the argument."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def barrier_on_one_rank() -> None:
    """A barrier stands in a branch that only rank 0 takes."""
    if dist.get_rank() == 0:
        dist.barrier()  # hangs here
    total = torch.ones(4)
    dist.all_reduce(total)  # and here


def swapped_order() -> None:
    """Ranks call two collectives in different orders."""
    data, total = torch.ones(4), torch.ones(4)
    if dist.get_rank() == 0:
        dist.broadcast(data, src=0)  # hangs here
        dist.all_reduce(total)
    else:
        dist.all_reduce(total)  # and here
        dist.broadcast(data, src=0)


def missing_rank() -> None:
    """One rank skips a collective, because it has no data, say."""
    if dist.get_rank() != dist.get_world_size() - 1:
        dist.all_reduce(torch.ones(4))  # hangs here
    dist.barrier()  # and here


def other_shape() -> None:
    """One rank has a tensor of another shape, as for the last batch."""
    rows = 3 if dist.get_rank() == dist.get_world_size() - 1 else 4
    data = torch.ones(rows, 8)
    dist.all_reduce(data)  # hangs here


def early_return() -> None:
    """One rank leaves the loop before the others."""
    for step in range(3):
        if dist.get_rank() == 1 and step == 2:
            return  # hangs since here
        dist.all_reduce(torch.ones(4))  # and here


HANGS = (barrier_on_one_rank, swapped_order, missing_rank, other_shape, early_return)


def main(name: str, seconds: float) -> None:
    """Join the job, and hang for some seconds if nobody notices."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    next(hang for hang in HANGS if hang.__name__ == name)()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 30.0)
