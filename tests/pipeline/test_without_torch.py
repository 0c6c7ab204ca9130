"""Schedules are data: the files that know only them do without torch. As in tests.architecture."""

import subprocess
import sys
from functools import cache

import pytest

from tests.architecture.sources import (
    Modules,
    imported_modules,
    imported_names,
    package_of,
    read_modules,
)

# These, and whatever they import.
WITHOUT_TORCH = {
    "pipeline.splitting.partition",
    "pipeline.schedules.action_lists",
    "pipeline.schedules.check",
    "pipeline.schedules.choose",
    "pipeline.schedules.controllable",
    "pipeline.schedules.costs",
    "pipeline.schedules.ir",
    "pipeline.schedules.looped",
    "pipeline.schedules.render",
    "pipeline.schedules.passes",
    "pipeline.schedules.dataflow",
    "pipeline.schedules.walk",
    "pipeline.schedules.families",
    "pipeline.schedules.simulate",
    "pipeline.schedules.vshaped",
}


def needs_torch(modules: Modules) -> list[str]:
    """Modules of WITHOUT_TORCH that import torch, or a module of this package that does."""
    sentences = []
    imports = cache(lambda name: imported_modules(modules, name, types=False))
    names = cache(lambda name: list(imported_names(modules[name], types=False)))
    for name in sorted(WITHOUT_TORCH & set(modules)):
        reached, waiting = {name}, [name]
        while waiting:
            found = imports(waiting.pop()) - reached
            reached |= found
            waiting += found
        for other in sorted(reached):
            if any(dotted.split(".")[0] == "torch" for dotted in names(other)):
                way = "" if other == name else f" by way of {other}"
                sentences.append(f"{name} imports torch{way}; a schedule is data and needs none")
    return sentences


@pytest.mark.slow
def test_schedules_need_no_torch() -> None:
    modules = read_modules()
    assert needs_torch(modules) == []
    assert set(modules) >= WITHOUT_TORCH


def test_torch_behind_a_schedule_is_named_with_the_way_to_it() -> None:
    modules = package_of(
        pipeline__schedules__ir="import torch.nn",
        pipeline__schedules__check=(
            "from echelon.pipeline.schedules import ir\nfrom echelon import ranges"
        ),
        ranges="def late():\n    from torch import Tensor",
        pipeline__execute="import torch",
    )
    sentence = "imports torch{}; a schedule is data and needs none"
    assert needs_torch(modules) == [
        f"pipeline.schedules.check {sentence.format(' by way of pipeline.schedules.ir')}",
        f"pipeline.schedules.check {sentence.format(' by way of ranges')}",
        f"pipeline.schedules.ir {sentence.format('')}",
    ]


def test_a_schedule_is_made_and_simulated_without_torch() -> None:
    code = (
        "import sys, echelon as ec; "
        "print(ec.pipeline.simulate(ec.pipeline.schedule('1f1b', 2, 4, 2)).makespan, "
        "'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["15.0", "False"]
