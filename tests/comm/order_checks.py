"""Works outstanding at once, messages, subgroups and objects: nothing is mixed up. Any group."""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor

from echelon.comm.group import Group
from echelon.comm.mesh import Mesh
from echelon.comm.work import Work
from echelon.errors import CommTimeout
from tests.comm.checking import refuses, same


def message(src: int, dst: int, number: int, numel: int) -> Tensor:
    """What ``src`` sends to ``dst`` as its message ``number``."""
    return torch.arange(numel, dtype=torch.int64) * (number + 1) + 1000 * src + 100 * dst


def check_fifty_works_outstanding_waited_for_in_any_order(group: Group) -> None:
    n, rank = group.size, group.rank
    tensors = [torch.full((1 + 37 * k,), float(rank + k)) for k in range(50)]
    works = [group.all_reduce(t, async_op=True, label=f"bucket {k}") for k, t in enumerate(tensors)]
    order = list(range(50))
    random.Random(rank).shuffle(order)  # another order on each rank
    for k in order:
        work = works[k]
        assert isinstance(work, Work)
        work.wait()
        assert work.done()
        same(tensors[k], torch.full((1 + 37 * k,), float(n * k + sum(range(n)))), str(k))


def check_asynchronous_collectives_of_every_kind_at_once(group: Group) -> None:
    n, rank = group.size, group.rank
    reduced, value = torch.full((20_000,), float(rank)), torch.tensor([float(rank)])
    part, whole = torch.empty(3), torch.empty(2, 3 * n).t()  # the output is not contiguous
    swapped, gathered = torch.empty(n), [torch.empty(2) for _ in range(n)]
    inputs = [torch.full((2,), float(r)) for r in range(n)]
    scattered = torch.empty(2)
    works = [
        group.all_reduce(reduced, "max", async_op=True),
        group.broadcast(value, n - 1, async_op=True),
        group.reduce_scatter_single(part, torch.arange(3.0 * n), async_op=True),
        group.all_gather_single(whole, torch.full((3, 2), float(rank)), async_op=True),
        group.all_to_all_single(swapped, torch.arange(float(n)) + 10 * rank, async_op=True),
        group.gather(inputs[rank], gathered if rank == 0 else None, 0, async_op=True),
        group.scatter(scattered, inputs if rank == 0 else None, 0, async_op=True),
        group.barrier(async_op=True),
    ]
    for work in reversed(works):
        assert work is not None
        work.wait()
        work.wait()  # a second time does nothing
    same(reduced, torch.full((20_000,), n - 1.0))
    same(value, torch.tensor([n - 1.0]))
    same(part, n * torch.arange(3.0 * rank, 3.0 * rank + 3))
    same(
        whole.contiguous(),
        torch.arange(float(n)).repeat_interleave(3)[:, None].expand(-1, 2).contiguous(),
    )
    same(swapped, rank + 10 * torch.arange(float(n)))
    same(scattered, inputs[rank])
    if rank == 0:
        same(torch.cat(gathered), torch.cat(inputs))


def check_blocking_calls_keep_their_turn_behind_outstanding_ones(group: Group) -> None:
    n = group.size
    slow = torch.ones(300_000)
    work = group.all_reduce(slow, async_op=True)
    fast = torch.ones(1)
    group.all_reduce(fast)
    group.barrier()
    same(fast, torch.tensor([float(n)]))
    assert work is not None
    work.wait()
    same(slow, torch.full((300_000,), float(n)))


def check_two_groups_may_be_used_in_different_order(group: Group) -> None:
    other = group.subgroup(range(group.size))
    assert other is not None
    first, second = torch.full((40_000,), 1.0), torch.full((40_000,), 2.0)
    calls = [(group, first), (other, second)]
    if group.rank % 2:
        calls.reverse()
    works = [g.all_reduce(t, async_op=True) for g, t in calls]
    for work in works:
        assert work is not None
        work.wait()
    same(first, torch.full((40_000,), 1.0 * group.size))
    same(second, torch.full((40_000,), 2.0 * group.size))


def check_messages_find_their_tags_in_any_order(group: Group) -> None:
    if group.size == 1:
        return
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    works = [group.isend(message(group.rank, after, k, 10 + k), after, tag=k) for k in range(8)]
    for k in (5, 0, 7, 2, 1, 6, 3, 4):
        output = torch.empty(10 + k, dtype=torch.int64)
        group.recv(output, before, tag=k)
        same(output, message(before, group.rank, k, 10 + k), str(k))
    for work in works:
        work.wait()


def check_messages_with_one_tag_keep_their_order(group: Group) -> None:
    if group.size == 1:
        return
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sent = [group.isend(message(group.rank, after, k, 9), after) for k in range(20)]
    outputs = [torch.empty(9, dtype=torch.int64) for _ in range(20)]
    works = [group.irecv(output, before) for output in outputs]
    for work in (*reversed(works), *sent):
        work.wait()
    for k, output in enumerate(outputs):
        same(output, message(before, group.rank, k, 9), str(k))


def check_long_messages_in_both_directions_at_once(group: Group) -> None:
    if group.rank > 1 or group.size == 1:
        return
    peer, numel = 1 - group.rank, 400_001  # 3.2 MB, longer than a ring
    output = torch.empty(numel, dtype=torch.int64)
    sending = group.isend(message(group.rank, peer, 0, numel), peer)
    group.recv(output, peer)
    sending.wait()
    same(output, message(peer, group.rank, 0, numel))
    if group.rank == 0:  # one direction, nobody has asked yet
        group.send(message(0, 1, 1, numel), 1, tag=1)
    else:
        time.sleep(0.02)
        group.recv(output, 0, tag=1)
        same(output, message(0, 1, 1, numel))


def check_empty_and_strided_messages(group: Group) -> None:
    if group.rank > 1 or group.size == 1:
        return
    if group.rank == 0:
        group.send(torch.empty(0, 3), 1)
        group.send(torch.arange(6.0).view(2, 3).t(), 1)
        group.send(torch.tensor(5), 1)
    else:
        group.recv(torch.empty(0), 0)
        output = torch.zeros(4, 3).t()[:, 1:3]
        group.irecv(output, 0).wait()
        same(output.contiguous(), torch.arange(6.0).view(2, 3).t().contiguous())
        scalar = torch.tensor(0)
        group.recv(scalar, 0)
        same(scalar, torch.tensor(5))


def check_a_storm_of_messages_between_all_pairs(group: Group) -> None:
    n, rank, dice = group.size, group.rank, random.Random(7)
    lengths = [dice.choice((0, 1, 50, 3000, 40_000)) for _ in range(12)]
    works, outputs = [], {}
    order = [(peer, k) for peer in range(n) if peer != rank for k in range(12)]
    random.Random(rank).shuffle(order)
    for peer, k in order:  # receives are posted, and sends issued, in another order on each rank
        output = outputs[peer, k] = torch.empty(lengths[k], dtype=torch.int64)
        works.append(group.irecv(output, peer, tag=k))
        works.append(group.isend(message(rank, peer, k, lengths[k]), peer, tag=k))
    random.Random(rank + 50).shuffle(works)
    for work in works:
        work.wait()
    for (peer, k), output in outputs.items():
        same(output, message(peer, rank, k, lengths[k]), f"from {peer}, number {k}")


def check_messages_and_collectives_do_not_disturb_each_other(group: Group) -> None:
    if group.size == 1:
        return
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    output, total = torch.empty(5000, dtype=torch.int64), torch.ones(30_000)
    receiving = group.irecv(output, before)
    reducing = group.all_reduce(total, async_op=True)
    sending = group.isend(message(group.rank, after, 3, 5000), after)
    group.barrier()
    assert reducing is not None
    for work in (sending, reducing, receiving):
        work.wait()
    same(output, message(before, group.rank, 3, 5000))
    same(total, torch.full((30_000,), float(group.size)))


def check_a_wait_may_time_out_and_be_repeated(group: Group) -> None:
    if group.size == 1:
        return
    output = torch.empty(1)
    if group.rank == 0:
        work = group.irecv(output, 1, tag=3)
        refuses(CommTimeout, "rank 1", lambda: work.wait(0.02))
        refuses(CommTimeout, "waited 0.0 s", lambda: work.wait(0.0))
        assert not work.done()
        group.send(torch.tensor([1.0]), 1, tag=4)  # only now may the peer go on
        work.wait()
        same(output, torch.tensor([7.0]))
    elif group.rank == 1:
        group.recv(output, 0, tag=4)
        group.send(torch.tensor([7.0]), 0, tag=3)


def check_subgroups_of_subgroups(group: Group) -> None:
    n = group.size
    if n < 4:
        return
    even = group.subgroup([0, 2])
    assert (even is None) == (group.rank not in (0, 2))
    three = group.subgroup([3, 2, 0, 2, 3])  # sorted, without repeats
    assert (three is None) == (group.rank == 1)
    if even is not None:
        assert even.ranks == (0, 2)
        assert even.size == 2
        assert even.rank == (0, 2).index(group.rank)
        value = torch.tensor([float(group.rank)])
        even.all_reduce(value)
        same(value, torch.tensor([2.0]))
    if three is not None:
        assert three.ranks == (0, 2, 3)
        inner = three.subgroup([1, 2])  # ranks 2 and 3 of the job
        assert (inner is None) == (group.rank == 0)
        if inner is not None:
            assert inner.ranks == (2, 3)
            value = torch.tensor([float(group.rank)])
            inner.broadcast(value, 1)
            same(value, torch.tensor([3.0]))
            large = torch.full((100_000,), float(group.rank))
            inner.all_reduce(large)
            same(large, torch.full((100_000,), 5.0))
            peer = 1 - inner.rank
            output = torch.empty(1)
            sending = inner.isend(value + inner.rank, peer)
            inner.recv(output, peer)
            sending.wait()
            same(output, torch.tensor([3.0 + peer]))


def check_a_group_of_one(group: Group) -> None:
    alone = [group.subgroup([rank]) for rank in range(group.size)][group.rank]
    assert alone is not None
    assert (alone.size, alone.rank, alone.ranks) == (1, 0, (group.rank,))
    value = torch.tensor([3.0])
    alone.all_reduce(value, "mean")
    alone.broadcast(value, 0)
    output = torch.empty(1)
    alone.reduce_scatter_single(output, value)
    alone.all_to_all_single(output, value)
    alone.all_gather([output], value)
    alone.barrier()
    same(output, torch.tensor([3.0]))
    large = torch.ones(70_000)
    alone.all_reduce(large)
    same(large, torch.ones(70_000))


def check_groups_of_a_mesh(group: Group) -> None:
    n = group.size
    mesh = Mesh(group, {"dp": -1, "tp": 2 if n % 2 == 0 else 1})
    width = mesh.axes["tp"]
    assert mesh["tp"].ranks == tuple(
        range(group.rank // width * width, group.rank // width * width + width)
    )
    assert mesh["dp"].ranks == tuple(range(group.rank % width, n, width))
    for axis in ("dp", "tp"):
        value = torch.tensor([group.rank])
        mesh[axis].all_reduce(value)
        same(value, torch.tensor([sum(mesh[axis].ranks)]), axis)


def check_objects(group: Group) -> None:
    n, rank = group.size, group.rank
    items = group.all_gather_object({"rank": rank, "name": "é" * rank * 1000})
    assert items == [{"rank": r, "name": "é" * r * 1000} for r in range(n)]
    found = group.broadcast_object(
        ("config", list(range(50_000))) if rank == n - 1 else None, n - 1
    )
    assert found == ("config", list(range(50_000)))
    assert group.broadcast_object("x" if rank == 0 else None) == "x"
    tensors = group.all_gather_object(torch.full((2,), float(rank)))
    same(torch.cat(tensors), torch.arange(float(n)).repeat_interleave(2))
