"""A load into memory that cannot be written changes nothing, on any rank."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import echelon as ec
from echelon.checkpoint import tensors
from echelon.comm import streams
from tests.worlds import run_world


class WithTable(nn.Module):
    """A layer, a table that may lie in a file, and a layer."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.register_buffer("table", table)
        self.last = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) + self.table)


def mapped(path: Path) -> torch.Tensor:
    """Two numbers in a file that is mapped for reading only."""
    np.array([1.0, 2.0], dtype=np.float32).tofile(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of arrays that cannot be written
        return torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r"))


def loads_nothing(world: ec.World, folder: str) -> list[bool]:
    run, own = f"{folder}/run", Path(folder) / f"table-{world.rank}"
    saved = ec.DDP(WithTable(torch.ones(2)), world.group)
    ec.save(run, model=saved, step=1)
    table = mapped(own) if world.rank == 1 else torch.zeros(2)
    model = WithTable(table)
    wrapped = ec.DDP(model, world.group, broadcast_buffers=False, init="trust")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ec.EchelonError, match="'model/table' lies in memory that is mapped for"):
        ec.load(run, model=wrapped, strict=False)
    assert not optimizer.state
    return [torch.equal(before[key], value) for key, value in model.state_dict().items()]


@pytest.mark.slow_for("processes")
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_buffer_mapped_for_reading_on_one_rank_is_named_and_nothing_is_changed(kind, tmp_path):
    for unchanged in run_world(kind, loads_nothing, 2, (str(tmp_path),)):
        assert all(unchanged)


def test_memory_that_can_be_written_is_loaded(tmp_path):
    path = tmp_path / "table"
    np.zeros(2, dtype=np.float32).tofile(path)
    table = torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r+"))
    saved = WithTable(torch.ones(2))
    ec.save(tmp_path / "run", model=saved, step=1)
    model = WithTable(table)
    ec.load(tmp_path / "run", model=model)
    assert torch.equal(model.table, torch.ones(2))
    assert np.fromfile(path, dtype=np.float32).tolist() == [1.0, 1.0]


class Strided(nn.Module):
    """A parameter and a buffer of one element, which are a column of a wider tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1, 6)[:, 0])
        self.register_buffer("shift", torch.randn(1, 6)[:, 0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


def saves_and_loads_one_element(world: ec.World, path: Path) -> None:
    torch.manual_seed(5)
    model = ec.DDP(Strided(), world.group, init="verify")
    assert model.module.scale.stride() == (6,)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.full((2, 1), 1.0 + world.rank)).sum().backward()
    optimizer.step()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    column = torch.arange(4.0)[3::4]
    ec.save(path, step=1, model=model, optimizer=optimizer, column=column)
    with torch.no_grad():
        model.module.scale.zero_()
        model.module.shift.zero_()
    loaded = ec.load(path, model=model, optimizer=optimizer)
    assert all(torch.equal(model.state_dict()[name], saved[name]) for name in saved)
    assert torch.equal(loaded.values["column"], column)


def test_one_element_with_any_stride_is_verified_saved_and_loaded(tmp_path: Path) -> None:
    run_world("threads", saves_and_loads_one_element, 2, (tmp_path / "run",))


class OnADevice:
    """A tensor at an address that the host has reserved, as CUDA reserves those of devices."""

    device = torch.device("cuda", 0)

    def numel(self) -> int:
        return 4

    def data_ptr(self) -> int:
        return 0x7000


def test_memory_of_a_device_is_not_looked_up_among_that_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "maps").write_text("00000000-7fffffffffff ---p 00000000 00:00 0\n")
    monkeypatch.setattr(tensors, "_MAPS", tmp_path / "maps")
    on_a_device: Any = OnADevice()
    tensors.check_writable([("weight", on_a_device)])
    with pytest.raises(ec.errors.ArgumentError, match="'weight' lies in memory"):
        tensors.check_writable([("weight", torch.zeros(1))])


def test_what_is_saved_of_a_device_is_copied_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[torch.Tensor] = []

    class Elsewhere(streams.PlainDevice):
        def is_on_host(self, tensor: torch.Tensor) -> bool:
            return False

        def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
            copied.append(tensor)
            return super().copy_to_host(tensor)

    monkeypatch.setitem(streams.kinds, "cpu", Elsewhere)
    rows = torch.arange(6.0).view(2, 3)
    assert bytes(tensors.bytes_of(rows)) == rows.numpy().tobytes()
    assert len(copied) == 1
