"""What this rank holds of any module, and which ranks hold the rest of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from torch import nn

from echelon.comm.group import Group
from echelon.errors import ArgumentError
from echelon.state.sharded_state import ShardedState, axes_in, sharded_state_of


def holdings_of(module: nn.Module, group: Group | None) -> ShardedState:
    """What this rank holds of ``module``. Nothing is communicated.

    ``DDP``, ``FSDP`` and ``Pipeline``, also where they are parts of it, say what they hold. Of the
    rest, every rank of ``group`` has a copy that nobody keeps like the others.

    Args:
        group: the ranks that have the module; None: this one alone.

    Raises:
        StateError: in the middle of a step.
        ArgumentError: a tensor cannot be saved or loaded; names it.

    Example:
        >>> [one.name for one in holdings_of(nn.Linear(2, 1), None).tensors]
        ['weight', 'bias']
    """
    copy, num_copies = (0, 1) if group is None else (group.rank, group.size)
    return sharded_state_of([(str, module)], copy=copy, num_copies=num_copies)


def group_of(modules: Sequence[nn.Module], given: Group | None) -> Group | None:
    """The group of all ranks that share ``modules``.

    Args:
        given: what the user said; None: it is found by the groups that the modules are shared over.

    Returns:
        None if nothing was given and no module is shared: this rank is alone.

    Raises:
        ArgumentError: ``given`` is no group or lacks ranks, or no group is known that has just the
            ranks that share the modules.
    """
    if given is not None and not isinstance(given, Group):
        raise ArgumentError(f"group is {given!r:.80}; give a Group, such as world.group")
    axes = [axis for module in modules for axis in axes_in(module)]
    ranks = {rank for axis in axes for rank in axis.ranks}
    if given is not None:
        if missing := sorted(ranks.difference(given.ranks)):
            raise ArgumentError(
                f"group has ranks {list(given.ranks)}, and the model is shared with ranks "
                f"{missing}, too: give a group of all ranks that share it, such as world.group"
            )
        return given
    if not axes:
        return None
    size = prod(len(own) for own in _independent(axes))
    for axis in axes:
        for group in _upwards(axis):
            if group.size == size and ranks.issubset(group.ranks):
                return group
    text = ", ".join(f"{list(axis.ranks)} ({axis.name})" for axis in axes)
    raise ArgumentError(
        f"the model is shared over ranks {text}, which makes {size} ranks, and none of these "
        "groups was made from a group of so many: give group=, that of all ranks that share it"
    )


def _independent(axes: Sequence[Group]) -> set[frozenset[int]]:
    """The ranks of each axis, without those that are inside of another."""
    every = {frozenset(axis.ranks) for axis in axes}
    return {own for own in every if not any(own < other for other in every)}


def _upwards(group: Group) -> Iterator[Group]:
    """A group, and those that it comes from."""
    found: Group | None = group
    while found is not None:
        yield found
        found = found.parent
