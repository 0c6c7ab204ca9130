"""The steps whose memory ``planned_memory.py`` predicts and measures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from gpt import GPT, Block, GPTConfig
from stages import cut

CHUNKS = {"interleaved": 2, "looped-bfs": 2, "zb-v": 2, "v-half": 2, "v-min": 2, "dualpipe-v": 2}
SCHEDULES = ("gpipe", "1f1b", "zb", "zb-h1", "zb-h2", *CHUNKS)
BATCH, CONTEXT = 16, 128  # sequences of a rank, and their length


def next_token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """A plan with its options, in values of JSON.

    Attributes:
        axes: as ``ec.Plan.parse`` takes them.
        schedule: of a pipeline.
        strategy: of FSDP, by name.
        recompute: whether the stages of a pipeline run again in the backward.
        low: whether FSDP computes in bfloat16.
    """

    axes: str
    schedule: str | None = None
    strategy: str | None = None
    recompute: bool = False
    low: bool = False

    def __str__(self) -> str:
        parts = {name: value for name, value in asdict(self).items() if value}
        return " ".join(str(name if value is True else value) for name, value in parts.items())

    @property
    def plan(self) -> ec.Plan:
        """The plan."""
        options: dict[str, Any] = {}
        plain = dict(part.split("=") for part in self.axes.split(","))
        if int(plain.get("pp", 1)) > 1:
            schedule = self.schedule or "1f1b"
            chunks = CHUNKS.get(schedule, 1)
            least = 2 * int(plain["pp"]) if schedule == "dualpipe-v" else 1
            options |= {"microbatches": max(8, least), "schedule": schedule, "chunks": chunks}
            options |= {"pipeline": {"recompute": True}} if self.recompute else {}
        if self.strategy is not None:
            options["strategy"] = ec.Strategy[self.strategy]
        if self.low:
            options["fsdp"] = {"precision": ec.MixedPrecision(compute=torch.bfloat16)}
        return ec.Plan.parse(self.axes, **options)

    @property
    def units(self) -> ec.units.Rule | None:
        """What FSDP gathers at once."""
        return ec.units.by_type(Block) if self.plan.shard > 1 else None

    def model(self) -> nn.Module | list[nn.Module]:
        """A GPT of 16 blocks, in the stages of the plan."""
        torch.manual_seed(0)
        gpt = GPT(GPTConfig(layers=16, width=192, heads=4, context=CONTEXT))
        return gpt if self.plan.pp == 1 else cut(gpt, self.plan.pp * self.plan.chunks)

    def tokens(self) -> Tensor:
        """The batch of a rank."""
        return torch.zeros(BATCH, CONTEXT, dtype=torch.long)

    def step(self, world: ec.World) -> Callable[[], None]:
        """A step on the ranks of a world."""
        plan, tokens = self.plan, self.tokens()
        loss_fn = next_token_loss if plan.pp > 1 else None
        model = ec.parallelize(self.model(), plan, world, units=self.units, loss_fn=loss_fn)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            if isinstance(model, ec.Pipeline):
                model.step(tokens, target=tokens)
            else:
                next_token_loss(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step


def cases() -> Iterator[MemoryCase]:
    """DDP, all strategies of FSDP, all schedules that train, and what is combined with them."""
    for ranks in (1, 2, 4, 8):
        yield MemoryCase(axes=f"dp={ranks}")
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIMIZER", "NO_SHARD"):
        for ranks in (2, 4, 8):
            yield MemoryCase(axes=f"shard={ranks}", strategy=strategy)
    for ranks in (2, 4):
        yield MemoryCase(axes=f"shard={ranks}", low=True)
        yield MemoryCase(axes=f"dp=2,shard={ranks}", strategy="FULL_SHARD")
        yield MemoryCase(axes=f"dp=2,shard={ranks}", strategy="SHARD_GRAD_OP")
    for schedule in SCHEDULES:
        for ranks in (2, 4, 8):
            if CHUNKS.get(schedule, 1) * ranks <= 16:
                yield MemoryCase(axes=f"pp={ranks}", schedule=schedule)
    for schedule in ("gpipe", "1f1b", "interleaved"):
        for ranks in (2, 4):
            yield MemoryCase(axes=f"pp={ranks}", schedule=schedule, recompute=True)
    for axes in ("pp=2,dp=2", "pp=2,shard=2", "pp=2,dp=2,shard=2", "pp=4,shard=2"):
        yield MemoryCase(axes=axes)
        yield MemoryCase(axes=axes, schedule="interleaved")
