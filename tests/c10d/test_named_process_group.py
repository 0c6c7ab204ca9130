"""What c10d learns from a process group about itself."""

import pytest
import torch
import torch.distributed as dist

import echelon as ec
from echelon.errors import UnsupportedError


def describes_its_group(world: ec.World) -> tuple[str, str, list[str], float]:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(UnsupportedError, match="tensors on cpu, not on cuda"):
        group._get_backend(torch.device("cuda"))
    assert group._get_backend(torch.device("cpu")) is group
    return (
        group.name(),
        group.group_name,
        [device.type for device in group._device_types],
        group.size() - group.rank(),
    )


def test_a_group_knows_its_backend_its_name_and_its_devices() -> None:
    assert ec.run(describes_its_group, 2) == [
        ("echelon", "0", ["cpu"], 2),
        ("echelon", "0", ["cpu"], 1),
    ]
