"""A hundred flipped bits and twenty cuts, at random places of all files, in some layouts."""

import random
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoint.damage import (
    Damage,
    check_damages,
    cut,
    extra,
    flip,
    missing,
    swap,
    tensor_at,
)

NUM_FLIPS, NUM_CUTS = 100, 20
PARTS = 10  # so that a test takes seconds


def damages(layout: str, part: int, step: Path) -> list[Damage]:
    """Those of one part: bits of every file alike, long or short, and cuts."""
    draw = random.Random(f"{layout} {part}")
    files = sorted(path.name for path in step.iterdir())
    sizes = {file: (step / file).stat().st_size for file in files}
    found = []
    for i in range(NUM_FLIPS // PARTS):
        file = files[i % len(files)]
        bit = draw.randrange(sizes[file] * 8)
        found.append(flip(file, bit, tensor_at(step, file, bit // 8)))
    for _ in range(NUM_CUTS // PARTS):
        file = draw.choice(files)
        found.append(cut(file, draw.randrange(sizes[file])))
    file = files[part % len(files)]
    data = [name for name in files if name != "manifest.json"]
    found += [missing(file), extra(f"{file}.part"), swap(file)]
    if len(data) > 1:
        found.append(swap(*draw.sample(data, 2)))
    return found


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("layout", ["plain", "ddp2", "fsdp3-rows", "hybrid4", "pp2"])
def test_a_damage_is_named_and_changes_nothing_and_the_step_before_is_loaded(
    layout: str, part: int, tmp_path: Path
) -> None:
    check_damages(layout, tmp_path, partial(damages, layout, part))
