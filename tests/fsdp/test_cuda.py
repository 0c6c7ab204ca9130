"""FSDP on a GPU: over NCCL with one rank, and with simulated ranks on one device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon import Offload
from echelon.world.base import World
from echelon.world.environment import JobEnvironment
from tests.fsdp.models import Block, batch, build, loss_of, train_plain
from tests.world.gloo_ranks import free_port, start

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

STEPS = 2


def on_cuda(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.cuda() for tensor in tensors]


def train(world: World, offload: Offload, layout: str) -> dict[str, Tensor]:
    model = ec.FSDP(
        build().cuda(),
        world.group,
        units=ec.units.by_type(Block),
        min_num_params=0,
        layout=layout,
        offload=offload,
    )
    parameters: list[nn.Parameter] = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    kind = "cuda" if offload is Offload.NONE else "cpu"
    for step in range(STEPS):
        loss_of(model, *on_cuda(batch(step, world.rank))).backward()
        assert {str(p.grad.device).split(":")[0] for p in parameters} == {kind}
        optimizer.step()
        optimizer.zero_grad()
    return model.whole_state_dict()


def train_all(world: World) -> list[dict[str, Tensor]]:
    return [train(world, *case) for case in itertools.product(Offload, ("flat", "rows"))]


def compare(states: list[dict[str, Tensor]], ranks: int) -> None:
    expected, _ = train_plain(ranks, STEPS)
    for state in states:
        for name, value in expected.items():
            # The kernels of the device sum in another order than those of the CPU.
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11, msg=name)


def over_nccl(rank: int, port: int) -> list[Any]:
    from echelon.world.torch_dist.start import connect

    job = JobEnvironment("torchrun", rank, 1, rank, 1, "127.0.0.1", port)
    with connect(job, "nccl", device=torch.device("cuda", 0)) as world:
        return train_all(world)


def test_over_nccl_training_equals_one_process() -> None:
    [(states, _)] = start(over_nccl, 1, (free_port(),))
    if isinstance(states, BaseException):
        raise states
    compare(states, 1)


def test_on_simulated_ranks_of_one_device_training_equals_one_process() -> None:
    for states in ec.run(train_all, 2, device="cuda"):
        compare(states, 2)
