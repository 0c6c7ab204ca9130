"""Meshes: the ranks of a world on named axes, with one group for each axis."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from echelon.checks import integer, mapping
from echelon.comm.group import Group
from echelon.errors import ArgumentError, RankError


def coordinates(rank: int, lengths: Mapping[str, int]) -> dict[str, int]:
    """The coordinate of ``rank`` on each axis, where the last axis varies fastest.

    Example:
        >>> coordinates(7, {"a": 2, "b": 2, "c": 3})
        {'a': 1, 'b': 0, 'c': 1}
    """
    if not 0 <= rank < prod(lengths.values()):
        raise RankError("rank", rank, prod(lengths.values()))
    reversed_coordinates = {}
    for name, length in reversed(list(lengths.items())):
        rank, reversed_coordinates[name] = divmod(rank, length)
    return dict(reversed(list(reversed_coordinates.items())))


def axis_ranks(axis: str, rank: int, lengths: Mapping[str, int]) -> list[int]:
    """The ranks that differ from ``rank`` on ``axis`` only, including ``rank``.

    Example:
        >>> axis_ranks("dp", 5, {"dp": 2, "tp": 4})
        [1, 5]
        >>> axis_ranks("tp", 5, {"dp": 2, "tp": 4})
        [4, 5, 6, 7]
    """
    names = list(lengths)
    stride = prod(lengths[name] for name in names[names.index(axis) + 1 :])
    first = rank - coordinates(rank, lengths)[axis] * stride
    return [first + i * stride for i in range(lengths[axis])]


class Mesh:
    """The ranks of a world arranged on named axes, row-major: the last axis varies fastest.

    All ranks build the same mesh, because all take part in making the groups of every axis.

    Attributes:
        axes: the length of each axis, in order.
        coordinates: the coordinate of this rank on each axis.

    Example:
        >>> # on 4 ranks: rank 1 is {"dp": 0, "tp": 1}
        >>> # mesh = world.mesh(dp=2, tp=2); mesh["tp"].ranks == (0, 1)
    """

    def __init__(self, group: Group, axes: Mapping[str, int]) -> None:
        self.axes = _lengths(group.size, axes)
        self.coordinates = coordinates(group.rank, self.axes)
        self._groups: dict[str, Group] = {}
        for axis in self.axes:
            every_rank = range(group.size)
            # All ranks call ``subgroup`` for every group, in the same order.
            for members in dict.fromkeys(tuple(axis_ranks(axis, r, self.axes)) for r in every_rank):
                subgroup = group.subgroup(members)
                if subgroup is not None:
                    self._groups[axis] = subgroup

    def __getitem__(self, axis: str) -> Group:
        """The group of the ranks that differ from this one on ``axis`` only."""
        if not isinstance(axis, str) or axis not in self._groups:
            raise ArgumentError(f"this mesh has no axis {axis!r:.80}: it has {list(self.axes)}")
        return self._groups[axis]

    def __repr__(self) -> str:
        return f"Mesh({self.axes}, at {self.coordinates})"


def _lengths(size: int, axes: Mapping[str, int]) -> dict[str, int]:
    """Check the lengths, and replace a -1 by the length that fits."""
    mapping("axes", axes)
    if not axes:
        raise ArgumentError("a mesh needs at least one axis, such as world.mesh(dp=2, pp=2)")
    for name, length in axes.items():
        integer(f"axis {name}", length, low=-1)
    free = [name for name, length in axes.items() if length == -1]
    known = prod(length for length in axes.values() if length != -1)
    if len(free) > 1 or known < 1:
        raise ArgumentError(f"axis lengths {dict(axes)} must be positive; one of them may be -1")
    if size % known or (not free and known != size):
        raise ArgumentError(
            f"axes {dict(axes)} need {known} ranks (or a divisor, with -1), the group has {size}"
        )
    return {name: size // known if length == -1 else length for name, length in axes.items()}
