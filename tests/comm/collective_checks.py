"""What each collective does, with the numbers that a reader can check by hand. Any group."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.comm.group import Group
from echelon.errors import ArgumentError, RankError, UnsupportedError
from tests.comm.checking import refuses, same


def ranked(group: Group, rank: int, numel: int = 3) -> Tensor:
    """``[10 r, 10 r + 1, …]``: tells from which rank and place an element came."""
    return torch.arange(numel, dtype=torch.float64) + 10.0 * rank


def check_all_reduce_sums_and_averages(group: Group) -> None:
    n = group.size
    total = torch.tensor([float(group.rank)])
    group.all_reduce(total)
    same(total, torch.tensor([float(sum(range(n)))]))  # 4 ranks: 6
    mean = torch.tensor([float(group.rank)])
    group.all_reduce(mean, "mean")
    same(mean, torch.tensor([sum(range(n)) / n]))  # 4 ranks: 1.5
    first = torch.full((2, 3), float(group.rank + 1))
    group.all_reduce(first, "product")
    same(first, torch.full((2, 3), float(torch.arange(1, n + 1).prod())))


def check_all_reduce_min_max_and_bits(group: Group) -> None:
    n = group.size
    for op, expected in (("min", 0), ("max", n - 1)):
        value = torch.tensor([group.rank])
        group.all_reduce(value, op)
        same(value, torch.tensor([expected]), op)
    ones = (1 << n) - 1
    for op, expected in (("band", int(n == 1)), ("bor", ones), ("bxor", ones)):
        value = torch.tensor([1 << group.rank])
        group.all_reduce(value, op)
        same(value, torch.tensor([expected]), op)


def check_broadcast_from_every_rank(group: Group) -> None:
    for src in range(group.size):
        value = torch.tensor([42.0 + src if group.rank == src else -1.0])
        group.broadcast(value, src)
        same(value, torch.tensor([42.0 + src]))


def check_all_gather_single_keeps_rank_order(group: Group) -> None:
    output = torch.empty(2 * group.size, dtype=torch.float64)
    group.all_gather_single(output, ranked(group, group.rank, 2))
    same(output, torch.cat([ranked(group, r, 2) for r in range(group.size)]))
    stacked = torch.empty(2 * group.size, 3)  # [2, 3] on each of 2 ranks gives [4, 3]
    group.all_gather_single(stacked, torch.full((2, 3), float(group.rank)))
    same(stacked, torch.arange(group.size).repeat_interleave(2)[:, None].expand(-1, 3).float())


def check_all_gather_into_its_own_input(group: Group) -> None:
    whole = torch.zeros(3 * group.size, dtype=torch.float64)
    mine = whole[3 * group.rank : 3 * group.rank + 3]
    mine.copy_(ranked(group, group.rank))
    group.all_gather_single(whole, mine)
    same(whole, torch.cat([ranked(group, r) for r in range(group.size)]))


def check_all_gather_of_different_lengths(group: Group) -> None:
    outputs = [torch.empty(2 * r) for r in range(group.size)]  # rank 0 brings nothing
    group.all_gather(outputs, torch.full((2 * group.rank,), float(group.rank)))
    for rank, output in enumerate(outputs):
        same(output, torch.full((2 * rank,), float(rank)))


def check_reduce_scatter_leaves_each_its_part(group: Group) -> None:
    n = group.size
    output = torch.empty(1)
    group.reduce_scatter_single(output, torch.arange(1.0, n + 1))
    same(output, torch.tensor([n * (group.rank + 1.0)]))  # 4 ranks: 4, 8, 12, 16
    mean = torch.empty(2)
    group.reduce_scatter_single(mean, torch.full((2 * n,), float(group.rank)), "mean")
    same(mean, torch.full((2,), (n - 1) / 2))  # ranks 0 and 1: 0.5


def check_reduce_scatter_of_different_lengths(group: Group) -> None:
    n = group.size
    splits = [2 * r for r in range(n)]  # rank 0 gets nothing
    whole = torch.arange(float(sum(splits))) * (group.rank + 1)
    output = torch.full((splits[group.rank],), -1.0)
    group.reduce_scatter_single(output, whole, splits=splits)
    start = sum(splits[: group.rank])
    same(output, torch.arange(start, start + output.numel()) * (n * (n + 1) / 2))
    for wrong, words in (
        ([whole.numel() + 1, *[0] * (n - 1)], "do not cut"),
        ([], "do not cut"),
        ([-1] * n, "splits[0] is -1"),
    ):
        refuses(
            ArgumentError,
            words,
            lambda wrong=wrong: group.reduce_scatter_single(output, whole, splits=wrong),
        )


def check_memory_is_the_same_on_all_ranks_only_where_it_is_shared(group: Group) -> None:
    if group.shares_memory:
        assert group.shared_tensor(5, torch.int32).tolist() == [0] * 5
        refuses(ArgumentError, "numel is -1", lambda: group.shared_tensor(-1))
    else:
        refuses(UnsupportedError, "do not share memory", lambda: group.shared_tensor(5))


def check_reduce_scatter_into_its_own_input(group: Group) -> None:
    n = group.size
    for place in range(n):  # also where another rank's part lies
        whole = torch.arange(n, dtype=torch.float64) + group.rank
        group.reduce_scatter_single(whole[place : place + 1], whole)
        expected = torch.tensor([n * group.rank + sum(range(n))], dtype=torch.float64)
        same(whole[place : place + 1], expected)


def check_reduce_leaves_the_others_alone(group: Group) -> None:
    n = group.size
    for dst in range(n):
        value = torch.tensor([float(group.rank), 1.0])
        group.reduce(value, dst)
        kept = [float(group.rank), 1.0]
        same(value, torch.tensor([sum(range(n)), n] if group.rank == dst else kept).float())


def check_gather_and_scatter(group: Group) -> None:
    n = group.size
    for root in range(n):
        outputs = [torch.empty(3, dtype=torch.float64) for _ in range(n)]
        mine = outputs if group.rank == root else None
        group.gather(ranked(group, group.rank), mine, root)
        if group.rank == root:
            for rank, output in enumerate(outputs):
                same(output, ranked(group, rank))
        part = torch.empty(3, dtype=torch.float64)
        parts = [ranked(group, 7 * root + r) for r in range(n)]
        group.scatter(part, parts if group.rank == root else None, root)
        same(part, parts[group.rank])


def check_all_to_all_single(group: Group) -> None:
    n = group.size
    output = torch.empty(2 * n)
    group.all_to_all_single(output, torch.arange(2.0 * n) + 100 * group.rank)
    parts = [torch.arange(2.0) + 2 * group.rank + 100 * r for r in range(n)]
    same(output, torch.cat(parts))


def check_all_to_all_single_with_different_lengths(group: Group) -> None:
    n = group.size
    # Rank r sends r + s + 1 rows of 2 to rank s, but nothing to rank 0.
    counts = [[0 if s == 0 else r + s + 1 for s in range(n)] for r in range(n)]
    ins, outs = counts[group.rank], [counts[s][group.rank] for s in range(n)]
    rows = [torch.full((ins[s], 2), 10.0 * group.rank + s) for s in range(n)]
    output = torch.full((sum(outs), 2), -1.0)
    group.all_to_all_single(output, torch.cat(rows), outs, ins)
    expected = [torch.full((outs[s], 2), 10.0 * s + group.rank) for s in range(n)]
    same(output, torch.cat(expected))


def check_numbers_of_two_ranks(group: Group) -> None:
    if group.size != 2:
        return
    output = torch.empty(4, dtype=torch.int64)
    group.all_to_all_single(output, torch.tensor([[10, 20, 30, 40], [50, 60, 70, 80]][group.rank]))
    same(output, torch.tensor([[10, 20, 50, 60], [30, 40, 70, 80]][group.rank]))
    sent = torch.tensor([[10, 20, 21, 22], [30, 31, 40, 41]][group.rank])
    ins, outs = [[1, 3], [2, 2]][group.rank], [[1, 2], [3, 2]][group.rank]
    output = torch.empty(sum(outs), dtype=torch.int64)
    group.all_to_all_single(output, sent, outs, ins)
    same(output, torch.tensor([[10, 30, 31], [20, 21, 22, 40, 41]][group.rank]))


def check_nothing_can_be_communicated(group: Group) -> None:
    n, rank = group.size, group.rank
    empty = torch.empty(0, 3)
    group.all_reduce(empty, "mean")
    group.broadcast(empty, n - 1)
    group.reduce(empty, 0)
    gathered = torch.empty(0, 3)
    group.all_gather_single(gathered, empty)
    assert gathered.shape == (0, 3)
    group.all_gather([torch.empty(0) for _ in range(n)], torch.empty(0))
    group.reduce_scatter_single(torch.empty(0, 3), empty)
    group.all_to_all_single(torch.empty(0, 3), empty)
    group.gather(empty, [torch.empty(0, 3) for _ in range(n)] if rank == 0 else None, 0)
    group.scatter(empty, [torch.empty(0, 3) for _ in range(n)] if rank == 0 else None, 0)


def check_tensors_without_dims(group: Group) -> None:
    n = group.size
    value = torch.tensor(float(group.rank + 1))
    group.all_reduce(value, "max")
    same(value, torch.tensor(float(n)))
    value = torch.tensor(group.rank)
    group.broadcast(value, n - 1)
    same(value, torch.tensor(n - 1))
    output = torch.empty(n, dtype=torch.int64)
    group.all_gather_single(output, torch.tensor(group.rank))
    same(output, torch.arange(n))
    refuses(
        ArgumentError,
        "no dim 0",
        lambda: group.all_to_all_single(torch.tensor(1.0), torch.tensor(1.0)),
    )


def check_strided_tensors_and_views(group: Group) -> None:
    n = group.size
    whole = torch.zeros(4, 6)
    view = whole.t()[1:5:2]  # neither contiguous nor at the start
    view.fill_(group.rank + 1.0)
    group.all_reduce(view)
    same(view.contiguous(), torch.full((2, 4), n * (n + 1) / 2))
    assert whole.sum() == 8 * n * (n + 1) / 2  # the rest is untouched
    sent = torch.arange(6.0).view(2, 3).t() + 10 * group.rank
    output = torch.empty(2, 3 * n).t()
    group.all_gather_single(output, sent)
    expected = torch.cat([torch.arange(6.0).view(2, 3).t() + 10 * r for r in range(n)])
    same(output.contiguous(), expected.contiguous())
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    group.all_reduce(conjugate)
    same(conjugate.resolve_conj(), n * torch.tensor([1 - 2j, 3 + 1j]))
    backwards = torch.empty(n * 3).as_strided((n, 3), (1, n))
    group.all_to_all_single(backwards, torch.full((n, 3), float(group.rank)))
    same(backwards.contiguous(), torch.arange(float(n))[:, None].expand(-1, 3).contiguous())


def check_tensors_that_need_gradients(group: Group) -> None:
    leaf = torch.full((3,), float(group.rank), requires_grad=True)
    group.all_reduce(leaf)
    assert leaf.requires_grad
    assert leaf.grad_fn is None
    (leaf * 2).sum().backward()
    group.all_reduce(leaf.grad, "mean")
    same(leaf.grad, torch.full((3,), 2.0))


def check_arguments_are_refused_before_anything_is_sent(group: Group) -> None:
    n, one = group.size, torch.ones(1)
    refuses(RankError, "src is 99", lambda: group.broadcast(one, 99))
    refuses(RankError, "dst is -1", lambda: group.reduce(one, -1))
    refuses(RankError, "src is 1.0", lambda: group.broadcast(one, 1.0))
    refuses(RankError, "dst is", lambda: group.send(one, n))
    refuses(ArgumentError, "send to itself", lambda: group.send(one, group.rank))
    refuses(ArgumentError, "recv to itself", lambda: group.irecv(one, group.rank))
    if n > 1:
        peer = (group.rank + 1) % n
        refuses(ArgumentError, "tag 'a'", lambda: group.send(one, peer, "a"))
        refuses(ArgumentError, "tag -1", lambda: group.send(one, peer, -1))
    refuses(ArgumentError, "unknown reduction", lambda: group.all_reduce(one, "avg"))
    refuses(ArgumentError, "mean of", lambda: group.all_reduce(torch.ones(1).int(), "mean"))
    refuses(ArgumentError, "no order", lambda: group.all_reduce(torch.ones(1) * 1j, "max"))
    refuses(ArgumentError, "no meaning", lambda: group.all_reduce(one, "bor"))
    refuses(ArgumentError, "to_dense", lambda: group.all_reduce(one.to_sparse()))
    refuses(ArgumentError, "meta", lambda: group.all_reduce(torch.ones(1, device="meta")))
    refuses(ArgumentError, "one dtype", lambda: group.all_gather_single(one.double(), one))
    short = torch.ones(n + 1)  # 3 elements do not cut into 2 parts
    refuses(ArgumentError, "size * output", lambda: group.reduce_scatter_single(one, short))
    refuses(ArgumentError, "size * input", lambda: group.all_gather_single(short, one))
    refuses(ArgumentError, "outputs for", lambda: group.all_gather([one] * (n + 1), one))
    if n > 1:
        refuses(ArgumentError, "rows", lambda: group.all_to_all_single(short, short))
    bad = [1] * (n - 1) + [5]
    refuses(ArgumentError, "do not cut", lambda: group.all_to_all_single(short, short, bad, bad))
    refuses(ArgumentError, "numel is -1", lambda: group.window(-1))
    refuses(ArgumentError, "at least one rank", lambda: group.subgroup([]))
    refuses(RankError, "member of the subgroup", lambda: group.subgroup([0, n]))
    if group.rank == 0:
        refuses(ArgumentError, "must give", lambda: group.scatter(one, None, 0))
        refuses(ArgumentError, "must give", lambda: group.gather(one, [one] * (n + 1), 0))
        wrong = [torch.ones(2) for _ in range(n)]
        refuses(ArgumentError, "tensor.numel()", lambda: group.scatter(one, wrong, 0))
    else:
        refuses(ArgumentError, "only rank 0", lambda: group.scatter(one, [one] * n, 0))
    after = torch.tensor([1.0])  # nobody is out of step
    group.all_reduce(after)
    same(after, torch.tensor([float(n)]))


def check_outputs_may_lie_on_inputs(group: Group) -> None:
    n, rank = group.size, group.rank
    whole = ranked(group, rank, n)
    group.all_to_all_single(whole, whole)
    same(whole, torch.tensor([10.0 * r + rank for r in range(n)], dtype=torch.float64))
    turned = ranked(group, rank, 2 * n)
    group.all_to_all_single(turned[1 : n + 1], turned[:n])
    same(turned[1 : n + 1], torch.tensor([10.0 * r + rank for r in range(n)], dtype=torch.float64))
    for place in range(n):  # also where the part of another rank goes
        slots = ranked(group, rank, n)
        group.all_gather_single(slots, slots[place : place + 1])
        same(slots, torch.tensor([10.0 * r + place for r in range(n)], dtype=torch.float64))
    for place in range(n):
        parts = ranked(group, rank, n)
        inputs = list(parts.split(1)) if rank == 0 else None
        output = parts[place : place + 1] if rank == 0 else torch.zeros(1, dtype=torch.float64)
        group.scatter(output, inputs, src=0)
        same(output, torch.tensor([float(rank)], dtype=torch.float64))


def check_what_is_no_tensor_is_refused(group: Group) -> None:
    for thing in (None, [1.0], 3):
        refuses(ArgumentError, "give a tensor", lambda thing=thing: group.all_reduce(thing))
