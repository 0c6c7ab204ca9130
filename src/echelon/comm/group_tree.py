"""From which group a group was made, and what all of one world do before the world ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, final


class GroupTree:
    """A group among those of its world.

    Attributes:
        parent: the group that it was made from; None for that of all ranks.
        belongings: what others keep for this group, by a key of theirs; it goes with the group.
    """

    def __init__(self) -> None:
        self.parent: Self | None = None
        self.belongings: dict[object, object] = {}
        self._before_close: list[Callable[[], None]] = []

    @property
    def root(self) -> Self:
        """The group of all ranks of the job, which has no parent."""
        found = self
        while found.parent is not None:
            found = found.parent
        return found

    @final
    def before_close(self, step: Callable[[], None]) -> Callable[[], None]:
        """Have ``step`` called when the world ends in good order, while ranks can still talk.

        What it raises is raised by the end of the world, so that it cannot be overlooked.

        Returns:
            a function that takes this back.
        """
        steps = self.root._before_close
        steps.append(step)

        def forget() -> None:
            if step in steps:
                steps.remove(step)

        return forget

    @final
    def prepare_close(self) -> None:
        """Run the steps that were asked for, each once; the world calls it.

        Raises:
            Exception: the first that a step raised, after all have run.
        """
        steps, problem = self.root._before_close, None
        while steps:
            try:
                steps.pop()()
            except Exception as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def _born(self, child: Self | None) -> Self | None:
        """Note where a new group comes from."""
        if child is not None:
            child.parent = self
        return child
