"""Each wait of the code is left out once, and then the detector finds a race.

The waits are those that programs are seen to issue, so a new wait is among them.
"""

from __future__ import annotations

import linecache
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import echelon
from tests.device.detector import Detector
from tests.device.played_device import played_devices
from tests.device.programs import PROGRAMS

_SOURCE = Path(echelon.__file__).parent
# Programs that together issue all waits, by what the places of the waits begin with.
WITNESSES = {
    "ddp": ["DDP rank 1, batch norm", "DDP: aborts", "DDP rank 1", "DDP: freezes"],
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
    "checkpoint": ["saves of DDP", "saves of FSDP offloaded"],
    "pipeline": [
        "pipeline 1f1b 2",
        "pipeline interleaved 3",
        "pipeline gpipe of large messages",
        "pipeline zb-v of large messages",
    ],
}
# Waits that another one covers in every program here.
COVERED = {
    'ddp/replicas.py, broadcast_parameters: group.broadcast(members[0], src, label="parameters")': (
        "a later call of the communicator is waited for before a forward reads the parameters"
    ),
    "fsdp/storage_kinds.py, _allocate: devices.unshard_stream.wait_for_current()": (
        "`reshard`, which follows at once, waits as well"
    ),
}


def site_of(place: str) -> str:
    """A place without its number: the file, the function and the line itself."""
    file, function, number = place.split(":")
    return f"{file}, {function}: {linecache.getline(str(_SOURCE / file), int(number)).strip()}"


@cache
def seen(part: str) -> dict[str, Detector]:
    """What the detector has seen of the programs of a part."""
    detectors = {name: Detector() for name in WITNESSES[part]}
    with played_devices():
        for name, detector in detectors.items():
            PROGRAMS[name](detector)
            assert detector.findings == []
    return detectors


def places_of(part: str) -> dict[str, list[str]]:
    """By place of a wait in a part of the package, the programs that issue it."""
    programs = defaultdict(list)
    others = {key for key in WITNESSES if key and not part}
    for name, detector in seen(part).items():
        for place in detector.places:
            room = place.partition("/")[0]
            if "/" in place and place.startswith(part) and room not in others:
                programs[place].append(name)
    return programs


def is_found(place: str, program: str) -> bool:
    detector = Detector(dropped=place)
    with played_devices():
        PROGRAMS[program](detector)
    return bool(detector.findings or detector.still_used())


@pytest.mark.parametrize("part", WITNESSES)
def test_each_wait_is_needed(part: str) -> None:
    silent = {
        site_of(place)
        for place, programs in places_of(part).items()
        if not any(is_found(place, program) for program in programs)
    }
    assert silent == {site for site in COVERED if site.startswith(part or "-")}


# Work that the current stream may do as well, and where it only overlaps less.
MAY_BE_CURRENT = {
    "fsdp/storage_kinds.py, _allocate: with devices.unshard_stream.as_current():",
    "fsdp/storage_kinds.py, refresh: with stream.as_current():",
}


def test_work_that_leaves_its_stream_is_found() -> None:
    programs = defaultdict(list)
    for name, detector in seen("fsdp").items():
        for place in detector.stream_places:
            programs[place].append(name)
    silent = {
        site_of(place.removeprefix("stream of "))
        for place, names in programs.items()
        if not any(is_found(place, name) for name in names)
    }
    assert silent == MAY_BE_CURRENT


def test_at_least_30_faults_are_planted() -> None:
    assert sum(len(places_of(part)) for part in WITNESSES) >= 30
