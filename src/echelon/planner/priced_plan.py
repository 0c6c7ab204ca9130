"""``PricedPlan``: a plan that fits, with its time, its memory and what its tokens cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from echelon.errors import UnsupportedError
from echelon.page import html_of
from echelon.planner.cluster import Cluster
from echelon.planner.layout import Layout
from echelon.planner.operations import PlannedModel
from echelon.planner.plan_options import (
    beside_plan,
    layout_text,
    plan_of,
    plan_text,
)
from echelon.planner.refusal import peak_moment
from echelon.planner.software_stack import SoftwareStack
from echelon.planner.step_memory import StepMemory
from echelon.planner.step_time import StepTime

if TYPE_CHECKING:
    from echelon.plans.plans import Plan

_MOST_TERMS = 3


@final
@dataclass(frozen=True, kw_only=True)
class PricedPlan:
    """A plan that fits.

    Attributes:
        model: that is trained.
        cluster: the hosts that the plan uses.
        stack: whose constants were taken.
        layout: the degrees of all axes, microbatches, and what is computed again.
        time: seconds of a step, by what they go into.
        memory: bytes of the rank that needs most, by what they are of.
        limit: bytes that may be allocated on one device.
    """

    model: PlannedModel
    cluster: Cluster
    stack: SoftwareStack
    layout: Layout
    time: StepTime
    memory: StepMemory
    limit: float

    @property
    def schedule(self) -> str | None:
        """The name of its pipeline's schedule; None without a pipeline."""
        return None if self.layout.pp == 1 else self.layout.schedule_name

    @property
    def tied(self) -> bool:
        """Whether the head uses the embedding's matrix."""
        return self.model.tied

    @property
    def plan(self) -> Plan:
        """The ``ec.Plan``, for ``ec.parallelize``.

        Raises:
            UnsupportedError: an ``ec.Plan`` cannot say it, as with ``tp``, ``cp`` or ``ep`` > 1.
        """
        return plan_of(self.layout, tied=self.tied, in_16_bits=self.stack.in_16_bits)

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.time.total

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.layout.global_batch * self.model.seq / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak of the devices, with the causal half of attention only."""
        flops = self.model.flops() * self.layout.global_batch
        return flops / self.seconds / self.layout.num_ranks / self.cluster.device.peak

    @property
    def cost(self) -> float | None:
        """Of a million tokens, in the currency of the price; None without a price."""
        if self.cluster.price is None:
            return None
        per_second = self.cluster.price * self.cluster.num_devices / 3600
        return per_second / self.tokens_per_second * 1e6

    def bounds(self) -> str:
        """The largest terms besides multiplications of matrices, as parts of the step."""
        terms = sorted(self.time.terms().items(), key=lambda item: -item[1])
        return ", ".join(
            f"{name} {seconds / self.seconds:.0%}"
            for name, seconds in [term for term in terms if term[0] != "matmul"][:_MOST_TERMS]
            if seconds / self.seconds >= 0.005
        )

    def options(self) -> list[str]:
        """The call of ``ec.Plan``, and what a script does besides; or why there is no such plan."""
        try:
            text = plan_text(self.layout, tied=self.tied, in_16_bits=self.stack.in_16_bits)
        except UnsupportedError as error:
            return [f"No ec.Plan: {error}."]
        return [text, *beside_plan(self.layout, tied=self.tied, in_16_bits=self.stack.in_16_bits)]

    def explain(self) -> str:
        """All terms of its time and its memory, and the plan as a line of a script."""
        cost = "" if self.cost is None else f", {self.cost:.3g} for a million tokens"
        lines = [
            f"{self}: {self.seconds:.3f} s a step, {self.tokens_per_second:,.0f} tokens/s, "
            f"MFU {self.mfu:.3f}{cost}",
            *(f"  {line}" for line in self.options()),
            f"time of a step, a rank's batch being {self.layout.microbatches} x "
            f"{self.layout.microbatch} sequences",
        ]
        for name, seconds in self.time.terms().items():
            lines.append(f"  {name:<12} {seconds:>10.4f} s {seconds / self.seconds:>6.1%}")
        stage = self.memory.rank_stage
        lines.append(
            f"memory of stage {stage} {peak_moment(self.layout, stage)}: "
            f"{self.memory.total / 2**30:.2f} GiB of {self.limit / 2**30:.2f}"
        )
        for name, nbytes in self.memory.categories().items():
            lines.append(f"  {name:<12} {nbytes / 2**30:>10.2f} GiB")
        return "\n".join(lines)

    _repr_html_ = html_of

    def __str__(self) -> str:
        return layout_text(self.layout)

    def __repr__(self) -> str:
        return f"<PricedPlan {self}: {self.seconds:.3g} s, {self.memory.total / 2**30:.1f} GiB>"
