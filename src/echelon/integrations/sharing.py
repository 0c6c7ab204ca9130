"""How a guest of another library shares a model: by DDP, by FSDP, or as a plan says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor, nn

from echelon import checks
from echelon.comm.world import World
from echelon.ddp import DDP
from echelon.errors import ArgumentError
from echelon.fsdp import FSDP
from echelon.fsdp.units import Rule, by_type
from echelon.pipeline.api import Pipeline
from echelon.plans.parallelize import parallelize
from echelon.plans.plans import Plan

Wrapper = DDP | FSDP | Pipeline

_NAMES = ("ddp", "fsdp")
_SEVERAL = 2  # stands for the number of ranks, which is not known when options are checked


@final
@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How the ranks of a job share each model.

    Attributes:
        plan: ``"ddp"`` or ``"fsdp"`` over all ranks, or a plan.
        units: what FSDP gathers at once; None: the blocks that a model of ``transformers`` names in
            ``_no_split_modules``, and else the whole model.
        options: more options of ``ec.DDP`` or ``ec.FSDP``, where ``plan`` is a name.

    Raises:
        ArgumentError: there is no such plan, or an option belongs to another one.
    """

    plan: str | Plan
    units: Rule | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.instance("units", self.units, Rule, or_none=True)
        if not isinstance(self.plan, Plan) and self.plan not in _NAMES:
            raise ArgumentError(f"plan is {self.plan!r:.80}; give 'ddp', 'fsdp' or an ec.Plan")
        if isinstance(self.plan, Plan) and self.options:
            raise ArgumentError(
                f"{', '.join(self.options)}: options are for plan='ddp' or 'fsdp'; give them "
                "in the ec.Plan, such as Plan(shard=2, fsdp={'precision': ...})"
            )
        if self.units is not None and not self.shards:
            raise ArgumentError("units are what FSDP gathers, and this plan shards nothing")
        if self.plan == "ddp":
            Plan(dp=_SEVERAL, ddp=self.options)  # which checks them
        elif self.plan == "fsdp":
            fsdp = dict(self.options)
            Plan(shard=_SEVERAL, strategy=fsdp.pop("strategy", None), fsdp=fsdp)

    @property
    def shards(self) -> bool:
        """Whether a rank keeps shards of parameters."""
        return self.plan.shard > 1 if isinstance(self.plan, Plan) else self.plan == "fsdp"

    @property
    def num_stages(self) -> int:
        """How many ranks share the rows of a batch, one after the other."""
        return self.plan.pp if isinstance(self.plan, Plan) else 1

    def share(
        self,
        model: nn.Module,
        world: World,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
    ) -> Wrapper:
        """The model, shared among all ranks of ``world``. All ranks call it.

        Args:
            model: the same on all ranks.
            world: of the job.
            loss_fn: of a pipeline.
        """
        units = self.units
        if units is None and self.shards:
            blocks = getattr(model, "_no_split_modules", None)
            units = by_type(*sorted(blocks)) if blocks else None
        if isinstance(self.plan, Plan):
            shared = parallelize(model, self.plan, world, units=units, loss_fn=loss_fn)
            assert isinstance(shared, Wrapper)
            return shared
        if self.plan == "ddp":
            return DDP(model, world.group, **self.options)
        return FSDP(model, world.group, units=units, **self.options)
