"""What is alive on a thread is counted, once, and until it ends."""

import torch
from torch import nn

import echelon as ec
from echelon.comm.lone.group import LoneGroup
from echelon.laboratory.allocations import Allocations


def test_storages_count_once_as_long_as_they_live_and_at_their_size_now() -> None:
    counts: list[int] = []
    with Allocations(counts.append) as memory:
        x = torch.zeros(100)
        assert memory.nbytes == 400
        view = x[10:]
        assert memory.nbytes == 400
        y = view + 1
        assert memory.nbytes == 400 + 360
        y.untyped_storage().resize_(0)
        y.resize_(5)
        assert memory.nbytes == 400 + 20
        del y
        assert memory.nbytes == 400
        del x, view
    assert memory.nbytes == 0
    assert max(counts) == 760


def test_what_was_there_before_counts_from_its_first_use_or_when_it_is_added() -> None:
    before, unused = torch.zeros(10), torch.zeros(1000)
    with Allocations(lambda nbytes: None) as memory:
        before.add_(1)
        assert memory.nbytes == 40
        memory.add(unused)
        assert memory.nbytes == 4040


def test_an_allocation_is_rounded_up() -> None:
    with Allocations(lambda nbytes: None, rounding=512) as memory:
        small, large = torch.zeros(1), torch.zeros(129)
        assert memory.nbytes == 512 + 1024
        del small, large


def test_parameters_that_are_resharded_count_no_more_though_nothing_touches_them() -> None:
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(8)))
    counts: list[int] = []
    with Allocations(counts.append):
        units = ec.units.by_type(nn.Linear)
        sharded = ec.FSDP(model, LoneGroup(0, range(2)), units=units, min_num_params=0)
        x = torch.ones(1, 100)
        counts.clear()
        with torch.no_grad():
            sharded(x)
        torch.ones(1)
    shards = sharded.memory_stats().shards
    assert shards + 40_000 < max(counts) < shards + 3 * 40_000  # the unit that runs, and the next
    assert shards <= counts[-1] < shards + 5_000
