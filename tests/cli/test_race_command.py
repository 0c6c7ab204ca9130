"""``echelon race`` names the races of any script; the examples of the page do what it shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.compiler import needs_compiler

pytestmark = [needs_compiler, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


def race(*words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "echelon", "race", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_prefetcher_that_drops_memory_too_early_is_named_with_both_lines() -> None:
    code, text = race("--seeds", "0", "examples/gpu_races.py")
    assert code == 1
    assert "use after free, in memory of 8192 bytes" in text
    assert "loss = model(batch).square().mean()" in text
    assert 'batch = torch.randn(64, 32).pin_memory().to("cuda", non_blocking=True)' in text
    assert "record_stream()" in text
    assert text.endswith("1 race in 2 runs\n")


def test_a_prefetcher_that_records_the_stream_has_no_race() -> None:
    code, text = race("--seeds", "1", "examples/gpu_races.py", "--record")
    assert (code, text.splitlines()[-1]) == (0, "no races in 3 runs")


FSDP2 = """
import os
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to("cuda")
for block in (model[0], model[2], model):
    fully_shard(block)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    loss = model(x.cuda()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)
    print(f"{loss.item():.6f}")
dist.destroy_process_group()
"""


def test_a_script_of_fsdp2_trains_on_two_ranks_with_the_numbers_of_one_process(
    tmp_path: Path,
) -> None:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        rows = [
            torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            for rank in range(2)
        ]
        loss = model(torch.cat(rows)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.6f}")
    script = tmp_path / "train.py"
    script.write_text(FSDP2)
    code, text = race("--ranks", "2", "--seeds", "0", str(script))
    assert code == 0, text
    assert [line for line in text.splitlines() if line in losses] == losses * 2


def test_a_script_that_fails_is_no_script_without_races(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import torch\ntorch.ones(2, device='cuda') + torch.ones(2)\n")
    code, text = race(str(script))
    assert code == 1
    assert "RuntimeError: Expected all tensors to be on the same device" in text
    assert "the script has failed in order eager" in text
