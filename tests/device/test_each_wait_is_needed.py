"""Each wait of the code of one rank is left out once, and then something races.

The waits are those that programs are seen to issue, so a new wait is among them. Those that need
peers which answer are in ``test_ranks``.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import pytest

from echelon.testing.device.report import Frame
from tests.device.compiler import needs_compiler
from tests.device.programs import PROGRAMS
from tests.device.waits import never_found, places, room, run, site

pytestmark = needs_compiler
# Programs that together issue all waits, by the package of the waits.
WITNESSES = {
    "ddp": [
        "DDP rank 1, batch norm",
        "DDP: aborts",
        "DDP rank 1",
        "DDP batch norm, small buckets",
        "DDP: freezes",
    ],
    "fsdp": [
        "FSDP default: aborts",
        "FSDP default: drops_the_model",
        "FSDP default: drops_the_model_in_a_forward",
        "FSDP default: gives_states",
        "FSDP offloaded: aborts",
        "FSDP offloaded: drops_the_model_in_a_forward",
        "FSDP offloaded: gives_states",
        "FSDP rank 2, rows",
        "FSDP rows, prefetched: drops_the_model_in_a_forward",
        "FSDP rows, prefetched: keeps_gradients",
        "FULL_SHARD flat OPTIMIZER bf16 2",
        "HYBRID_SHARD flat NONE f32",
        "HYBRID_SHARD flat OPTIMIZER f32",
        "NO_SHARD flat NONE bf16 0",
        "NO_SHARD flat OPTIMIZER f32 0",
    ],
    "": [
        "DDP: freezes",
        "FSDP default: clips",
        "FSDP default: gives_states",
        "FSDP default: guards",
        "FSDP default: scales",
        "FSDP offloaded: gives_states",
        "HYBRID_SHARD flat NONE f32",
    ],
}
# Waits that another one covers in every program here.
COVERED = {
    'ddp/replicas.py, broadcast_parameters: group.broadcast(members[0], src, label="parameters")': (
        "a later call of the communicator is waited for before a forward reads the parameters"
    ),
    "fsdp/storage_kinds.py, GatheredStorage._allocate: devices.unshard_stream.wait_for_current()": (
        "`reshard`, which follows at once, waits as well"
    ),
    "fsdp/gradients.py, Reduction.finish: self._devices.reduce_stream.wait_for_current()": (
        "the next reduction waits as well before its stream hands out memory"
    ),
}


@cache
def programs_of(part: str) -> dict[Frame, list[str]]:
    """By wait in a part of the package, the programs that issue it."""
    others = {key for key in WITNESSES if key != part}
    programs = defaultdict(list)
    for name in WITNESSES[part]:
        device = run(PROGRAMS[name])
        assert str(device.report()) == "no races"
        for place in places(device.waits):
            if room(place) not in others and room(place).startswith(part):
                programs[place].append(name)
    return programs


@pytest.mark.parametrize("part", WITNESSES)
def test_each_wait_is_needed(part: str) -> None:
    silent = {
        site(place)
        for place, names in programs_of(part).items()
        if never_found(place, [PROGRAMS[name] for name in names])
    }
    assert silent == {place for place in COVERED if part and place.startswith(part)}


def test_at_least_30_waits_are_left_out() -> None:
    assert sum(len(programs_of(part)) for part in WITNESSES) >= 30
