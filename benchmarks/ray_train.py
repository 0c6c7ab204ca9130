"""How long a training step takes in the workers of Ray Train, with PyTorch's DDP and FSDP and ours.

    RAY_USAGE_STATS_ENABLED=0 python benchmarks/ray_train.py

Ray starts two workers and makes their default process group over gloo. All variants live in these
workers and take turns. Afterwards their losses are compared.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; workers inherit it

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import ray
import torch
import torch.distributed as dist
import typer
from bars import Bar, Kind, bar_table, judge
from models import GPTConfig, Task, gpt_task
from pairs import Samples, Variant, alternate
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from report import console_for_tables, markdown_table, write_report
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from variants import WRAPPERS

import echelon as ec
import echelon.c10d

HERE = Path(__file__).resolve().parent
DDP_GLOO, DDP_ZERO, DDP_OURS = "PyTorch DDP", "PyTorch DDP over echelon", "echelon DDP"
FSDP_GLOO, FSDP_OURS = "FSDP2", "echelon FSDP"
VARIANTS = [DDP_GLOO, DDP_ZERO, DDP_OURS, FSDP_GLOO, FSDP_OURS]
BARS = (
    Bar(task="Ray step", name=DDP_ZERO, kind=Kind.FASTER, bound=1.0, peer=DDP_GLOO),
    Bar(task="Ray step", name=DDP_OURS, kind=Kind.FASTER, bound=1.08, peer=DDP_GLOO),
    Bar(task="Ray step", name=FSDP_OURS, kind=Kind.FASTER, bound=1.5, peer=FSDP_GLOO),
)
_WARM_UP = 2  # steps, in which optimizers make their states and wrappers learn the order


class RayTrainee:
    """A model in the wrapper of a variant, trained one batch at a time."""

    def __init__(self, name: str, task: Task, group: ec.Group) -> None:
        torch.manual_seed(0)
        if name == DDP_ZERO:
            process_group = dist.new_group(backend=echelon.c10d.BACKEND)
            self.model: nn.Module = DistributedDataParallel(
                task.build(), process_group=process_group, gradient_as_bucket_view=True
            )
        else:
            self.model = WRAPPERS[name](task.build(), SimpleNamespace(group=group))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        self.task, self.losses = task, list[Tensor]()

    def step(self) -> None:
        """One training step."""
        inputs, targets = self.task.batches[len(self.losses) % len(self.task.batches)]
        loss = self.task.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())


def measure(config: dict[str, Any]) -> None:
    """What each worker runs."""
    sys.path.insert(0, str(HERE))
    torch.set_num_threads(1)
    with ec.init() as world:
        task = gpt_task(world.rank, GPTConfig(layers=config["layers"]))
        trainees = {name: RayTrainee(name, task, world.group) for name in VARIANTS}
        for trainee in trainees.values():
            for _ in range(_WARM_UP):
                trainee.step()
        variants = [Variant(name, trainee.step) for name, trainee in trainees.items()]
        samples = alternate(world.group, variants, config["rounds"])
        losses = {name: [loss.item() for loss in t.losses] for name, t in trainees.items()}
        record = {"samples": samples.record(), "losses": losses, "backend": dist.get_backend()}
        if world.rank == 0:
            Path(config["record"]).write_text(json.dumps(record))


def largest_difference(losses: dict[str, list[float]]) -> float:
    """Between losses of variants at the same step; fails if it is large."""
    first = losses[DDP_GLOO]
    far = max(abs(a - b) for other in losses.values() for a, b in zip(first, other, strict=True))
    assert far <= 1e-3 * max(first), f"losses differ by {far:.3g}"
    return far


def in_ray(ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What ``measure`` records on a cluster of this machine."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as place:
        record = Path(place, "record.json")
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = {"env_vars": {"PYTHONPATH": path}}
        ray.init(num_cpus=ranks, include_dashboard=False, _temp_dir=place, runtime_env=environment)
        try:
            TorchTrainer(
                measure,
                train_loop_config={**settings, "record": str(record)},
                torch_config=TorchConfig(),
                scaling_config=ScalingConfig(num_workers=ranks),
                run_config=RunConfig(storage_path=str(Path(place, "storage"))),
            ).fit()
        finally:
            ray.shutdown()
        return dict(json.loads(record.read_text()))


def main(
    ranks: Annotated[int, typer.Option(help="Number of workers.")] = 2,
    rounds: Annotated[int, typer.Option(help="Steps of each variant.")] = 20,
    layers: Annotated[int, typer.Option(help="Of the GPT.")] = 8,
    output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
) -> None:
    """Measure steps in the workers of Ray Train, in alternation."""
    settings = {"rounds": rounds, "layers": layers}
    metrics = in_ray(ranks, settings)
    record = metrics["samples"]
    samples = Samples(record["seconds"], record["cpu_seconds"], record["stolen"])
    apart = largest_difference(metrics["losses"])
    title = f"Ray Train: GPT, {rounds} rounds, losses differ by at most {apart:.2g}"
    table = markdown_table(title, ["variant"], ["ms a step", "× faster", "than"])
    peers = {bar.name: bar.peer for bar in BARS}
    for name in VARIANTS:
        peer = peers.get(name, "")
        faster = f"{samples.ratio(peer, name):.3f}" if peer else ""
        table.add_row(name, f"{samples.median_s(name) * 1e3:.1f}", faster, peer)
    console = console_for_tables()
    console.print(table)
    outcomes = [outcome for bar in BARS for outcome in judge(bar, samples)]
    console.print(bar_table(outcomes))
    settings |= {"ranks": ranks, "default_backend": metrics["backend"]}
    path = write_report("ray_train", outcomes, output, settings=settings, tasks=[record])
    console.print(f"All samples are in {path}")


if __name__ == "__main__":
    typer.run(main)
