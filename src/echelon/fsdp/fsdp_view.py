"""What ``ec.show`` says about an ``FSDP``: its units, who has what of them, and memory.

Nothing is communicated, and no shard is read.
"""

from __future__ import annotations

from math import prod

from echelon.fsdp.api import FSDP
from echelon.fsdp.storage import Storage
from echelon.fsdp.unit import Unit
from echelon.fsdp.unit_info import MemoryStats
from echelon.modules.compiled import plain_name
from echelon.page import (
    Extent,
    OwnedBuffer,
    TextTable,
    View,
    ViewPart,
    bytes_text,
    ownership,
    view_of,
)

_MOST_BARS, _MOST_ROWS = 40, 40


@view_of.register
def _(shown: FSDP) -> View:
    group, stats, units = shown.group, shown.memory_stats(), shown._units
    bars = [_bar(unit, storage) for unit in units for storage in unit.storages]
    rows = [
        _row(storage, i)
        for unit in units
        for storage in unit.storages
        for i in range(len(storage.members))
    ]
    ratio = shown.local_sharding_ratio()
    more = "" if len(rows) <= _MOST_ROWS else f"The first {_MOST_ROWS} of {len(rows)}."
    return View(
        title=f"FSDP of {type(shown.module).__name__}: {len(units)} units on {group.size} ranks",
        facts=[
            (f"{shown.num_parameters():,}", "parameters"),
            (bytes_text(stats.shards), f"of them on rank {group.rank} ({ratio:.1%})"),
            (bytes_text(stats.peak_gathered), "unsharded at most so far"),
        ],
        parts=[
            ViewPart(
                title="Who has which bytes",
                about="One bar for each unit: what is unsharded together. A box is a shard.",
                content=ownership(bars[:_MOST_BARS]),
            ),
            ViewPart(
                title="Parameters",
                about=more,
                content=TextTable(
                    heads=["parameter", "shape", "size", f"elements of rank {group.rank}"],
                    rows=rows[:_MOST_ROWS],
                ),
            ),
            ViewPart(title="Sent in a step", about=_sent_about(shown), content=_sent(shown)),
            ViewPart(
                title=f"Memory of rank {group.rank}",
                about=f"{stats.num_all_gathers} unshards and {stats.num_reduce_scatters} "
                "reductions so far.",
                content=_memory(stats),
            ),
        ],
    )


def _bar(unit: Unit, storage: Storage) -> OwnedBuffer:
    name = plain_name(unit.name) or "root"
    if not storage.sharded:
        extents = [
            Extent(
                label=plain_name(member.name),
                nbytes=prod(shape) * storage.dtype.itemsize,
                owner=None,
            )
            for member, shape in zip(storage.members, storage.layout.shapes, strict=True)
        ]
        return OwnedBuffer(name=f"{name} (replicated)", extents=extents)
    extents = [
        Extent(
            label=f"{plain_name(member.name)}[{info.start}:{info.start + info.size}]",
            nbytes=info.size * storage.dtype.itemsize,
            owner=storage.group.ranks[info.rank],
        )
        for i, member in enumerate(storage.members)
        for info in storage.layout.info(i)
        if info.size
    ]
    return OwnedBuffer(name=name, extents=extents)


def _row(storage: Storage, i: int) -> list[str]:
    shape = storage.layout.shapes[i]
    numel, local = prod(shape), storage.local_ranges[i]
    if not storage.sharded or local.numel == numel:
        elements = "all"
    else:
        elements = f"{local.start}:{local.start + local.numel}" if local.numel else "none"
    size = bytes_text(numel * storage.dtype.itemsize)
    return [plain_name(storage.members[i].name), str(shape), size, elements]


def _sent_about(shown: FSDP) -> str:
    if shown.group.shares_memory:
        return "The ranks share memory, so that an unshard moves nothing; gradients are reduced."
    return "Each unit is gathered for its forward and its backward as the strategy says."


def _sent(shown: FSDP) -> TextTable:
    rows = [
        [
            plain_name(unit.name) or "root",
            bytes_text(sum(s.layout.numel * s.compute_dtype.itemsize for s in unit.storages)),
            bytes_text(
                sum(
                    shard.storage.layout.numel * shard.storage.dtype.itemsize
                    for shard in unit.gradient_shards
                )
            ),
        ]
        for unit in shown._units[:_MOST_ROWS]
        if unit.storages
    ]
    return TextTable(heads=["unit", "unsharded parameters", "gradients"], rows=rows)


def _memory(stats: MemoryStats) -> TextTable:
    peaks = {"gathered": stats.peak_gathered, "gradients": stats.peak_gradients}
    rows = [
        [name, bytes_text(nbytes), bytes_text(peaks[name]) if name in peaks else ""]
        for name, nbytes in stats.by_category().items()
    ]
    return TextTable(heads=["what", "now", "at most so far"], rows=rows)
