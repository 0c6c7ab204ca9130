"""What a rank communicates and holds, by the events that it emits."""

import time
from typing import Any

import torch
from torch import nn

import echelon as ec
from echelon import events
from echelon.events import Event
from echelon.observe import CommMeter, CommTotal, MemoryMeter, tensor_bytes
from echelon.observe.meters import MemoryTimeline, SaveMeter


def test_live_follows_events_and_peak_keeps_the_most() -> None:
    meter = MemoryMeter(rank=1)
    with events.listen(meter):
        for nbytes in (100, 50, -120, 10):
            events.emit("memory", rank=1, category="unit", nbytes=nbytes)
        events.emit("memory", rank=1, category="bucket", nbytes=7)
    assert (meter.totals["unit"].live, meter.totals["unit"].peak) == (40, 150)
    assert (meter.totals["bucket"].live, meter.totals["bucket"].peak) == (7, 7)


def test_events_of_other_ranks_do_not_count() -> None:
    meters = [MemoryMeter(rank) for rank in range(3)]

    def main(world: ec.World) -> None:
        with events.listen(meters[world.rank]):
            world.group.barrier()
            events.emit("memory", rank=world.rank, category="unit", nbytes=world.rank + 1)
            world.group.barrier()

    ec.run(main, ranks=3)
    assert [meter.totals["unit"].peak for meter in meters] == [1, 2, 3]


def test_what_is_measured_replaces_what_is_live() -> None:
    meter = MemoryMeter(rank=0)
    for nbytes in (300, 100, 200):
        meter.measure({"parameters": nbytes})
    assert (meter.totals["parameters"].live, meter.totals["parameters"].peak) == (200, 300)


def test_tensor_bytes_finds_every_category() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4, affine=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    assert tensor_bytes(model, optimizer) == {
        "parameters": 64,
        "buffers": 4 * 4 * 2 + 8,
        "gradients": 64,
        "optimizer state": 64,
    }


def test_tied_weights_count_once_and_views_of_one_buffer_their_own_bytes() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    buffer = torch.zeros(1000)
    first.weight.grad, first.bias.grad = buffer[:16].view(4, 4), buffer[16:20]
    nbytes = tensor_bytes(nn.Sequential(first, second))
    assert (nbytes["parameters"], nbytes["gradients"]) == (80, 80)


def test_the_process_holds_more_than_nothing() -> None:
    assert MemoryMeter(rank=0).process_peak(torch.device("cpu")) > 2**20


def measure(ranks: int, body: Any) -> list[dict[str, CommTotal]]:
    """What each rank communicated in ``body(world)``."""

    def main(world: ec.World) -> dict[str, CommTotal]:
        meter = CommMeter(world.rank)
        with events.listen(meter):
            body(world)
        return meter.totals

    return ec.run(main, ranks)


def test_calls_and_bytes_are_counted_per_operation_and_rank_but_not_the_making_of_groups() -> None:
    def body(world: ec.World) -> None:
        world.group.window(10)
        world.group.subgroup([0, 1])
        for _ in range(3):
            world.group.all_reduce(torch.zeros(10))
        world.group.broadcast(torch.zeros(5, dtype=torch.float64), src=0)
        if world.rank == 0:
            world.group.send(torch.zeros(4), dst=1)
        else:
            world.group.recv(torch.zeros(4), src=0)

    for totals, message in zip(measure(2, body), ("send", "recv"), strict=True):
        counts = {op: (total.calls, total.nbytes) for op, total in totals.items()}
        assert counts == {"all_reduce": (3, 120), "broadcast": (1, 40), message: (1, 16)}


def test_the_rank_that_comes_first_is_the_one_that_waits() -> None:
    def body(world: ec.World) -> None:
        if world.rank == 1:
            time.sleep(0.2)
        world.group.barrier()

    early, late = measure(2, body)
    assert early["barrier"].wait_s > 0.15
    assert late["barrier"].wait_s < early["barrier"].wait_s


def test_bytes_are_counted_for_each_group() -> None:
    meter = CommMeter(rank=0)
    for group, nbytes in (("world", 8), ("world.1", 4), ("world", 2)):
        facts = {"rank": 0, "op": "all_reduce", "nbytes": nbytes, "group": group}
        meter(Event("collective.issue", 0.0, 0.0, facts))
        meter(Event("collective.wait", 0.0, 0.5, facts))
    assert meter.totals["all_reduce"] == CommTotal(calls=3, nbytes=14, wait_s=1.5)
    assert meter.by_group == {
        "world": {"all_reduce": CommTotal(calls=2, nbytes=10, wait_s=1.0)},
        "world.1": {"all_reduce": CommTotal(calls=1, nbytes=4, wait_s=0.5)},
    }


def test_saves_of_this_rank_are_given_once() -> None:
    meter = SaveMeter(rank=1)
    for rank, step in ((0, 1), (1, 2)):
        meter(Event("checkpoint.save", 0.0, 0.5, {"rank": rank, "step": step, "nbytes": 8}))
    assert [save.facts["step"] for save in meter.take()] == [2]
    assert meter.take() == []


def test_units_that_were_gathered_twice_have_two_spans_and_open_ones_end_now() -> None:
    timeline = MemoryTimeline(0, dict)
    for name, unit in (
        ("fsdp.prefetch", "a"),
        ("fsdp.gather", "a"),  # it has been gathered already
        ("fsdp.release", "a"),
        ("fsdp.gather", "b"),
        ("fsdp.gather", "a"),
        ("fsdp.release", "a"),
        ("fsdp.release", "c"),  # it was gathered before
    ):
        timeline(Event(name, 0.0, 0.0, {"rank": 0, "unit": unit, "nbytes": 8}))
    record = timeline.record()
    assert [(unit, nbytes) for unit, _, _, nbytes in record["units"]] == [
        ("a", 8),
        ("b", 8),
        ("a", 8),
    ]
    assert record["units"][1][2] == record["time_s"][-1]
