"""Whole checkpoints with random changes, through ``load``, for ``ECHELON_FUZZ_S`` seconds in all.

Whatever they hold, they are loaded or refused by an error of ours, in time and memory; what is
refused has changed nothing.
"""

from __future__ import annotations

import copy
import os
import random
import resource
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.comm.streams import device_of
from echelon.comm.world import World
from echelon.errors import CheckpointError
from tests.checkpoint.hostile_steps import CANARY, Targets, save_good
from tests.checkpoint.manifests import edited, sealed
from tests.checkpoint.whole import check_equal

SECONDS = float(os.environ.get("ECHELON_FUZZ_S", "30"))
PART_S = 30.0
MOST_S, MOST_NBYTES = 2.0, 200 * 2**20
LARGE = 2**20  # bytes; of what is larger nothing more is made
ADDRESSES = 2**33  # bytes that the process may map

Draw = random.Random

# What stands in place of something else.
POOL: list[Any] = [None, True, False, 0, 1, -1, 2**31, 2**53, 2**60, 2**63, 10**18, 1e308, "", "a"]
POOL += [
    "..",
    "/",
    "own/1/a",
    "own",
    "rng",
    "model",
    "F32",
    "BOOL",
    "C64",
    "C128",
    "$tensor",
    [],
    {},
]
POOL += [[[]], {"$tensor": "rows"}, {"$like": "F32"}, {"$whole": "F64"}, {"$number": ["F32", 1]}]
POOL += [{"$tuple": [1]}, {"$dict": [[1, 2]]}, {"$set": [1]}, {"$bytes": "AA=="}, {"by_rank": [1]}]


def places(found: Any) -> list[tuple[Any, Any]]:
    """Every container in a JSON value with every key in it."""
    keys = list(found) if isinstance(found, dict) else range(len(found))
    inner = [found[key] for key in keys]
    deeper = [place for one in inner if isinstance(one, dict | list) for place in places(one)]
    return [(found, key) for key in keys] + deeper


def change_json(found: Any, draw: Draw) -> None:
    """A few members of the manifest replaced, exchanged, removed, doubled or nested."""
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        everywhere = places(found)
        if not everywhere:
            return
        holder, key = draw.choice(everywhere)
        other, other_key = draw.choice(everywhere)
        how = draw.randrange(7)
        value = holder[key]
        if how == 0:
            holder[key] = copy.deepcopy(draw.choice(POOL))
        elif how == 1:
            holder[key] = copy.deepcopy(other[other_key])
        elif how == 2:
            del holder[key]
        elif how == 3 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(value))
        elif how == 4 and isinstance(holder, dict):
            holder[draw.choice(["", "x", "own/1/a", *map(str, holder)])] = copy.deepcopy(value)
        elif how == 5 and isinstance(value, int):
            holder[key] = value + draw.choice((-1, 1, 2**32, -(2**32), value))
        else:
            holder[key] = draw.choice(([value], {"value": value}, {"$tuple": [value]}, str(value)))


def change_bytes(data: bytes, draw: Draw) -> bytes:
    """A few bytes changed, cut out, doubled or moved."""
    for _ in range(draw.choice((1, 1, 2, 8))):
        begin = draw.randrange(len(data) + 1)
        end = min(len(data), begin + draw.choice((1, 1, 4, 64)))
        change = draw.choice(
            (b"", bytes([draw.randrange(256)]), data[begin:end] * 2, b"{", b"[" * 9)
        )
        data = data[:begin] + change + data[end:]
    return data


def of_manifest(step: Path, draw: Draw) -> None:
    path = step / "manifest.json"
    path.write_bytes(edited(path.read_bytes(), lambda found: change_json(found, draw)))


def of_sealed_bytes(step: Path, draw: Draw) -> None:
    path = step / "manifest.json"
    begin = len(b'{"checksum":"') + 16 + len(b'",')
    path.write_bytes(sealed(change_bytes(path.read_bytes()[begin:], draw)))


def of_bytes(step: Path, draw: Draw) -> None:
    path = draw.choice(sorted(step.iterdir()))
    path.write_bytes(change_bytes(path.read_bytes(), draw))


def of_files(step: Path, draw: Draw) -> None:
    path = draw.choice(sorted(step.iterdir()))
    how = draw.randrange(4)
    if how == 0:
        path.rename(step / draw.choice(("rank-00001.safetensors", "x", "manifest.json")))
    elif how == 1:
        shutil.copy(path, step / draw.choice(("rank-00001.safetensors", "x", "manifest.json~")))
    elif how == 2:
        path.unlink()
        draw.choice((Path.mkdir, os.mkfifo))(path)
    else:
        os.truncate(path, draw.choice((0, 7, 100, 2**33)))


CHANGES: list[Callable[[Path, Draw], None]] = [
    *[of_manifest] * 6,
    of_sealed_bytes,
    of_bytes,
    of_files,
]


def change(step: Path, draw: Draw) -> None:
    """One more change, where an earlier one has left something to change."""
    files = [step / "manifest.json", *step.iterdir()]
    if all(path.is_file() and path.stat().st_size < LARGE for path in files):
        try:
            draw.choice(CHANGES)(step, draw)
        except (ValueError, KeyError):  # the manifest is no JSON any more
            return


def plain(state: list[Any]) -> list[Any]:
    """Parameters and the state of the optimizer."""
    model, optimizer, _ = state
    return [{key: v for key, v in model.items() if isinstance(v, torch.Tensor)}, optimizer]


def fuzz(world: World, folder: Path, seed: int, seconds: float) -> dict[str, int]:
    """Load changed checkpoints until time is up; how many, by outcome."""
    good = save_good(folder / "good")
    ec.load(folder / "good", **Targets(1).given)
    before = device_of(torch.device("cpu")).memory_peak()
    warnings.simplefilter("ignore")  # of what was passed over
    # A defect must not take the memory of the machine.
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    counts: dict[str, int] = {}
    end_s = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end_s:
        number += 1
        case = f"{seed}-{number}"
        draw = Draw(case)
        root = folder / "run"
        shutil.copytree(folder / "good", root)
        for _ in range(draw.choice((1, 1, 2))):
            change(root / good.name, draw)
        targets = Targets(1)
        state = copy.deepcopy(targets.state())
        start_s = time.process_time()
        strict = draw.random() < 0.8
        try:
            ec.load(root, strict=strict, fallback=draw.random() < 0.2, **targets.given)
            outcome = "loaded"
        except CheckpointError as error:
            outcome = type(error).__name__
            found, expected = targets.state(), state
            if "does not take its state" in str(error):  # others may have taken theirs before
                found, expected = plain(found), plain(expected)
            check_equal(found, expected, case)
        except Exception as error:
            error.add_note(f"case {case}")
            raise
        counts[outcome] = counts.get(outcome, 0) + 1
        assert time.process_time() - start_s < MOST_S, case
        assert device_of(torch.device("cpu")).memory_peak() - before < MOST_NBYTES, case
        shutil.rmtree(root)
    return counts


@pytest.mark.parametrize("part", range(max(1, round(SECONDS / PART_S))))
def test_whatever_a_checkpoint_holds_it_is_loaded_or_refused(part: int, tmp_path: Path) -> None:
    seconds = min(PART_S, SECONDS)
    counts = ec.run(fuzz, 1, "processes", args=(tmp_path, part, seconds))[0]
    assert sum(counts.values()) > seconds  # more than one in a second
    assert counts["CheckpointCorrupt"] > 0
    assert not (tmp_path / CANARY).exists()
