"""The tree of the groups of one world, and the steps that run before the world closes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, final

# What to do before a world closes, in the seconds that are left, or None for as long as it takes.
Step = Callable[[float | None], None]


class GroupTree:
    """A group as a node of the tree of the groups of its world.

    Attributes:
        parent: the group that this one is a subgroup of; None for the group of all ranks.
        belongings: objects that other packages cache on this group, by keys of their own.
    """

    def __init__(self) -> None:
        self.parent: Self | None = None
        self.belongings: dict[object, object] = {}
        self._before_close: list[Step] = []

    @property
    def root(self) -> Self:
        """The group of all ranks of the job, which has no parent."""
        group = self
        while group.parent is not None:
            group = group.parent
        return group

    @final
    def before_close(self, step: Step) -> Callable[[], None]:
        """Call ``step`` when the world closes, while ranks still communicate.

        It gets the seconds that it may take when this rank has failed, and None in good order. Then
        closing the world raises what ``step`` raises, so that the error is not overlooked.

        Returns:
            a function that removes ``step`` again.
        """
        steps = self.root._before_close
        steps.append(step)

        def forget() -> None:
            if step in steps:
                steps.remove(step)

        return forget

    @final
    def prepare_close(self, seconds: float | None = None) -> None:
        """Run the steps of ``before_close``, then raise the first error of any of them."""
        steps, problem = self.root._before_close, None
        while steps:
            try:
                steps.pop()(seconds)
            except Exception as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def _with_parent(self, child: Self | None) -> Self | None:
        """Make this group the parent of a new one."""
        if child is not None:
            child.parent = self
        return child
