"""What docs/data.md shows runs, and is right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import echelon as ec
from echelon.comm.world import World

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
NAMES = ["streams", "mixture", "packing", "token_mean", "shared", "evaluation"]
SHOWN = {
    "streams": "",
    "mixture": "tensor([  0,   1, 100,   2, 101,   3])",
    "packing": "",
    "shared": "row 3",
    "evaluation": "64., 81.])",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_a_script_of_the_page_runs(tmp_path: Path, name: str) -> None:
    script = tmp_path / f"{name}.py"
    script.write_text(dict(zip(NAMES, BLOCKS, strict=True))[name])
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    assert SHOWN[name] in result.stdout
    if name == "streams":
        assert ec.steps(tmp_path / "runs" / "stream") == [20, 30]  # 15 batches in each of 2 epochs


def test_the_stream_of_the_page_has_two_epochs_however_often_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    counted = "        step += 1\n"
    block = BLOCKS[NAMES.index("streams")]
    assert block.count(counted) == 1
    block = block.replace(counted, f"{counted}        if step == stop: return step\n")
    block = block.replace("\n\nif __name__", "    return step\n\nif __name__")
    names: dict[str, Any] = {"__name__": "page", "stop": 25}
    exec(block, names)
    assert ec.run(names["main"], 1) == [25]
    names["stop"] = 0
    assert ec.run(names["main"], 2) == [30, 30]  # on other ranks
    assert ec.run(names["main"], 1) == [30]  # and all of them are over


# Of each rank, in each microbatch.
TARGETS = [[3, 1], [5, 2]]


def accumulates(world: World) -> torch.Tensor:
    names: dict[str, Any] = {"torch": torch}
    exec(BLOCKS[NAMES.index("token_mean")], names)
    torch.manual_seed(0)
    model = ec.DDP(torch.nn.Linear(3, 1).double(), world.group)
    counts = TARGETS[world.rank]
    losses = []
    for i, count in enumerate(counts):
        x, y = data(world.rank, i, count)
        losses.append(mse_loss(model(x), y, reduction="sum"))
    for i, loss in enumerate(names["token_mean"](losses, counts, world.group)):
        if i + 1 < len(losses):
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    return gradient.clone()


def data(rank: int, i: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + i)
    return (
        torch.randn(count, 3, dtype=torch.float64, generator=generator),
        torch.randn(count, 1, dtype=torch.float64, generator=generator),
    )


def test_the_mean_over_tokens_is_that_of_one_process() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    parts = [data(r, i, n) for r, counts in enumerate(TARGETS) for i, n in enumerate(counts)]
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))
    mse_loss(model(x), y).backward()
    for gradient in ec.run(accumulates, 2):
        torch.testing.assert_close(gradient, model.weight.grad)  # sums have another order
