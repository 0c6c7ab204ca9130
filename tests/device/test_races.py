"""No configuration has operations that race on a device; and the detector sees those that do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from echelon.comm.streams import Stream, device_of
from tests.device import played_device
from tests.device.detector import Detector
from tests.device.played_device import played_devices, watched
from tests.device.programs import PROGRAMS

CPU = torch.device("cpu")
# It moves the state of the optimizer by ``Tensor.to``, of which nothing is seen on the CPU.
MOVES_UNSEEN = {"FSDP offloaded: gives_states"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_configuration_has_a_race(name: str) -> None:
    detector = Detector()
    with played_devices():
        PROGRAMS[name](detector)
    assert detector.findings == []
    # What is handed out after the end does not race, either. The evaluation that ends pipelines
    # frees gradients, and the next reduction orders them before it allocates.
    assert detector.still_used() == [] or name.startswith("pipeline")
    assert not detector.foreign
    assert not detector.mixed or name in MOVES_UNSEEN


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "drops_the_model" in name])
def test_a_model_that_is_dropped_orders_the_memory_that_it_gives_back(name: str) -> None:
    detector = Detector()
    with played_devices():
        PROGRAMS[name](detector)
    assert detector.still_used() == []  # the next user of its streams may order nothing


def test_a_thread_that_saves_over_a_group_of_the_device_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Then the groups that are asked for on the CPU are on the device as well.
    monkeypatch.setattr(played_device, "_making_subgroups", lambda plain: plain)
    detector = Detector()
    with played_devices():
        PROGRAMS["saves of DDP"](detector)
    assert detector.foreign
    assert detector.findings


def test_there_are_150_configurations() -> None:
    assert len(PROGRAMS) >= 150


# --- the detector sees what it should ------------------------------------------------------------


def kinds_of(act: Callable[[Stream], object]) -> list[str]:
    with played_devices(), watched(Detector()) as detector:
        act(device_of(CPU).side_stream())
    return [finding.kind for finding in detector.findings]


def reads_what_is_written(stream: Stream, *, waits: bool) -> None:
    x = torch.ones(8)
    stream.wait_for_current()
    with stream.as_current():
        x.mul_(2)
    if waits:
        stream.record_event().wait()
    x.sum()


def writes_what_is_read(stream: Stream, *, waits: bool) -> None:
    x = torch.ones(8)
    stream.wait_for_current()
    with stream.as_current():
        total = x.sum()
    if waits:
        stream.record_event().wait()
    x.zero_()
    stream.wait_for_current()
    del total


def uses_new_memory_elsewhere(stream: Stream, *, waits: bool) -> None:
    x = torch.empty(8)
    if waits:
        stream.wait_for_current()
    with stream.as_current():
        x.zero_()
    stream.record_event().wait()


def frees_what_is_read(stream: Stream, *, waits: bool) -> None:
    x = torch.ones(8)
    stream.wait_for_current()
    with stream.as_current():
        total = x.sum()
    if waits:
        stream.record_event().wait()
    del x
    torch.ones(3)
    stream.wait_for_current()
    del total


def frees_by_a_resize(stream: Stream, *, waits: bool) -> None:
    device = device_of(CPU)
    with stream.as_current():
        x = torch.ones(8)
    stream.record_event().wait()
    x.sum()
    if waits:
        stream.wait_for_current()
    with stream.as_current():
        device.resize(x.untyped_storage(), 0)
        torch.ones(3)


def reads_on_the_host(stream: Stream, *, waits: bool) -> None:
    host = device_of(CPU).host_memory(8, torch.float32)
    host.copy_(torch.ones(8), non_blocking=True)
    event = device_of(CPU).current_stream().record_event()
    if waits:
        event.synchronize()
    host.tolist()


def writes_on_the_host(stream: Stream, *, waits: bool) -> None:
    host = device_of(CPU).host_memory(8, torch.float32).zero_()
    device_of(CPU).copy_from_host(host, always=True)
    if waits:
        device_of(CPU).synchronize()
    host.fill_(2)


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (reads_what_is_written, "read after write"),
        (writes_what_is_read, "write after read"),
        (uses_new_memory_elsewhere, "write after write"),
        (frees_what_is_read, "use after free"),
        (frees_by_a_resize, "use after free"),
        (reads_on_the_host, "read after write"),
        (writes_on_the_host, "write after read"),
    ],
)
def test_two_operations_race_unless_a_wait_orders_them(act: Callable[..., None], kind: str) -> None:
    assert kind in kinds_of(lambda stream: act(stream, waits=False))
    assert kinds_of(lambda stream: act(stream, waits=True)) == []


@pytest.mark.parametrize(
    ("first", "second", "races"),
    [
        (slice(0, 4), slice(4, 8), False),
        (slice(0, 5), slice(4, 8), True),
        (slice(0, 8, 2), slice(1, 8, 2), False),
        (slice(0, 8, 2), slice(2, 3), True),
    ],
)
def test_only_operations_on_the_same_bytes_race(first: slice, second: slice, races: bool) -> None:
    def act(stream: Stream) -> None:
        x = torch.zeros(8)
        stream.wait_for_current()
        with stream.as_current():
            x[first].fill_(1)
        x[second].fill_(2)
        stream.record_event().wait()

    assert bool(kinds_of(act)) == races
