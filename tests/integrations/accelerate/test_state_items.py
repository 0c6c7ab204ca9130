"""``save_state`` and ``load_state``: killed in a save, and resumed on other ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import echelon as ec
from tests.integrations.accelerate.accelerated_training import Training
from tests.integrations.accelerate.test_accelerator import plain, restarted
from tests.integrations.jobs import run_job, start_job

HERE = "tests.integrations.accelerate.test_state_items"
NUM_SAVED = 11  # batches: an epoch of 7, and 4 of the next


class Position:
    """How many batches were taken; registered to be saved."""

    def __init__(self) -> None:
        self.num_batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_batches = state["num_batches"]


def save_and_die(folder: str) -> None:
    """Save a state, and be killed while the next is written."""
    training, position = (
        Training(restarted(), plan="fsdp", options={"min_num_params": 0}),
        Position(),
    )
    accelerator = training.accelerator
    accelerator.register_for_checkpointing(position)
    for number, _ in enumerate(training.steps(3), 1):
        position.num_batches = number
        if number == NUM_SAVED:
            accelerator.save_state(folder)
        if number == NUM_SAVED + 2:
            if accelerator.process_index == 1:
                os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
            accelerator.save_state(folder)


def resume(folder: str, plan: str) -> list[float]:
    training, position = Training(restarted(), plan=plan), Position()
    training.accelerator.register_for_checkpointing(position)
    training.accelerator.load_state(folder)
    training.epoch, skip = divmod(position.num_batches, 7)
    return list(training.steps(3, skip))


@pytest.mark.slow
def test_a_job_killed_in_a_save_goes_on_from_the_state_before_on_other_ranks(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "state")
    job = start_job(f"{HERE}:save_and_die", 2, folder, folder=str(tmp_path))
    job.communicate(timeout=100)
    assert job.returncode != 0
    assert ec.steps(folder) == [0]
    expected, _ = plain()
    for ranks, plan in ((1, "ddp"), (3, "fsdp")):
        for losses in run_job(f"{HERE}:resume", ranks, folder, plan):
            assert losses == pytest.approx(expected[NUM_SAVED:], rel=1e-12)


def test_a_state_replaces_the_one_before_and_has_everything(tmp_path: Path) -> None:
    from accelerate.utils import ProjectConfiguration

    accelerator = restarted()()
    model = accelerator.prepare(nn.Linear(2, 2))
    other = accelerator.prepare(nn.Linear(3, 3))
    optimizer = accelerator.prepare(torch.optim.Adam(model.parameters()))
    accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    before = [value.clone() for m in (model, other) for value in m.parameters()]
    drawn = []
    for _ in range(2):
        folder = Path(accelerator.save_state(tmp_path / "state"))
        drawn.append(torch.rand(1))
    assert [path.name for path in folder.parent.glob("step-*")] == ["step-000000001"]
    for parameter in (*model.parameters(), *other.parameters()):
        parameter.data.zero_()
    accelerator.load_state(tmp_path / "state")
    after = [value for m in (model, other) for value in m.parameters()]
    assert all(map(torch.equal, before, after))
    assert torch.equal(torch.rand(1), drawn[1])

    ec.save(tmp_path / "run", step=7, value=1)
    with pytest.raises(ec.CheckpointError, match=r"holds steps that ec\.save has saved"):
        accelerator.save_state(tmp_path / "run")
    with pytest.raises(ec.CheckpointError, match="holds steps that save_state of Accelerate has"):
        ec.save(tmp_path / "state", step=7, value=1, keep=1)
    assert (ec.steps(tmp_path / "run"), ec.steps(tmp_path / "state")) == ([7], [1])

    naming = ProjectConfiguration(
        str(tmp_path / "project"), automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator = restarted()(project_config=naming)
    accelerator.prepare(nn.Linear(2, 2))
    for _ in range(3):
        accelerator.save_state()
    assert ec.steps(tmp_path / "project" / "checkpoints") == [1, 2]
    accelerator.load_state()
    assert accelerator.save_iteration == 3


# torchdata 0.11 calls it; https://github.com/meta-pytorch/data has no release since.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_stateful_loader_goes_on_where_it_was(tmp_path: Path) -> None:
    from accelerate.utils import DataLoaderConfiguration

    def prepared() -> Any:
        config = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = restarted()(dataloader_config=config)
        return accelerator, accelerator.prepare(DataLoader(range(10)))

    pytest.importorskip("torchdata")
    accelerator, loader = prepared()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    accelerator.save_state(tmp_path)
    accelerator, loader = prepared()
    accelerator.load_state(tmp_path)
    assert next(iter(loader)).item() == 3
