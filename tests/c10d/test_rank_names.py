"""Names of torch.distributed mean something else to simulated ranks, and only to them."""

import builtins
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import echelon as ec


def tells_its_variables(world: ec.World) -> dict[str, str]:
    world.group.barrier()  # others run meanwhile
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: os.environ[name] for name in names}


def test_each_rank_has_the_variables_of_torchrun_and_the_caller_none() -> None:
    assert "RANK" not in os.environ
    first, second = ec.run(tells_its_variables, 2)
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert {**first, "RANK": "", "LOCAL_RANK": ""} == {**second, "RANK": "", "LOCAL_RANK": ""}
    assert first["WORLD_SIZE"] == first["LOCAL_WORLD_SIZE"] == "2"
    assert "RANK" not in os.environ


def runs_a_world_of_its_own(world: ec.World) -> tuple[list[int], int]:
    dist.init_process_group("gloo")
    inner = ec.run(knows_its_size, 3)
    total = torch.tensor([dist.get_world_size()])
    dist.all_reduce(total)
    return inner, int(total)


def knows_its_size(world: ec.World) -> int:
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_world_size()


def test_a_rank_may_start_ranks_of_its_own() -> None:
    assert ec.run(runs_a_world_of_its_own, 2) == [([3, 3, 3], 4)] * 2


def multiplies(world: ec.World) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (world.size,))
    matrix = torch.arange(24.0).reshape(6, 4)
    sharded = distribute_tensor(matrix, mesh, [Shard(0)])
    result = sharded @ sharded.T  # the cache of shardings must not give another rank's mesh
    assert result.device_mesh is mesh
    return result.full_tensor()


def test_meshes_of_ranks_differ_so_caches_give_none_of_another_rank() -> None:
    matrix = torch.arange(24.0).reshape(6, 4)
    for product in ec.run(multiplies, 3):
        assert torch.equal(product, matrix @ matrix.T)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")  # torch has lists of names
def test_the_breakpoint_of_torch_opens_the_debugger_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = ["rank 2", "p value", "rank 1", "p value", "c"]
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return commands.pop(0)

    def main(world: ec.World) -> float:
        dist.init_process_group("gloo")
        value = torch.full((1,), dist.get_rank() + 5.0)
        dist.breakpoint(rank=1)
        dist.all_reduce(value)
        dist.destroy_process_group()
        return value.item()

    monkeypatch.setattr(builtins, "input", answer)
    assert ec.run(main, 3) == [18.0] * 3
    output = capsys.readouterr().out
    assert "-> dist.all_reduce(value)\n" in output
    assert "tensor([7.])\n" in output
    assert "tensor([6.])\n" in output
    assert prompts[:2] == ["(Pdb rank 1) ", "(Pdb rank 2) "]
    assert "ATTENTION" not in output


PROGRAM = """
import torch
import echelon as ec

def main(world):
    torch.distributed.init_process_group("gloo")
    from torch.distributed.nn import functional  # the first to come imports it
    x = torch.full((2,), world.rank + 1.0, requires_grad=True)
    functional.all_reduce(x * x).sum().backward()
    return float(x.grad[0])

print(ec.run(main, 3))
"""


@pytest.mark.slow
def test_functions_with_gradients_reduce_in_the_group_of_each_rank() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "[6.0, 12.0, 18.0]\n"
