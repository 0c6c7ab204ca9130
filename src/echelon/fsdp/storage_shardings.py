"""Which parts of which parameters a storage shows to users."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol, final, overload

from echelon.comm.group import Group
from echelon.fsdp.local_shard import ShardDevices
from echelon.fsdp.shard_layout import ShardLayout
from echelon.fsdp.units import Member
from echelon.modules.compiled import plain_name
from echelon.modules.sharded_rules import use_rules
from echelon.modules.sharded_tensor import Sharding


class ShowsParts(Protocol):
    """What is asked of a storage; ``Storage`` says what the attributes are."""

    label: str
    members: tuple[Member, ...]
    layout: ShardLayout
    rows: bool
    group: Group
    devices: ShardDevices
    shardings: list[Sharding]
    on_write: Callable[[], None]


@final
class RangesOfRanks(Sequence[tuple[int, int]]):
    """By rank, the range of a parameter; computed when it is asked for, as there may be many ranks.

    Equal to any sequence of the same ranges.
    """

    __slots__ = ("_layout", "_member")
    __hash__ = None  # type: ignore[assignment]  # it may equal a list

    def __init__(self, layout: ShardLayout, member: int) -> None:
        self._layout, self._member = layout, member

    def __len__(self) -> int:
        return self._layout.size

    @overload
    def __getitem__(self, rank: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[tuple[int, int]]: ...
    def __getitem__(self, rank: int | slice) -> tuple[int, int] | Sequence[tuple[int, int]]:
        if isinstance(rank, slice):
            return [self[i] for i in range(*rank.indices(len(self)))]
        if not -len(self) <= rank < len(self):
            raise IndexError(rank)
        span = self._layout.range_of(self._member, rank % len(self))
        return span.start, span.numel

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Sequence) and [*self] == [*other]


def shardings_of(storage: ShowsParts) -> list[Sharding]:
    """Of each parameter, which part this rank shows."""
    use_rules()
    this = weakref.ref(storage)

    def before_write() -> None:
        storage = this()
        if storage is not None:
            storage.on_write()
            storage.devices.wait_for_unshards()

    unit = storage.label.removeprefix("unit ")
    return [
        Sharding(
            plain_name(member.name),
            unit,
            tuple(shape),
            RangesOfRanks(storage.layout, i),
            storage.group,
            by_rows=storage.rows,
            before_write=before_write,
        )
        for i, (member, shape) in enumerate(
            zip(storage.members, storage.layout.shapes, strict=True)
        )
    ]


def whole_shardings(storage: ShowsParts) -> list[Sharding]:
    """Of each parameter, that this rank shows all of it."""
    use_rules()
    unit = storage.label.removeprefix("unit ")
    pairs = zip(storage.members, storage.layout.shapes, strict=True)
    return [Sharding(plain_name(member.name), unit, tuple(shape)) for member, shape in pairs]


def flat_sharding(storage: ShowsParts) -> Sharding:
    """Which part this rank shows of the flat parameter: the parts of all ranks in their order."""
    numels = storage.layout.numels_by_rank
    ends = list(accumulate(numels, initial=0))
    ranges = tuple(zip(ends[:-1], numels, strict=True))
    name = f"flat parameter of {storage.label}"
    whole = storage.shardings[0].flattened((ends[-1],))
    return replace(whole, name=name, ranges=ranges, is_flat=True, aliases=[])
