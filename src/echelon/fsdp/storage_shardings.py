"""Which parts of which parameters a storage shows to users."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

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
            tuple((span.start, span.numel) for span in storage.layout.ranges_by_rank(i)),
            storage.group,
            by_rows=storage.rows,
            before_write=before_write,
        )
        for i, (member, shape) in enumerate(
            zip(storage.members, storage.layout.shapes, strict=True)
        )
    ]


def flat_sharding(storage: ShowsParts) -> Sharding:
    """Which part this rank shows of the flat parameter: the parts of all ranks in their order."""
    numels = storage.layout.numels_by_rank
    ends = list(accumulate(numels, initial=0))
    ranges = tuple(zip(ends[:-1], numels, strict=True))
    name = f"flat parameter of {storage.label}"
    whole = storage.shardings[0].flattened((ends[-1],))
    return replace(whole, name=name, ranges=ranges, aliases=[])
