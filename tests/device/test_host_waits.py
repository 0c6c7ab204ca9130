"""Where the host waits for a device in a step of training, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch

from echelon import Offload, Strategy
from echelon.testing.device import simulated_device
from echelon.testing.device.torch_module import DEVICE
from tests.device.compiler import needs_compiler
from tests.device.programs import BF16, Normed, Training, ddp, fsdp
from tests.device.waits import SOURCE, places

pytestmark = needs_compiler
LATE = "modules/parameters.py, LateAnswer.is_yes"  # an answer of the step before
FSDP = {LATE: 1}
# The gathers of the step before have read the host's memory; and gradients, once for each unit.
OFFLOADED = {
    LATE: 1,
    "fsdp/local_shard.py, ShardDevices.wait_for_unshards": 1,
    "fsdp/gradients.py, Reduction.finish": 4,
}
DDP = {LATE: 4}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (fsdp, FSDP),
        (partial(fsdp, layout="rows"), FSDP),
        (partial(fsdp, strategy=Strategy.HYBRID_SHARD, replicas=2), FSDP),
        (partial(fsdp, offload=Offload.ALL), OFFLOADED),
        (partial(fsdp, offload=Offload.OPTIMIZER, precision=BF16), OFFLOADED),
        (ddp, DDP),
        (partial(ddp, model=Normed), DDP),
    ],
)
def test_the_host_waits_in_a_step_only_where_it_must(
    make: Callable[[], Training], expected: dict[str, int]
) -> None:
    with simulated_device() as device, torch.device(DEVICE):
        training = make()
        training.step(4)
        device.look()
        before = places(device.host_waits)
        training.step(1)
        device.look()
    waits: Counter[str] = Counter()
    for place, count in (places(device.host_waits) - before).items():
        waits[f"{place.file[len(SOURCE) + 1 :]}, {place.function}"] += count
    assert waits == expected
