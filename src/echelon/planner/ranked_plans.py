"""``Plans``: the plans of a cluster from the best on, and why the others are not among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import final, overload

from echelon.errors import UnsupportedError
from echelon.page import html_of
from echelon.planner.goals import Goal, ranking
from echelon.planner.layout_space import LayoutSpace
from echelon.planner.plan_search import fitting_cluster
from echelon.planner.priced_plan import PricedPlan
from echelon.planner.refusal import RefusedPlan
from echelon.planner.survey import Survey, survey

_MOST_REFUSED = 3  # in a sentence


@final
class Plans(Sequence[PricedPlan]):
    """The plans that fit, from the best on; empty if none fits.

    Attributes:
        model: that is trained.
        cluster: that there is.
        goal: what is best: ``"tokens/s"``, ``"cost"`` or ``"memory"``.
        num_layouts: how many plans were looked at.
        num_fitting: how many of these fit.
    """

    def __init__(self, space: LayoutSpace, goal: Goal) -> None:
        self.model, self.cluster, self.goal = space.model, space.cluster, goal
        self._space, result = space, ranking(space, goal)
        self.num_layouts, self.num_fitting = result.num_layouts, result.num_fitting
        self._plans = list(result.best)

    @property
    def best(self) -> PricedPlan:
        """The first one.

        Raises:
            UnsupportedError: none fits; the sentence has the nearest with rank, moment and bytes.
        """
        if not self._plans:
            raise UnsupportedError(self._why_none())
        return self._plans[0]

    def _why_none(self) -> str:
        """A sentence for a cluster that no plan fits."""
        nearest = "; ".join(str(plan) for plan in self.refused[:_MOST_REFUSED])
        return (
            f"none of {self.num_layouts} plans fits. The nearest: {nearest}. {self.how_many_fit()}"
        )

    def how_many_fit(self) -> str:
        """A sentence with the devices on which a plan would fit."""
        device = self.cluster.device.name
        larger = fitting_cluster(self._space)
        if larger is None:
            return (
                f"No number of {device} would do with this batch and these limits: one with more "
                "memory, a larger global batch, or shorter sequences might"
            )
        return f"A plan fits {larger.num_devices} {device}: {larger.hosts} hosts of such"

    @property
    def refused(self) -> tuple[RefusedPlan, ...]:
        """Plans that do not fit, from the nearest on, each with rank, moment and bytes.

        Of each combination of axes of which nothing fits there is the plan that needs least.
        """
        return self._survey.refused

    @property
    def pareto(self) -> tuple[PricedPlan, ...]:
        """The plans of which none is both faster and smaller, from the fastest on."""
        return self._survey.pareto

    @cached_property
    def _survey(self) -> Survey:
        return survey(self._space, [plan for plan in self if plan.cluster == self.cluster])

    @overload
    def __getitem__(self, index: int) -> PricedPlan: ...
    @overload
    def __getitem__(self, index: slice) -> list[PricedPlan]: ...
    def __getitem__(self, index: int | slice) -> PricedPlan | list[PricedPlan]:
        return self._plans[index]

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[PricedPlan]:
        return iter(self._plans)

    _repr_html_ = html_of

    def __repr__(self) -> str:
        best = f", best {self._plans[0]}" if self._plans else ""
        return (
            f"<Plans of {self.cluster.num_devices} {self.cluster.device.name}: "
            f"{self.num_fitting} of {self.num_layouts} fit{best}>"
        )
