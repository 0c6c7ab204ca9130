"""Hooks on all modules and optimizers run on the rank that has registered them, and there only."""

import torch
from torch import nn
from torch.nn.modules import module
from torch.optim import optimizer
from torch.utils.hooks import RemovableHandle

import echelon as ec


def counts_its_own_hooks(world: ec.World) -> tuple[list[str], int]:
    ran: list[str] = []
    handles: list[RemovableHandle] = [
        module.register_module_forward_hook(lambda *_: ran.append("forward")),
        module.register_module_full_backward_hook(lambda *_: ran.append("backward")),
        optimizer.register_optimizer_step_pre_hook(lambda *_: ran.append("before step")),
        optimizer.register_optimizer_step_post_hook(lambda *_: ran.append("after step")),
    ]
    world.group.barrier()  # all ranks have registered theirs
    layer = nn.Linear(2, 1)
    stepper = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    if world.rank == 0:
        stepper.step()
    world.group.barrier()
    for handle in handles:
        handle.remove()
    layer(torch.ones(1, 2))
    return ran, world.step


def test_each_rank_runs_the_hooks_that_it_has_registered() -> None:
    forward_and_back = ["forward", "backward"]
    first, *others = ec.run(counts_its_own_hooks, 3)
    assert first == (["forward", "backward", "before step", "after step"], 1)
    assert others == [(forward_and_back, 0)] * 2


def runs_a_module(world: ec.World) -> None:
    nn.Linear(1, 1)(torch.ones(1))


def test_a_hook_of_the_caller_runs_on_every_rank_and_is_there_afterwards() -> None:
    ran: list[type[nn.Module]] = []
    handle = module.register_module_forward_hook(lambda layer, *_: ran.append(type(layer)))
    try:
        ec.run(runs_a_module, 2)
        assert ran == [nn.Linear] * 2
        nn.Identity()(torch.ones(1))
        assert ran[2:] == [nn.Identity]
    finally:
        handle.remove()
