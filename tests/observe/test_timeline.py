import re
from pathlib import Path

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.observe import Recorder, RunInfo, read_metrics
from tests.worlds import run_world

LAYERS, UNIT = 4, (32 * 32 + 32) * 4


def train(world: ec.World, folder: Path, strategy: ec.Strategy) -> None:
    """Three steps, the last of which is watched."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(LAYERS)])
    rule = ec.units.by_type(nn.Linear)
    model = ec.FSDP(layers, world.group, units=rule, strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(world, folder, RunInfo(total_steps=3)) as recorder:
        for step in range(1, 4):
            loss = model(torch.full((2, 32), world.rank + 1.0)).square().mean()
            loss.backward()
            optimizer.step()
            recorder.step(step, loss.item(), num_tokens=2)
            optimizer.zero_grad()
            if step == 2:
                recorder.watch(lambda: model.memory_stats(optimizer).by_category())


@pytest.mark.parametrize(
    ("strategy", "most_whole"), [("FULL_SHARD", 2 * UNIT), ("SHARD_GRAD_OP", LAYERS * UNIT)]
)
def test_the_page_shows_what_a_step_of_fsdp_holds(tmp_path: Path, strategy, most_whole) -> None:
    folder = tmp_path / "run"
    run_world("gloo", train, 2, (folder, ec.Strategy[strategy]))
    [line] = [line for line in read_metrics(folder) if line["kind"] == "memory"]
    assert (line["step"], line["rank"]) == (3, 0)
    nbytes, part = line["nbytes"], LAYERS * UNIT // 2
    assert list(nbytes) == ["shards", "gathered", "gradients", "slots", "optimizer"]
    assert {len(values) for values in nbytes.values()} == {len(line["time_s"])}
    assert line["time_s"] == sorted(line["time_s"])
    assert set(nbytes["shards"]) == {part}
    assert set(nbytes["slots"]) == {UNIT}
    assert set(nbytes["optimizer"]) == {2 * part + 4 * 2 * LAYERS}
    assert (nbytes["gathered"][0], nbytes["gathered"][-1]) == (0, 0)
    assert max(nbytes["gathered"]) == most_whole
    page = (folder / "report.html").read_text()
    assert "<h2>Memory over step 3</h2>" in page
    assert re.search(r'"name":"gathered"', page)
