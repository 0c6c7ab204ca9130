"""A case whose model is in stages: in one process microbatch by microbatch, and on ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError
from tests.generated.judge import same, same_gradient
from tests.generated.modules import WIDTH, Builder, Part
from tests.generated.operations import Spec
from tests.generated.program import (
    InvalidCase,
    Toggles,
    batch,
    check_stays_small,
    new_optimizer,
)
from tests.generated.rules import rule_of
from tests.generated.values import factor, unpack


def build_stages(case: Spec) -> list[nn.Module]:
    """The stages of a case; the same values each time."""
    builder = Builder(case.get("values", 0), case.get("width", WIDTH))
    return [builder.build(spec) for spec in case["model"]["children"]]


def cut(rows: int, parts: int) -> list[int]:
    """Lengths of microbatches, the first ones longer where it does not come out even."""
    return [rows // parts + (i < rows % parts) for i in range(parts)]


class Loss:
    """The loss of a microbatch."""

    def __init__(self, case: Spec) -> None:
        self._sums = case["options"].get("loss_reduction") == "sum"

    def __call__(self, output: Any, target: Any) -> Tensor:
        right, *others = target if isinstance(target, tuple) else (target,)
        squares = (unpack(output) - right).square()
        for extra in others:
            squares = squares * factor(extra)
        return squares.sum() / 10 if self._sums else squares.mean()

    def share(self, rows: int, of: int) -> float:
        """What a microbatch counts."""
        return 1.0 if self._sums else rows / of


def replicas_of(case: Spec) -> int:
    """How many batches there are in a step."""
    return int(case["ranks"] // case["options"]["pp"])


class Whole:
    """A case in one process."""

    def __init__(self, case: Spec) -> None:
        self.case, self.loss = case, Loss(case)
        self.stages = nn.ModuleList(build_stages(case))
        self.params = dict(self.stages.named_parameters())
        self.toggles = Toggles(case, self.params)
        if not any(param.requires_grad for param in self.params.values()):
            raise InvalidCase("nothing to train")
        self.optimizer = new_optimizer(case, list(self.params.values()))
        self.losses: list[list[Tensor]] = []  # by step and replica
        self.evaluations: list[Tensor | None] = []  # of the first replica
        self.gradients: list[dict[str, Tensor | None]] = []
        self.norms: list[Tensor | None] = []

    def forward(self, batch: Batch) -> Tensor:
        value: Any = self.stages[0](*batch.args, **batch.kwargs)
        for stage in self.stages[1:]:
            args = value if isinstance(value, tuple) else (value,)
            value = stage(*args, **batch.kwargs)
        return self.loss(value, batch.target)

    def run(self) -> Whole:
        """All steps."""
        for number, spec in enumerate(self.case["steps"]):
            if not (number and self.case["steps"][number - 1].get("keep")):
                self.optimizer.zero_grad()
            self.toggles.apply(number)
            try:
                self.losses.append([self.step(number, d) for d in range(replicas_of(self.case))])
                self.evaluations.append(self.evaluate(number) if spec.get("eval") else None)
            except (RuntimeError, IndexError, ValueError) as error:
                raise InvalidCase(str(error)) from error
            self.gradients.append(
                {n: None if p.grad is None else p.grad.clone() for n, p in self.params.items()}
            )
            limit = spec.get("clip")
            clips = limit is not None
            self.norms.append(
                nn.utils.clip_grad_norm_(list(self.params.values()), limit) if clips else None
            )
            self.optimizer.step()
        check_stays_small(self.stages.state_dict())
        return self

    def step(self, number: int, replica: int) -> Tensor:
        """Forward and backward of one replica's batch."""
        batch = inputs(self.case, self.stages, number, replica)
        rows, m = batch.rows, self.case["options"]["microbatches"]
        total = torch.zeros((), dtype=torch.float64)
        for part in batch.split(m):
            loss = self.forward(part) * self.loss.share(part.rows, rows)
            if not loss.requires_grad:
                raise InvalidCase("a loss without a graph")
            (loss / replicas_of(self.case)).backward()
            total += loss.detach()
        return total

    def evaluate(self, number: int) -> Tensor:
        """The loss of a batch, without gradients."""
        self.stages.eval()
        with torch.no_grad():
            loss = self.forward(inputs(self.case, self.stages, number, 0))
        self.stages.train()
        return loss


@dataclass
class Batch:
    """What a step is given; a tensor of three dims has rows, as have the first ones."""

    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]
    target: Tensor | tuple[Tensor, ...]

    @property
    def rows(self) -> int:
        return len(self.args[0])

    def split(self, parts: int) -> list[Batch]:
        """Its microbatches."""
        lengths = cut(self.rows, parts)

        def of(value: Tensor, *, is_first: bool) -> list[Tensor]:
            has_rows = is_first or value.dim() == 3
            return list(value.split(lengths)) if has_rows else [value] * parts

        def each(values: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
            return list(zip(*[of(v, is_first=not i) for i, v in enumerate(values)], strict=True))

        targets = (
            each(self.target) if isinstance(self.target, tuple) else self.target.split(lengths)
        )
        named = {name: of(value, is_first=False) for name, value in self.kwargs.items()}
        return [
            Batch(args, {name: values[i] for name, values in named.items()}, target)
            for i, (args, target) in enumerate(zip(each(self.args), targets, strict=True))
        ]


def inputs(case: Spec, stages: Any, number: int, replica: int) -> Batch:
    """A batch, of which the indices are given to all modules of the stages."""
    x, tokens, target = batch(case, number, 0, replica)
    options, n = case["options"], len(x)
    generator = torch.Generator().manual_seed(number * 10 + replica)

    def extra(kind: str) -> Tensor:
        """A tensor of which only a spec says whether it has rows."""
        shape = (n, n, 1) if kind == "rows" else (n, n)
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    args = [extra(kind) for kind in options.get("args_chunk_spec", [])[1:]]
    named = {name: extra(kind) for name, kind in options.get("kwargs_chunk_spec", {}).items()}
    others = [extra(kind) for kind in options.get("target_chunk_spec", [])[1:]]
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, Part):
                module.context.tokens, module.context.step = tokens, number
    return Batch((x, *args), named, (target, *others) if others else target)


def chunk_specs(options: Spec) -> Spec:
    """The options of a case that say which tensors have rows, as a pipeline takes them."""
    kinds = {"whole": ec.pipeline.Replicate(), "rows": ec.pipeline.TensorChunkSpec(0), None: None}
    specs = {name: value for name, value in options.items() if name.endswith("_chunk_spec")}
    return {
        name: {key: kinds[kind] for key, kind in value.items()}
        if isinstance(value, dict)
        else tuple(kinds[kind] for kind in value)
        for name, value in specs.items()
    }


def pipeline(case: Spec, stages: list[nn.Module], world: World) -> ec.Pipeline:
    """The stages in a pipeline, with the options of the case."""
    options = dict(case["options"])
    replicas = replicas_of(case)
    axes = {"pp": options.pop("pp"), **({options.pop("over"): replicas} if replicas > 1 else {})}
    chunks, name = options.pop("chunks"), options.pop("schedule")
    m, units = options.pop("microbatches"), options.pop("units", None)
    strategy = options.pop("strategy", None)
    options |= chunk_specs(options)
    given: dict[str, Any] = {"ddp": options.pop("ddp", {}), "pipeline": options}
    if "shard" in axes:
        given |= {"strategy": ec.Strategy[strategy], "fsdp": {"min_num_params": 0}}
    plan = ec.Plan(**axes, microbatches=m, schedule=name, chunks=chunks, **given)
    rule = None if units is None or "shard" not in axes else rule_of(units)
    return ec.parallelize(stages, plan, world, loss_fn=Loss(case), units=rule)


class StageRun:
    """A case on one rank."""

    def __init__(self, world: World, case: Spec, expected: Whole) -> None:
        self.case, self.expected, self.rank = case, expected, world.rank
        self.stages = build_stages(case)
        every = nn.ModuleList(self.stages)
        self.params = dict(every.named_parameters())
        self.toggles = Toggles(case, self.params)
        self.replica = world.rank % replicas_of(case)
        self.pipe = pipeline(case, list(self.stages), world)
        own = {id(param) for param in self.pipe.parameters()}
        self.own = {name: p for name, p in self.params.items() if id(p) in own}
        self.optimizer = new_optimizer(case, list(self.own.values())) if self.own else None

    def run(self) -> None:
        """All steps, and the state at the end."""
        for number, spec in enumerate(self.case["steps"]):
            self.step(number, spec)
        state, wanted = self.pipe.whole_state_dict(), self.expected.stages.state_dict()
        assert list(state) == list(wanted), (list(state), list(wanted))
        for name, value in wanted.items():
            same(f"{name} at the end", state[name], value)

    def step(self, number: int, spec: Spec) -> None:
        if self.optimizer and not (number and self.case["steps"][number - 1].get("keep")):
            self.optimizer.zero_grad()
        self.toggles.apply(number)
        batch = inputs(self.case, self.stages, number, self.replica)
        everywhere = (
            {} if "results_everywhere" in self.case["options"] else {"loss_everywhere": True}
        )
        given: dict[str, Any] = {"target": batch.target, **everywhere, **batch.kwargs}
        loss = self.pipe.step(*batch.args, **given)
        same(f"step {number}: loss", loss, self.expected.losses[number][self.replica])
        wanted = self.expected.evaluations[number]
        if wanted is not None:
            batch = inputs(self.case, self.stages, number, 0)
            given = {"target": batch.target, **everywhere, **batch.kwargs}
            self.pipe.eval()
            loss = self.pipe.eval_step(*batch.args, **given)
            self.pipe.train()
            same(f"step {number}: evaluation", loss, wanted)
        for name, param in self.own.items():
            right = self.expected.gradients[number][name]
            if right is not None:
                right = right.reshape(-1)[self.part(name)]
            same_gradient(number, name, param.grad, right)
        if spec.get("clip") is not None:
            norm, right = ec.clip_grad_norm_(self.pipe, spec["clip"]), self.expected.norms[number]
            assert right is not None
            same(f"step {number}: norm", norm, right)
        if self.optimizer:
            self.optimizer.step()

    def part(self, name: str) -> slice:
        """Which elements of a parameter this rank has."""
        index, _, inner = name.partition(".")
        for stage in self.pipe.stages.values():
            if isinstance(stage, ec.FSDP) and stage.module is self.stages[int(index)]:
                try:
                    own = stage.shard_info(inner)[stage.group.rank]
                except ArgumentError:
                    return slice(None)  # the pipeline's, because several stages have it
                return slice(own.start, own.start + own.size)
        return slice(None)
