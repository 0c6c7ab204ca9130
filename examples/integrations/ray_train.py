"""FSDP of this library in the workers of Ray Train, which restarts them from the newest checkpoint.

RAY_USAGE_STATS_ENABLED=0 python examples/integrations/ray_train.py runs/ray
"""

import sys
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import echelon as ec
from echelon.integrations.ray import EchelonConfig, report, resume

STEPS = 20


def train(config: dict[str, float]) -> None:
    with ec.init() as world:
        torch.manual_seed(0)
        model = ec.FSDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)), world.group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
        loaded = resume(model=model, optimizer=optimizer)
        for step in range(loaded.step + 1 if loaded else 1, STEPS + 1):
            inputs = torch.randn(32, 16)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                report({"loss": loss.item()}, step=step, model=model, optimizer=optimizer)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    result = TorchTrainer(
        train,
        train_loop_config={"lr": 1e-2},
        torch_config=EchelonConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="example",
            storage_path=str(Path(sys.argv[1]).resolve()),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    ray.shutdown()
    print("loss", result.metrics["loss"], "checkpoint", result.checkpoint.path)
