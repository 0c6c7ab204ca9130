"""Where the host waits for a device in a step of training, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from echelon import Offload, Strategy
from tests.device.detector import Detector
from tests.device.played_device import played_devices, watched
from tests.device.programs import BF16, Normed, Training, ddp, fsdp

LATE = "modules/parameters.py:is_yes"  # an answer of the step before
FSDP = {LATE: 1}
# The gathers of the step before have read the host's memory; and gradients, once for each unit.
OFFLOADED = {LATE: 1, "fsdp/local_shard.py:wait_for_unshards": 1, "fsdp/gradients.py:finish": 4}
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
    with played_devices(), watched(Detector()) as detector:
        training = make()
        training.step(4)
        before = Counter(detector.host_waits)
        training.step(1)
    waits: Counter[str] = Counter()
    for place, count in (detector.host_waits - before).items():
        waits[place.rpartition(":")[0]] += count
    assert waits == expected
