"""Programs that run over gloo and hang over NCCL: give the name of one as the argument.

Without a cluster::

    echelon run --world threads --ranks 4 examples/nccl_hangs.py ring                  # runs
    echelon run --world threads --ranks 4 --rules nccl examples/nccl_hangs.py ring     # names why
"""

import sys

import torch
import torch.distributed as dist


def opposite() -> None:
    """Two ranks send first and receive then: on NCCL both messages of a pair have one queue."""
    rank, received = dist.get_rank(), torch.empty(4)
    if rank < 2:
        sent = dist.isend(torch.ones(4), 1 - rank)  # hangs here
        dist.recv(received, 1 - rank)
        sent.wait()
    dist.barrier()


def ring() -> None:
    """Each rank receives from the one before: the first use of a pair holds both ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty(4)
    arrives = dist.irecv(received, (rank - 1) % size)  # hangs here
    dist.send(torch.ones(4), (rank + 1) % size)
    arrives.wait()


def groups() -> None:
    """Ranks use two groups in different orders: NCCL runs the operations of a rank in order."""
    data, model = dist.new_group(), dist.new_group()
    for group in (data, model):
        dist.all_reduce(torch.ones(4), group=group)
    if dist.get_rank() == 0:
        first = dist.all_reduce(torch.ones(4), group=data, async_op=True)
        second = dist.all_reduce(torch.ones(4), group=model, async_op=True)
        second.wait()  # what hangs was issued two lines above
    else:
        first = dist.all_reduce(torch.ones(4), group=model, async_op=True)
        second = dist.all_reduce(torch.ones(4), group=data, async_op=True)
        second.wait()
    first.wait()


def late() -> None:
    """A rank goes on only when another has gone on, which the first use of a group prevents."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        total = dist.all_reduce(torch.ones(4), async_op=True)  # hangs here
        store.set("ready", "yes")
        total.wait()
    else:
        store.wait(["ready"])  # and here
        dist.all_reduce(torch.ones(4))


def objects() -> None:
    """Objects are gathered on the device, behind a receive that comes later on the other side."""
    rank, received = dist.get_rank(), torch.empty(4)
    names: list[object] = [None] * dist.get_world_size()
    dist.barrier()
    if rank == 0:
        arrives = dist.irecv(received, 1)  # hangs here
        dist.all_gather_object(names, "rank 0")
        arrives.wait()
    else:
        dist.all_gather_object(names, f"rank {rank}")  # and here
        if rank == 1:
            dist.send(torch.ones(4), 0)


def batched() -> None:
    """The ring as it has to be written: a batch is one operation, which runs over NCCL as well."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty(4)
    messages = [
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
        dist.P2POp(dist.isend, torch.ones(4), (rank + 1) % size),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


PROGRAMS = (opposite, ring, groups, late, objects, batched)

if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    {program.__name__: program for program in PROGRAMS}[sys.argv[1]]()
    dist.destroy_process_group()
