"""In which order FSDP uses its streams: with recording ones in the place of CUDA's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon import Offload
from echelon.comm import streams
from echelon.comm.world import World


class Recording(streams.Stream):
    """Notes what is asked of it: ``G`` the new_stream of gathers, ``R`` that of reductions."""

    queued = True

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self.log.append(f"{self.name}(")
        yield
        self.log.append(")")

    def as_current(self) -> AbstractContextManager[object]:
        return self._inside()

    def wait_for_current(self) -> None:
        self.log.append(f"{self.name} follows")

    def record_event(self) -> streams.StreamEvent:
        return RecordingEvent(self)


class RecordingEvent(streams.StreamEvent):
    def __init__(self, stream: Recording) -> None:
        self.stream = stream

    def wait(self) -> None:
        self.stream.log.append(f"join {self.stream.name}")

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.stream.log.append(f"host waits for {self.stream.name}")


class RecordingDevice(streams.PlainDevice):
    """A device with memory of its own, whose first two streams are recording ones."""

    def __init__(self, names: Iterator[str], log: list[str], device: torch.device) -> None:
        super().__init__(device)
        self.is_host = False
        self._names, self._log = names, log

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return True  # the two are one here

    def current_stream(self) -> streams.Stream:
        name = next(self._names, None)
        return super().current_stream() if name is None else Recording(name, self._log)


def step(world: World, log: list[str], offload: Offload, trains_bias: bool) -> list[str]:
    """One forward and backward of a model that is one unit."""
    linear = nn.Linear(3, 2)
    linear.bias.requires_grad_(trains_bias)
    model = ec.FSDP(linear, world.group, units=ec.units.whole(), min_num_params=0, offload=offload)
    log.clear()

    def listen(event: ec.events.Event) -> None:
        if event.name == "collective.issue":
            log.append(event.facts["op"])

    with ec.events.listen(listen):
        output = model(torch.ones(1, 3)).sum()
        log.append("|")
        output.backward()
    return log


def record(
    patch: pytest.MonkeyPatch, offload: Offload, *, trains_bias: bool = True
) -> tuple[list[str], list[str]]:
    log: list[str] = []
    patch.setitem(streams.kinds, "cpu", partial(RecordingDevice, iter("GR"), log))
    # A rank that is alone shares memory with nobody, so its parts are gathered as over NCCL.
    found: list[Any] = ec.run(step, 1, args=(log, offload, trains_bias))
    at = found[0].index("|")
    return found[0][:at], found[0][at + 1 :]


def test_a_gather_runs_on_its_lane_and_the_module_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, _ = record(monkeypatch, Offload.ALL)
    # The stream follows the optimizer; the gather is issued on it; what is current joins it.
    assert forward[-5:] == ["G follows", "G(", "all_gather_single", ")", "join G"]


def test_memory_is_given_back_after_its_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    _, backward = record(monkeypatch, Offload.ALL)
    # The release comes before the reduction, and its stream follows the backward of the unit.
    assert backward[0] == "G follows"
    assert "G(" not in backward  # the root was not gathered again


def test_gradients_leave_after_they_are_copied_and_the_host_waits_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, backward = record(monkeypatch, Offload.ALL)
    reduction = [one for one in backward if one[0] != "G"]
    assert reduction == [
        "R follows",  # the copy into the slot was current
        *("R(", "reduce_scatter_single", ")"),
        *("R(", ")"),  # the copy to the host
        "join R",  # the next step may use the slot
        "host waits for R",  # before .grad is handed over
    ]


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        (Offload.NONE, ["|"]),
        # Before a forward, when the gathers of the last one are over; and for the gradients.
        (Offload.ALL, ["host waits for G", "|", "host waits for R"]),
    ],
)
def test_without_offload_the_host_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, offload: Offload, expected: list[str]
) -> None:
    forward, backward = record(monkeypatch, offload)
    assert "host waits for G" not in forward[1:]
    waits = [one for one in [*forward, "|", *backward] if one.startswith(("host waits", "|"))]
    assert waits == expected


def test_gathers_of_all_storages_wait_once_for_the_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward, _ = record(monkeypatch, Offload.ALL, trains_bias=False)  # two storages
    assert forward.count("G(") == 2
    assert forward[: forward.index("G(")].count("G follows") == 1
