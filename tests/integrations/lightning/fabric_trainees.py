"""What the ranks of tests of Fabric run, as in ``trainees.py``."""

import gc
import sys
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy
from torch import nn

import echelon as ec
import echelon.c10d
from echelon.integrations.lightning import EchelonFabricStrategy
from tests.integrations.lightning.trainees import WORLD_SIZE, TiedNet, batches, main, refusal

PLAIN = ("gloo", "echelon")  # backends of Lightning's own DDP


def fabric_strategy_of(name: str) -> Any:
    """A strategy of Fabric by its name here."""
    if name in PLAIN:
        return DDPStrategy(process_group_backend=name)
    if name == "fsdp":
        return EchelonFabricStrategy("fsdp", units=ec.units.by_type(nn.Linear), min_num_params=0)
    return name


def fabric_pair(strategy: str, path: str, epochs: int = 2, resumes: bool = False) -> Any:
    """Two models with an optimizer each, accumulation, clipping; saved after each epoch."""
    result = trained_pair(strategy, path, epochs, resumes)
    if strategy in PLAIN:
        # A group of gloo may wait for ever if it ends with a model that outlives it on one rank.
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
    return result


def trained_pair(strategy: str, path: str, epochs: int, resumes: bool) -> Any:
    """As ``fabric_pair``; the group of the models stays."""
    is_plain = strategy in PLAIN
    torch.set_default_dtype(torch.float64)  # into which Fabric turns the outputs of a model
    devices: Any = WORLD_SIZE if is_plain else "auto"
    fabric = L.Fabric(
        accelerator="cpu", devices=devices, strategy=fabric_strategy_of(strategy),
        precision="64-true",
    )  # fmt: skip
    fabric.launch()
    fabric.seed_everything(5, verbose=False)
    net, critic = TiedNet(0.0), nn.Linear(8, 1)
    trained = [param for param in net.parameters() if param.requires_grad]
    net, first = fabric.setup(net, torch.optim.AdamW(trained, lr=1e-2))
    critic, second = fabric.setup(critic, torch.optim.SGD(critic.parameters(), lr=1e-2))
    samples = fabric.setup_dataloaders(batches(12 // WORLD_SIZE, 96))
    state = {"net": net, "critic": critic, "first": first, "second": second, "epoch": 0, "step": 0}
    if resumes:
        fabric.load(path, state)
    norms, start = [], int(state["epoch"])
    for _ in range(start):
        next(iter(samples))  # counts the epoch, which decides the order
    for epoch in range(start, epochs):
        for i, (x, y) in enumerate(samples):
            synced = i % 2 == 1
            with (
                fabric.no_backward_sync(net, enabled=not synced),
                fabric.no_backward_sync(critic, enabled=not synced),
            ):
                output = net(x)
                fabric.backward(nn.functional.mse_loss(output, y) + critic(output).square().mean())
            if synced:
                norms.append(float(fabric.clip_gradients(net, first, max_norm=0.1)))
                fabric.clip_gradients(critic, second, clip_val=0.01)
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
        state["epoch"] = epoch + 1
        if not is_plain:
            fabric.save(path, state)
    of_strategy = fabric.strategy.get_module_state_dict
    weights = {**of_strategy(net._forward_module), **of_strategy(critic._forward_module)}
    return {"weights": {name: value.clone() for name, value in weights.items()}, "norms": norms}


def fabric_pairs(*strategies: str) -> Any:
    return {strategy: fabric_pair(strategy, f"{strategy}.ckpt") for strategy in strategies}


def fabric_refusals(path: str) -> dict[str, str]:
    """What cannot work in Fabric."""
    fabric = L.Fabric(accelerator="cpu", strategy="echelon_fsdp")
    fabric.launch()
    model = fabric.setup(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.save({"optimizer": optimizer.state_dict()}, f"{path}-{fabric.global_rank}")
    fabric.save(path, {"model": model, "epoch": 1})
    return {
        "filter": refusal(lambda: fabric.save(path, {"model": model}, filter={"model": print})),
        "no state": refusal(lambda: fabric.load(path)),
        "no value": refusal(lambda: fabric.load(path, {"model": model, "iteration": 0})),
        "file": refusal(lambda: fabric.load(f"{path}-0", {"optimizer": optimizer})),
        "plain": refusal(lambda: fabric.strategy._backward_sync_control.no_backward_sync(
            nn.Linear(1, 1), True)),
    }  # fmt: skip


if __name__ == "__main__":
    main(globals(), *sys.argv[1:])
