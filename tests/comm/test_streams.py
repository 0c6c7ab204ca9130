"""The CPU answers every question about devices; CUDA is asked where there is one."""

import os
import resource
from typing import ClassVar

import pytest
import torch

from echelon.comm import streams

CPU = torch.device("cpu")


def plays_accelerator(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int = 0) -> list:
    """Let torch find devices of this kind; returns the indices that are chosen."""
    chosen: list[object] = []
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: device
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


@pytest.mark.parametrize("kind", [None, "mps"])  # which has no streams
def test_a_machine_without_an_accelerator_gives_every_rank_the_cpu(monkeypatch, kind) -> None:
    plays_accelerator(monkeypatch, kind)
    assert [streams.local_device(rank) for rank in range(3)] == [CPU] * 3


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_ranks_of_a_host_take_its_devices_in_turn(monkeypatch, kind) -> None:
    chosen = plays_accelerator(monkeypatch, kind, 2)
    found = [streams.local_device(rank) for rank in range(3)]
    assert found == [torch.device(kind, i) for i in (0, 1, 0)] == chosen


def test_a_script_that_has_bound_its_process_group_to_a_device_gets_that_one(monkeypatch) -> None:
    chosen = plays_accelerator(monkeypatch, "cuda", 4)
    bound = torch.device("cuda", 3)
    assert [streams.local_device(0, bound)] == [bound] == chosen


def test_only_the_cpu_is_memory_that_processes_can_share() -> None:
    assert streams.device_of(CPU).is_host
    assert not streams.device_of(torch.device("cuda", 0)).is_host


def test_the_cpu_is_always_synchronized() -> None:
    streams.device_of(CPU).synchronize()


def test_the_memory_peak_is_at_least_what_is_resident_now() -> None:
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # The kernel counts pages in batches for each thread, so the two may differ by some.
    assert streams.device_of(CPU).memory_peak() >= resident - 2**22


@pytest.mark.parametrize(("platform", "factor"), [("linux", 1024), ("darwin", 1), ("win32", 0)])
def test_the_resident_set_is_counted_in_the_unit_of_the_system(
    monkeypatch, platform, factor
) -> None:
    usage = type("Usage", (), {"ru_maxrss": 5000})
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    monkeypatch.setattr(streams.sys, "platform", platform)
    assert streams.device_of(CPU).memory_peak() == 5000 * factor


# --- streams -----------------------------------------------------------------------------------

CUDA = torch.device("cuda", 0)


class FakeStream:
    """Notes what it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.device = name, log, CUDA

    def wait_stream(self, other: "FakeStream") -> None:
        self.log.append(f"{self.name} waits for stream {other.name}")

    def wait_event(self, event: "FakeEvent") -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> "FakeEvent":
        self.log.append(f"event on {self.name}")
        return FakeEvent(f"event of {self.name}", self.log)


class FakeEvent:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


@pytest.mark.parametrize(
    ("new_stream", "expected"),
    [
        (
            "side_stream",
            [
                "own waits for stream current",
                "event on own",
                "current waits for event of own",
                "host waits for event of own",
            ],
        ),
        (
            "current_stream",
            [
                "event on current",
                "current waits for event of current",
                "host waits for event of current",
            ],
        ),
    ],
)
def test_a_stream_orders_streams_by_events_and_blocks_the_host_only_to_synchronize(
    monkeypatch, new_stream, expected
) -> None:
    log: list[str] = []
    current = FakeStream("current", log)
    monkeypatch.setattr(torch, "Stream", lambda device, priority: FakeStream("own", log))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current)
    stream = getattr(streams.device_of(CUDA), new_stream)()
    stream.wait_for_current()
    event = stream.record_event()
    event.wait()
    event.synchronize()
    assert log == expected
    assert stream.queued == (new_stream == "side_stream")


def test_on_the_cpu_a_stream_is_the_current_order() -> None:
    stream = streams.device_of(CPU).side_stream()
    stream.wait_for_current()
    with stream.as_current():
        stream.record_event().wait()
    stream.record_event().synchronize()
    assert not stream.queued
    assert not streams.device_of(CPU).host_memory(3, torch.float32).is_pinned()


def test_side_streams_come_before_the_current_one(monkeypatch) -> None:
    priorities: list[int] = []
    monkeypatch.setattr(torch, "Stream", lambda device, priority: priorities.append(priority))
    streams.device_of(CUDA).side_stream()
    assert priorities == [-1]


def test_a_device_is_told_from_all_others_by_its_uuid(monkeypatch) -> None:
    facts = type("Properties", (), {"uuid": "1234"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert streams.device_of(CUDA).identity() == "1234"
    assert streams.device_of(CPU).identity() is None


def test_a_device_has_the_name_of_its_product(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert streams.device_of(torch.device("cuda", 1)).name() == "GPU 1"
    assert streams.device_of(torch.device("cpu")).name() == "cpu"


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("8", False), (None, False)])
def test_one_connection_to_a_device_is_one_queue(monkeypatch, value, expected) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    assert streams.device_of(CUDA).has_one_queue() == expected
    assert not streams.device_of(CPU).has_one_queue()


class NotesCopies(streams.PlainDevice):
    """A device with memory of its own, which notes what is copied to it."""

    copies: ClassVar[list[tuple[list[float], torch.dtype]]] = []
    numbers, copy_to_host = streams.DeviceKind.numbers, streams.DeviceKind.copy_to_host
    log: ClassVar[list[str]] = []

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.log.append(f"memory for {numel}")
        return super().host_memory(numel, dtype)

    def current_stream(self) -> streams.Stream:
        self.log.append("the end of the copy")
        return super().current_stream()

    def copy_from_host(self, tensor: torch.Tensor, *, always: bool) -> torch.Tensor:
        self.copies.append((tensor.tolist(), tensor.dtype))
        return super().copy_from_host(tensor, always=always)


def test_a_copy_to_the_host_goes_to_memory_that_the_device_copies_to() -> None:
    NotesCopies.log.clear()
    rows = torch.arange(6.0).view(2, 3).t()
    copy = NotesCopies(CPU).copy_to_host(rows)
    assert torch.equal(copy, rows)
    assert NotesCopies.log == ["memory for 6", "the end of the copy"]


def test_a_few_numbers_reach_a_device_without_a_wait_of_the_host() -> None:
    found = NotesCopies(CPU).numbers([0.0, 1.0], torch.float32)
    assert found.tolist() == [0.0, 1.0]
    assert NotesCopies.copies == [([0.0, 1.0], torch.float32)]
