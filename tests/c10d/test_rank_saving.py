"""A simulated rank may save with DCP's async_save, which then saves at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_ident

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import echelon as ec


def weight_of(model: nn.Linear) -> torch.Tensor:
    assert isinstance(model.weight, DTensor)
    return model.weight.full_tensor().detach()


def saves_and_loads(folder: str) -> bool:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    fully_shard(model)
    saved = weight_of(model).clone()
    saving = dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder)
    for _ in range(3):
        model(torch.ones(2, 6)).sum().backward()
        dist.barrier()
    with torch.no_grad():
        model.weight.zero_()
    saving.result()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    return torch.equal(weight_of(model), saved)


@pytest.mark.filterwarnings("ignore")  # of torch, about asynchronous saves
def test_an_asynchronous_save_of_simulated_ranks_is_the_state_of_its_call(tmp_path: Path) -> None:
    assert ec.run(saves_and_loads, 3, args=(str(tmp_path / "dcp"),)) == [True] * 3


def fails_to_save(folder: str) -> None:
    dist.init_process_group("gloo")
    saving = dcp.async_save({"x": torch.ones(2)}, checkpoint_id=folder)
    with pytest.raises(CheckpointException, match="NotADirectory"):
        saving.result()


@pytest.mark.filterwarnings("ignore")
def test_an_error_of_a_save_is_raised_where_its_result_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ec.run(fails_to_save, 2, args=(str(tmp_path / "file" / "dcp"),))


def test_other_executors_of_ranks_have_threads_and_the_callers_are_as_before() -> None:
    before = ThreadPoolExecutor.submit

    def main(world: ec.World) -> bool:
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(get_ident).result() != get_ident()

    assert ec.run(main, 2) == [True, True]
    assert ThreadPoolExecutor.submit is before
