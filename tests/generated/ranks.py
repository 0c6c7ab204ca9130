"""A case on one rank of a world, compared with one process while it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from tests.generated.judge import same, same_gradient, same_numbers, tolerance_of
from tests.generated.modules import Model, build
from tests.generated.operations import Spec
from tests.generated.program import Step, Toggles, Trainer, new_optimizer
from tests.generated.reference import Expected, ignored_names
from tests.generated.rules import rule_of
from tests.generated.stages import StageRun


def _ignored(case: Spec, model: nn.Module) -> list[Any]:
    name, _ = ignored_names(case, model)
    if name is None:
        return []
    if case["options"]["ignored"] == "param":
        return [model.get_parameter(name)]
    return [model.get_submodule(name)]


def precision_of(spec: Spec) -> ec.MixedPrecision:
    """The precision that a case names."""
    fields = {k: getattr(torch, v) if isinstance(v, str) else v for k, v in spec.items()}
    if fields.pop("keep", False):
        fields["keep"] = (nn.LayerNorm, nn.Embedding)
    return ec.MixedPrecision(**fields)


def shard(case: Spec, model: Model, world: World) -> ec.FSDP:
    """The model in ``FSDP``, with the options of the case."""
    options = dict(case["options"])
    given: dict[str, Any] = {"min_num_params": 0, "ignored": _ignored(case, model)}
    given["strategy"] = ec.Strategy[options.pop("strategy", "FULL_SHARD")]
    given["units"] = rule_of(options.pop("units", "whole"))
    if "precision" in options:
        given["precision"] = precision_of(options.pop("precision"))
    for name, kind in (("backward_prefetch", ec.BackwardPrefetch), ("offload", ec.Offload)):
        if name in options:
            given[name] = kind[options.pop(name)]
    options.pop("ignored", None)
    group = world.group
    if given["strategy"].hybrid:
        mesh = world.mesh(replicate=-1, shard=2)
        group, given["replicate"] = mesh["shard"], mesh["replicate"]
    return ec.FSDP(model, group, **{**given, **options})


def replicate(case: Spec, model: Model, world: World) -> ec.DDP:
    """The model in ``DDP``, with the options of the case."""
    options = {name: value for name, value in case["options"].items() if name != "ignored"}
    if "gradient_dtype" in options:
        options["gradient_dtype"] = getattr(torch, options["gradient_dtype"])
    return ec.DDP(model, world.group, ignored=_ignored(case, model), **options)


class RankRun:
    """A case on one rank."""

    def __init__(self, world: World, case: Spec, expected: Expected) -> None:
        self.world, self.case, self.expected = world, case, expected
        plain = build(case)
        self.params = dict(plain.named_parameters())
        self.toggles = Toggles(case, self.params)
        self.ignored = ignored_names(case, plain)[1]
        self.sharded = case["technique"] == "fsdp"
        self.model: Any = (shard if self.sharded else replicate)(case, plain, world)
        self.flat = self.sharded and case["options"].get("use_orig_params") is False
        self.parts = self._parts()
        self.trainer = Trainer(
            self.model,
            plain,
            self.params,
            world.rank,
            self.model.no_sync,
            self.model.sync_gradients,
            case["options"].get("sync") == "manual",
        )
        self.optimizer = new_optimizer(case, list(self.model.parameters()))

    def _parts(self) -> dict[str, slice]:
        """Which elements of each parameter this rank has."""
        parts = dict.fromkeys(self.params, slice(None))
        if self.sharded:
            for name in self.params.keys() - self.ignored:
                own = self.model.shard_info(name)[self.model.group.rank]
                parts[name] = slice(own.start, own.start + own.size)
        return parts

    def run(self) -> None:
        """All steps, and the state at the end."""
        for number, spec in enumerate(self.case["steps"]):
            self.before(number)
            step = Step(self.trainer, self.case, number)
            record = step.run()
            if spec.get("eval"):
                step.evaluate()
            wanted = self.expected.records[self.world.rank][number]
            same_numbers(number, record, wanted)
            if not self.flat:
                self.check_gradients(number, wanted.gradients)
            self.clip(number)
            self.optimizer.step()
        wanted_state = self.expected.states[self.world.rank]
        state = self.model.state_dict()
        assert list(state) == list(wanted_state), (list(state), list(wanted_state))
        for name, value in wanted_state.items():
            same(f"{name} at the end", state[name], value)

    def before(self, number: int) -> None:
        if not (number and self.case["steps"][number - 1].get("keep")):
            self.optimizer.zero_grad()
        self.toggles.apply(number)

    def check_gradients(self, number: int, wanted: dict[str, Tensor | None]) -> None:
        for name, param in self.params.items():
            right = wanted[name]
            if right is not None:
                right = right.reshape(-1)[self.parts[name]]
            same_gradient(number, name, param.grad, right)

    def clip(self, number: int) -> None:
        limit = self.case["steps"][number].get("clip")
        if limit is not None:
            norm, wanted = ec.clip_grad_norm_(self.model, limit), self.expected.norms[number]
            assert wanted is not None
            same(f"step {number}: norm", norm.double(), wanted.double())


def run_case(world: World, case: Spec, expected: Any) -> None:
    """Run a case on this rank and compare with one process.

    Raises:
        Difference: it is not as there.
    """
    make = StageRun if case["technique"] == "pipeline" else RankRun
    with tolerance_of(case):
        make(world, case, expected).run()
