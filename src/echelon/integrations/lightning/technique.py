"""How a strategy shares a model among ranks: ``DDP``, ``FSDP``, or as a ``Plan`` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, final

from torch import nn

from echelon import checks
from echelon.comm.world import World
from echelon.ddp import DDP
from echelon.errors import ArgumentError, UnsupportedError
from echelon.fsdp import FSDP, MixedPrecision, Strategy
from echelon.fsdp.units import Rule
from echelon.plans.parallelize import parallelize
from echelon.plans.plans import Plan

Parallel = Literal["ddp", "fsdp"] | Plan

_SEVERAL = 2  # stands for the number of ranks, which is not known when options are checked


@final
@dataclass(frozen=True, kw_only=True)
class Technique:
    """What is put around a model.

    Attributes:
        plan: its axes and options. The lengths count only where ``is_given``.
        is_given: whether it is the plan of the user; else all ranks are on one axis.
        units: which modules FSDP gathers at once.
    """

    plan: Plan
    is_given: bool
    units: Rule | None

    @classmethod
    def of(
        cls,
        parallel: Parallel,
        units: Rule | None,
        sharding_strategy: Strategy | None,
        mixed_precision: MixedPrecision | None,
        options: Mapping[str, Any],
    ) -> Self:
        """Check the arguments of a strategy."""
        checks.instance("units", units, Rule, or_none=True)
        fsdp_only = {"sharding_strategy": sharding_strategy, "mixed_precision": mixed_precision}
        given = sorted(name for name, value in fsdp_only.items() if value is not None)
        if isinstance(parallel, Plan):
            if given or options:
                raise ArgumentError(
                    f"{', '.join([*given, *options])}: with a Plan, give these in the plan itself, "
                    "such as Plan(shard=2, fsdp={'precision': ...})"
                )
            if parallel.pp > 1:
                raise UnsupportedError(
                    f"the plan is {parallel}, and Lightning calls the whole model in each step, "
                    "which stages of a pipeline cannot be: use pp=1, or ec.Pipeline in a loop"
                )
            return cls(plan=parallel, is_given=True, units=units)
        if parallel == "fsdp":
            fsdp = dict(options)
            if "precision" in fsdp:
                raise ArgumentError("give FSDP's precision as mixed_precision=")
            if mixed_precision is not None:
                fsdp["precision"] = mixed_precision
            plan = Plan(shard=_SEVERAL, strategy=sharding_strategy, fsdp=fsdp)
            return cls(plan=plan, is_given=False, units=units)
        if parallel != "ddp":
            raise ArgumentError(f"parallel is {parallel!r:.80}; give 'ddp', 'fsdp' or a Plan")
        if given or units is not None:
            named = ", ".join([*given, *(["units"] if units is not None else [])])
            raise ArgumentError(f"{named}: DDP shards nothing; use parallel='fsdp'")
        return cls(plan=Plan(dp=_SEVERAL, ddp=options), is_given=False, units=None)

    @property
    def shards(self) -> bool:
        """Whether the result is an ``FSDP``."""
        return self.plan.shard > 1

    def wrap(self, module: nn.Module, world: World) -> nn.Module:
        """Share ``module`` among all ranks. All ranks call it."""
        if self.is_given:
            return parallelize(module, self.plan, world, units=self.units)
        if self.shards:
            strategy = self.plan.strategy or Strategy.FULL_SHARD
            options = self.plan.fsdp
            return FSDP(module, world.group, units=self.units, strategy=strategy, **options)
        return DDP(module, world.group, **self.plan.ddp)
