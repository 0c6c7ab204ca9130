"""Writes the checkpoints in ``fixtures``, and what must come out of them, with any version.

``python -m tests.checkpoint.write_fixtures`` wrote those that are there with commit 3e1ed13, on
torch 2.13.0. It uses public names only, so that other versions can run it; a fixture that is there
is never written again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import echelon as ec

FIXTURES = Path(__file__).parent / "fixtures"
VOCABULARY, WIDTH, ROWS, STEP = 11, 6, 24, 2


class Block(nn.Module):
    """Odd sizes, a scalar, a frozen weight, float and integer buffers, and an extra state."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7, dtype=dtype)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=dtype))
        self.down = nn.Linear(7, WIDTH, bias=False, dtype=dtype)
        self.frozen = nn.Parameter(torch.randn(3, dtype=dtype), requires_grad=False)
        self.register_buffer("offset", torch.randn(2, 3, dtype=dtype))
        self.register_buffer("count", torch.tensor(7, dtype=torch.int64))
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        self.notes: dict[str, Any] = {"seed": float(torch.rand(()))}

    def forward(self, x: Tensor) -> Tensor:
        return (
            x + self.scale * self.down(torch.tanh(self.up(x))) + self.frozen[0] * self.offset[0, 0]
        )

    def get_extra_state(self) -> dict[str, Any]:
        return self.notes

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.notes = state


def make_model(dtype: torch.dtype, seed: int) -> nn.Sequential:
    """An embedding that is also the head, and two blocks between."""
    torch.manual_seed(seed)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    model = nn.Sequential(embedding, Block(dtype), Block(dtype), head).to(dtype)
    head.weight = embedding.weight
    return model


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.float(), target)


@dataclass(frozen=True)
class Layout:
    """How a model is shared, and the optimizer over it."""

    plan: str
    optimizer: str = "adamw"
    strategy: str = ""
    fsdp: tuple[tuple[str, Any], ...] = ()
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float32
    rng: bool = False

    @property
    def parsed(self) -> ec.Plan:
        """The plan, with its options."""
        options: dict[str, Any] = {}
        if "pp" in self.plan:
            chunks = 2 if self.schedule == "zb-v" else 1
            options = {"microbatches": 2, "schedule": self.schedule, "chunks": chunks}
        if self.fsdp:
            options["fsdp"] = dict(self.fsdp)
        return ec.Plan.parse(self.plan, **options)


SMALL = (("min_num_params", 0),)
LAYOUTS: Mapping[str, Layout] = {
    "plain": Layout("dp=1"),
    "ddp2": Layout("dp=2", rng=True),
    "ddp3-sgd": Layout("dp=3", "sgd"),
    "full3": Layout("shard=3", fsdp=SMALL, rng=True),
    "rows2-sgd": Layout("shard=2", "sgd", fsdp=(*SMALL, ("layout", "rows"))),
    "flat2": Layout("shard=2", "amsgrad", fsdp=(*SMALL, ("use_orig_params", False))),
    "hybrid4": Layout("dp=2,shard=2", fsdp=SMALL),
    "no-shard2": Layout("shard=2", strategy="NO_SHARD", fsdp=SMALL),
    "pp2": Layout("pp=2"),
    "pp2-zbv-sgd": Layout("pp=2", "sgd", schedule="zb-v"),
    "pp2-dp2": Layout("pp=2,dp=2", rng=True),
    "pp2-shard2": Layout("pp=2,shard=2", fsdp=SMALL),
    "plain-bf16": Layout("dp=1", dtype=torch.bfloat16),
    "full2-bf16": Layout("shard=2", "sgd", fsdp=SMALL, dtype=torch.bfloat16),
}


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """One group for flat parameters; else three, one of which is empty."""
    named = [(key, param) for key, param in model.named_parameters() if param.requires_grad]
    if name == "amsgrad":
        return torch.optim.AdamW((param for _, param in named), lr=0.05, amsgrad=True)
    groups = [
        {"params": [param for key, param in named if "up" in key], "weight_decay": 0.1},
        {"params": [], "weight_decay": 0.3},
        {"params": [param for key, param in named if "up" not in key], "weight_decay": 0.0},
    ]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.99))


@dataclass
class Job:
    """All that a checkpoint has: made new, trained, saved and loaded."""

    layout: Layout
    world: ec.World
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: ec.GradScaler
    sampler: ec.ResumableSampler

    @classmethod
    def new(cls, layout: Layout, world: ec.World, seed: int) -> Job:
        """With values that ``seed`` gives."""
        plan, model = layout.parsed, make_model(layout.dtype, seed)
        units = ec.units.by_type(Block)
        shared: nn.Module = model
        if layout.strategy:
            strategy = ec.Strategy[layout.strategy]
            shared = ec.FSDP(model, world.group, units=units, strategy=strategy, min_num_params=0)
        elif plan.pp > 1:
            stages = ec.pipeline.split(model, plan.pp * plan.chunks)
            wrapped = units if plan.shard > 1 else None
            shared = ec.parallelize(stages, plan, world, loss_fn=loss_of, units=wrapped)
        elif plan.num_ranks > 1:
            shared = ec.parallelize(model, plan, world, units=units if plan.shard > 1 else None)
        optimizer = make_optimizer(layout.optimizer, shared)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        scaler = ec.GradScaler(world.group, init_scale=8.0, growth_interval=3)
        sampler = ec.ResumableSampler(100, 10, world.group, seed=3)
        return cls(layout, world, shared, optimizer, scheduler, scaler, sampler)

    def train(self) -> None:
        """Some steps, each on the same batch of all ranks."""
        plan = self.layout.parsed
        lines = plan.dp * plan.shard
        line = self.world.rank % lines
        rows = slice(line * ROWS // lines, (line + 1) * ROWS // lines)
        for step in range(STEP):
            generator = torch.Generator().manual_seed(1000 + step)
            x = torch.randint(VOCABULARY, (ROWS,), generator=generator)
            y = torch.randint(VOCABULARY, (ROWS,), generator=generator)
            if isinstance(self.model, ec.Pipeline):
                self.model.step(x[rows], target=y[rows])
            else:
                loss_of(self.model(x[rows]), y[rows]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.scaler.update(4.0 + step)
        torch.manual_seed(50 + self.world.rank)  # ranks draw on from different states

    def save(self, folder: Path) -> None:
        """All of it, and values, of which some differ between ranks."""
        ec.save(
            folder,
            step=STEP,
            model=self.model,
            optimizer=self.optimizer,
            rng=self.layout.rng,
            group=self.world.group,
            scheduler=self.scheduler,
            scaler=self.scaler,
            sampler=self.sampler,
            epoch=3,
            notes={"text": "ü", "nan": float("nan"), "pair": (1, 2.5), "table": torch.eye(2)},
            draws=[self.world.rank, torch.full((2,), float(self.world.rank))],
        )

    def load(self, folder: Path) -> ec.Loaded:
        """All of it but the values, which the result has."""
        return ec.load(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            group=self.world.group,
            scheduler=self.scheduler,
            scaler=self.scaler,
            sampler=self.sampler,
        )

    def whole(self) -> dict[str, Any]:
        """Model and optimizer by plain names, as the public methods give them."""
        model, optimizer = self.model, self.optimizer
        if isinstance(model, ec.Pipeline):
            found: dict[str, Any] = {"model": model.whole_state_dict()}
        else:
            found = {"model": dict(model.state_dict())}
        if isinstance(model, ec.FSDP | ec.Pipeline):
            return {**found, "optimizer": model.optimizer_state_dict(optimizer)}
        names = {param: name for name, param in model.named_parameters()}
        groups = [
            {**group, "params": [names[param] for param in group["params"]]}
            for group in optimizer.param_groups
        ]
        state = {names[param]: dict(own) for param, own in optimizer.state.items()}  # type: ignore[index]
        return copy.deepcopy({**found, "optimizer": {"state": state, "param_groups": groups}})

    def rest(self) -> dict[str, Any]:
        """What is neither model nor optimizer."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "sampler": self.sampler.state_dict(),
            "drawn": torch.rand(4) if self.layout.rng else None,
        }

    def own(self) -> dict[str, Any]:
        """What the methods of this rank give: state dicts of its parts."""
        model = self.model
        if isinstance(model, ec.Pipeline):
            found = {"state_dict": dict(model.state_dict())}
            return found if self.layout.parsed.shard == 1 else {**found, **self._parts(model)}
        return self._parts(model) if isinstance(model, ec.FSDP) else {}

    @staticmethod
    def _parts(model: ec.FSDP | ec.Pipeline) -> dict[str, Any]:
        return {"sharded_state_dict": model.sharded_state_dict()}


# Nested values as two files: tensors, and JSON of the rest that keeps order and types ----------


def write_state(value: Any, path: Path) -> None:
    """As ``path.safetensors`` and ``path.json``."""
    tensors: dict[str, Tensor] = {}

    def plain(one: Any) -> Any:
        if isinstance(one, Tensor):
            tensors[f"{len(tensors):05}"] = one.detach().clone().contiguous()
            return {"$": "tensor", "of": f"{len(tensors) - 1:05}"}
        if isinstance(one, Mapping):
            return {"$": "dict", "of": [[key, plain(item)] for key, item in one.items()]}
        if isinstance(one, tuple):
            return {"$": "tuple", "of": [plain(item) for item in one]}
        if isinstance(one, list):
            return [plain(item) for item in one]
        assert one is None or isinstance(one, bool | int | float | str), one
        return one

    text = json.dumps(plain(value), separators=(",", ":"))
    path.with_suffix(".json").write_text(text + "\n")
    save_file(tensors, path.with_suffix(".safetensors"))


def read_state(path: Path) -> Any:
    """What ``write_state`` was given."""
    tensors = load_file(path.with_suffix(".safetensors"))

    def nested(one: Any) -> Any:
        if isinstance(one, list):
            return [nested(item) for item in one]
        if not isinstance(one, dict):
            return one
        if one["$"] == "tensor":
            return tensors[one["of"]]
        if one["$"] == "tuple":
            return tuple(nested(item) for item in one["of"])
        return {key: nested(item) for key, item in one["of"]}

    return nested(json.loads(path.with_suffix(".json").read_text()))


def write_fixture(world: ec.World, name: str, folder: Path) -> dict[str, Any]:
    """Train, save, load into a new job; what that rank then has."""
    job = Job.new(LAYOUTS[name], world, seed=0)
    job.train()
    job.save(folder)
    trained = job.whole()
    job = Job.new(LAYOUTS[name], world, seed=1)
    job.load(folder)
    whole = job.whole()
    assert list(whole["model"]) == list(trained["model"])
    for key, value in trained["model"].items():
        if isinstance(value, Tensor):
            assert torch.equal(value, whole["model"][key])
    return {"whole": whole, "rest": job.rest(), "own": job.own()}


def main() -> None:
    """Write every fixture that is not there."""
    for name, layout in LAYOUTS.items():
        folder = FIXTURES / name
        if folder.exists():
            continue
        ranks = ec.run(write_fixture, layout.parsed.num_ranks, args=(name, folder))
        (folder / ".lock").unlink()
        write_state(ranks[0]["whole"], folder / "whole")
        write_state([{"rest": one["rest"], "own": one["own"]} for one in ranks], folder / "ranks")
        print(name, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))


if __name__ == "__main__":
    main()
