"""Times of many layouts of one model on one cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from echelon.planner.cluster import Cluster
from echelon.planner.cost_table import CostTable
from echelon.planner.layout import Layout
from echelon.planner.operations import PlannedModel
from echelon.planner.software_stack import SoftwareStack
from echelon.planner.step_time import StepTime, least_seconds, step_time


@final
@dataclass(frozen=True)
class LayoutTimer:
    """The model, cluster and stack of a search, and the costs that its layouts share.

    Attributes:
        table: filled as layouts are timed.
        bubbles: of simulated pipelines, by what they depend on.
    """

    model: PlannedModel
    cluster: Cluster
    stack: SoftwareStack
    table: CostTable = field(init=False)
    bubbles: dict[object, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", CostTable(self.model, self.cluster, self.stack))

    def step_time(self, layout: Layout) -> StepTime:
        """As ``step_time``."""
        return step_time(self.model, layout, self.cluster, self.stack, table=self.table)

    def least_seconds(self, layout: Layout) -> float:
        """As ``least_seconds``."""
        return least_seconds(self.model, layout, self.cluster, self.stack, self.table)
