"""Trainings under Ray Train on a cluster of this machine, for ``test_ray``.

A cluster starts many processes and imports what warns, so it lives in a child:
``python -m tests.integrations.ray.ray_job CASE FOLDER`` ends with its outcome in JSON.
"""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, nn

import echelon as ec
from echelon.integrations import ray as on_ray

STEPS = 12
REPORT_EVERY = 4
Config = dict[str, Any]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def shard(step: int, rank: int, size: int) -> Tensor:
    """The part of a rank of a batch that is the same for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    return batch.chunk(size)[rank]


def trained_weights(model: nn.Module, rank: int, size: int) -> list[float]:
    """Train, and return the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(1, STEPS + 1):
        model(shard(step, rank, size)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([value.flatten() for value in model.parameters()]).tolist()


def keep(config: Config, **outcome: Any) -> None:
    """Leave an outcome of rank 0; Ray's result has only metrics that came with a checkpoint."""
    if torch.distributed.get_rank() == 0:
        Path(config["kept"]).write_text(json.dumps(outcome))


def torch_ddp(config: Config) -> None:
    """PyTorch's DDP as Ray's own documentation writes it; no line is about echelon."""
    context = ray.train.get_context()
    model = ray.train.torch.prepare_model(make_model())
    weights = trained_weights(model, context.get_world_rank(), context.get_world_size())
    keep(config, weights=weights, backend=torch.distributed.get_backend())


def both_ddps(config: Config) -> None:
    """PyTorch's DDP over the group that Ray has made, and ec.DDP beside it."""
    with ec.init() as world:
        theirs = trained_weights(
            ray.train.torch.prepare_model(make_model()), world.rank, world.size
        )
        ours = trained_weights(ec.DDP(make_model(), world.group), world.rank, world.size)
        backends = [torch.distributed.get_backend(), world.backend]
        keep(config, theirs=theirs, ours=ours, backends=backends)


def echelon_fsdp(config: Config) -> None:
    """FSDP that reports every few steps and may be ended at one; it resumes after a restart."""
    with ec.init() as world:
        model = ec.FSDP(make_model(), world.group, min_num_params=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        loaded = on_ray.resume(model=model, optimizer=optimizer)
        first = loaded.step + 1 if loaded else 1
        for step in range(first, config["steps"] + 1):
            loss = model(shard(step, world.rank, world.size)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if loaded is None and world.rank == 1 and step == config.get("killed_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            if loaded is None and world.rank == 1 and step == config.get("raises_at"):
                raise ValueError("boom")
            total = loss.detach()
            world.group.all_reduce(total, "mean")
            if step % REPORT_EVERY == 0:
                metrics = {"loss": total.item(), "step": step, "first": first}
                on_ray.report(metrics, step=step, model=model, optimizer=optimizer)


def fit(train: Any, folder: Path, torch_config: TorchConfig, **options: Any) -> dict[str, Any]:
    """What Ray's result has, or what it raises."""
    kept = folder / f"{train.__name__}.json"
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": STEPS, "kept": str(kept), **options.get("config", {})},
        torch_config=torch_config,
        scaling_config=ScalingConfig(num_workers=options.get("workers", 2)),
        run_config=RunConfig(
            name=options.get("name", train.__name__),
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=options.get("max_failures", 0)),
        ),
    )
    try:
        result = trainer.fit()
    except ray.train.WorkerGroupError as error:
        failures = error.worker_failures.items()
        return {"failures": {rank: f"{type(e).__name__}: {e}" for rank, e in failures}}
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    checkpoint = result.checkpoint and result.checkpoint.path
    return {**(result.metrics or {}), "checkpoint": checkpoint}


def alone(steps: int) -> float:
    """The loss of the last step of one process on whole batches."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(1, steps + 1):
        loss = model(shard(step, 0, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def same_weights(folder: Path) -> Any:
    return {
        "gloo": fit(both_ddps, folder, TorchConfig()),
        "echelon": fit(torch_ddp, folder, on_ray.EchelonConfig()),
    }


def failures(folder: Path) -> Any:
    kill: Config = {"config": {"killed_at": 7}, "max_failures": 1}
    longer: Config = {"config": {"steps": STEPS + 4}, "workers": 1}
    return {
        "raised": fit(echelon_fsdp, folder, TorchConfig(), name="b", config={"raises_at": 3}),
        "killed": fit(echelon_fsdp, folder, on_ray.EchelonConfig(), name="a", **kill),
        "one worker": fit(echelon_fsdp, folder, TorchConfig(), name="a", **longer),
        "losses of one process": [alone(STEPS), alone(STEPS + 4)],
    }


def main(case: str, folder: str) -> None:
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as place:  # sockets need short paths
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=place)
        try:
            outcome = {"same_weights": same_weights, "failures": failures}[case](Path(folder))
        finally:
            ray.shutdown()
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
