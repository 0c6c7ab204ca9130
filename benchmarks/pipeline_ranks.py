"""Training steps of a model in stages: echelon's pipelines, PyTorch's, and one process alone.

A variant is a name in ``VARIANTS``, with its schedule, layout and transport.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from memory import SavedBytes
from models import Block, GPTConfig, TinyBlock, token_loss
from pairs import Variant, alternate_within
from peers import Peers
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from trainee import Trainee, compare_weights
from variants import ALONE

import echelon as ec
from echelon.comm.torch_dist import from_process_group

__all__ = ["GPT", "LARGE", "TINY", "VARIANTS", "measure_rank"]

GPT, LARGE, TINY = "gpt", "large activations", "tiny"
CPU = torch.device("cpu")


# --- models ------------------------------------------------------------------------------------


class Embedding(nn.Module):
    """Token ids to embeddings with positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        return self.tokens(tokens_BL) + self.positions.weight[: tokens_BL.shape[1]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something to train in stages.

    Attributes:
        layers: makes all layers; the same weights each time.
        cuts: number of layers of each stage, by layout.
        batch: the undivided batch, on every rank.
        microbatches: number of microbatches of a step.
        loss: of outputs and targets.
    """

    layers: Callable[[], list[nn.Module]]
    cuts: dict[str, Sequence[int]]
    batch: tuple[Tensor, Tensor]
    microbatches: int
    loss: Callable[[Tensor, Tensor], Tensor]

    def stages(self, layout: str) -> list[nn.Module]:
        """The layers, cut for two ranks."""
        rest = iter(self.layers())
        return [nn.Sequential(*(next(rest) for _ in range(n))) for n in self.cuts[layout]]


def gpt(config: GPTConfig, cuts: dict[str, Sequence[int]], rows: int, microbatches: int) -> Task:
    """A GPT on random tokens, to be predicted from themselves; a cut counts blocks."""

    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        head = nn.Linear(config.width, config.vocabulary, bias=False)
        blocks = [Block(config) for _ in range(config.layers)]
        return [Embedding(config), *blocks, nn.Sequential(nn.LayerNorm(config.width), head)]

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocabulary, (rows, config.context), generator=generator)
    return Task(
        layers=layers,
        cuts={k: (n[0] + 1, *n[1:-1], n[-1] + 1) for k, n in cuts.items()},
        batch=(tokens, tokens.roll(-1, dims=1)),
        microbatches=microbatches,
        loss=token_loss,
    )


def task_of(name: str) -> Task:
    """The task of this name."""
    if name == GPT:
        cuts = {"line": (5, 3), "loop": (3, 2, 2, 1), "vee": (2, 3, 2, 1)}
        return gpt(GPTConfig(), cuts, rows=8, microbatches=8)
    if name == LARGE:
        config = GPTConfig(layers=2, vocabulary=512, context=512)
        return gpt(config, {"line": (1, 1)}, rows=16, microbatches=4)

    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [TinyBlock() for _ in range(4)]

    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, 16, 8, generator=generator)
    cuts = {"line": (2, 2), "loop": (1, 1, 1, 1), "vee": (1, 1, 1, 1)}
    return Task(layers=layers, cuts=cuts, batch=(x, y), microbatches=16, loss=F.mse_loss)


# --- variants ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The settings of a variant.

    Attributes:
        schedule: a name, or a class of PyTorch's.
        layout: how stages are placed on ranks; a key of ``Task.cuts``.
        gloo: whether echelon uses gloo instead of shared memory.
        split: whether ``ec.pipeline.split`` cuts the model instead of ``Task.cuts``.
    """

    schedule: str | type
    layout: str = "line"
    gloo: bool = False
    split: bool = False


VARIANTS = {
    "echelon gpipe": Kind(schedule="gpipe"),
    "echelon 1f1b": Kind(schedule="1f1b"),
    "echelon 1f1b, gloo": Kind(schedule="1f1b", gloo=True),
    "echelon interleaved": Kind(schedule="interleaved", layout="loop"),
    "echelon zb-h1": Kind(schedule="zb-h1"),
    "echelon zb, 2 chunks": Kind(schedule="zb", layout="loop"),
    "echelon zb-v": Kind(schedule="zb-v", layout="vee"),
    "echelon 1f1b, split": Kind(schedule="1f1b", split=True),
    "echelon zb, 2 chunks, split": Kind(schedule="zb", layout="loop", split=True),
    "echelon zb-v, split": Kind(schedule="zb-v", layout="vee", split=True),
    "PyTorch GPipe": Kind(schedule=ScheduleGPipe),
    "PyTorch 1F1B": Kind(schedule=Schedule1F1B),
    "PyTorch Interleaved1F1B": Kind(schedule=ScheduleInterleaved1F1B, layout="loop"),
    "PyTorch InterleavedZeroBubble": Kind(schedule=ScheduleInterleavedZeroBubble, layout="loop"),
    "PyTorch ZBVZeroBubble": Kind(schedule=ScheduleZBVZeroBubble, layout="vee"),
}


class PipelineTrainee(Trainee):
    """One way to train the model in stages. Abstract.

    Attributes:
        num_actions: forwards and backwards of a step on this rank.
    """

    num_actions = 0

    def __init__(self, name: str, task: Task, model: nn.Module) -> None:
        super().__init__(name, model)
        self.task = task

    def step(self) -> None:
        """Take one step of an ordinary training loop."""
        self.optimizer.zero_grad()
        super().step()


class Alone(PipelineTrainee):
    """The whole model in one process, microbatch after microbatch."""

    def __init__(self, task: Task) -> None:
        super().__init__(ALONE, task, nn.Sequential(*task.layers()))

    def gradients(self) -> None:
        task = self.task
        parts = (whole.chunk(task.microbatches) for whole in task.batch)
        for x, y in zip(*parts, strict=True):
            (task.loss(self.model(x), y) / task.microbatches).backward()


class Echelon(PipelineTrainee):
    """``ec.Pipeline``."""

    def __init__(self, name: str, task: Task, group: ec.Group) -> None:
        kind = VARIANTS[name]
        assert isinstance(kind.schedule, str)
        num_stages, num = len(task.cuts[kind.layout]), task.microbatches
        schedule = ec.pipeline.schedule(kind.schedule, num_stages, num, group.size)
        stages = task.stages(kind.layout)
        if kind.split:
            stages = ec.pipeline.split(
                nn.Sequential(*task.layers()),
                num_stages,
                cost="time",
                example=task.batch[0].chunk(num)[0],
                schedule=schedule,
                group=group,
            )
        self.pipe = ec.Pipeline(
            stages, group, microbatches=num, schedule=schedule, loss_fn=task.loss
        )
        super().__init__(name, task, self.pipe)
        self.num_actions = sum(len(item.parts) for item in self.pipe.schedule.orders[group.rank])

    def gradients(self) -> None:
        self.pipe.step(self.task.batch[0], target=self.task.batch[1])


class Torch(PipelineTrainee):
    """A schedule of ``torch.distributed.pipelining`` over gloo."""

    def __init__(self, name: str, task: Task, peers: Peers) -> None:
        kind = VARIANTS[name]
        assert isinstance(kind.schedule, type)
        modules = task.stages(kind.layout)
        size, rank = peers.size, peers.rank
        line = list(range(len(modules)))
        places = [i % size if kind.layout != "vee" else min(i, line[-1] - i) for i in line]
        own = [i for i in line if places[i] == rank]
        stages = [PipelineStage(modules[i], i, len(modules), CPU) for i in own]
        single = issubclass(kind.schedule, PipelineScheduleSingle)
        given: Any = stages[0] if single else stages
        self.schedule = kind.schedule(given, task.microbatches, loss_fn=task.loss)
        self.is_first, self.is_last = places[0] == rank, places[-1] == rank
        super().__init__(name, task, nn.ModuleList(modules[i] for i in own))

    def gradients(self) -> None:
        x, y = self.task.batch
        args = (x,) if self.is_first else ()
        if self.is_last:
            self.schedule.step(*args, target=y, losses=[], return_outputs=False)
        else:
            self.schedule.step(*args, return_outputs=False)


def make(name: str, task: Task, peers: Peers) -> PipelineTrainee:
    """The variant of this name."""
    if name == ALONE:
        return Alone(task)
    kind = VARIANTS[name]
    if not isinstance(kind.schedule, str):
        return Torch(name, task, peers)
    group = peers.group
    if kind.gloo:
        assert dist.group.WORLD is not None
        group = from_process_group(dist.group.WORLD, device=CPU)
    return Echelon(name, task, group)


# --- on a rank ---------------------------------------------------------------------------------


def measure_rank(peers: Peers, settings: dict[str, Any]) -> dict[str, Any]:
    """Time all variants of one task, and count what they send and keep."""
    task = task_of(settings["task"])
    names = settings["variants"]
    trainees = {name: make(name, task, peers) for name in names if name != ALONE or not peers.rank}
    # The first steps make optimizer states, and exchange shapes between PyTorch's stages.
    traffic = {n: t.traffic(peers) for n, t in trainees.items() if n != ALONE}
    kept = {n: saved_nbytes(t, peers) for n, t in trainees.items() if n != ALONE}
    tiny = settings["task"] == TINY
    variants = [
        Variant(
            name,
            (trainees[name].gradients if tiny else trainees[name].step)
            if name in trainees
            else _nothing,
            frozenset({0}) if name == ALONE else None,
        )
        for name in names
    ]
    num_calls, samples = alternate_within(peers.group, variants, settings["seconds"], sample_s=0.1)
    ours, theirs = (trainees[name] for name in settings["compared"])
    return {
        "task": settings["task"],
        "num_calls": num_calls,
        "num_parameters": sum(p.numel() for layer in task.layers() for p in layer.parameters()),
        "microbatches": task.microbatches,
        "traffic": _by_rank(peers, traffic),
        "saved_nbytes": _by_rank(peers, kept),
        "predicted": {} if tiny else predicted(trainees, peers),
        "num_actions": {n: t.num_actions for n, t in trainees.items() if t.num_actions},
        **samples.record(),
        "same_weights": compare_weights(ours, theirs, weights_of(ours), weights_of(theirs)),
    }


def weights_of(trainee: PipelineTrainee) -> dict[str, Tensor]:
    """The parameters on this rank, by their place, which variants with the same cuts share."""
    return {str(i): param for i, param in enumerate(trainee.model.parameters())}


def _nothing() -> None:
    """Do nothing, on the ranks that do not take part in a variant."""


def _by_rank(peers: Peers, mine: dict[str, Any]) -> dict[str, list[Any]]:
    everyone = peers.group.all_gather_object(mine)
    return {name: [of_rank[name] for of_rank in everyone] for name in mine}


def saved_nbytes(trainee: PipelineTrainee, peers: Peers) -> int:
    """Peak bytes of activations that graphs keep in a step."""
    peers.group.barrier()
    with SavedBytes(trainee.model) as found:
        trainee.step()
    return found.most


def predicted(trainees: dict[str, PipelineTrainee], peers: Peers) -> dict[str, float]:
    """Simulated over measured time of a step; the simulation uses the costs of the same step."""
    found = {}
    for name, trainee in trainees.items():
        if isinstance(trainee, Echelon):
            shares = []
            for _ in range(3):
                peers.group.barrier()
                with trainee.pipe.measure() as measured:
                    trainee.gradients()
                shares.append(measured.simulation.makespan / measured.timeline.makespan)
            found[name] = statistics.median(shares)
    return found
