"""What a user can ask an ``FSDP`` about its units and its memory."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MemoryStats", "UnitInfo"]


@dataclass(frozen=True, slots=True)
class UnitInfo:
    """Parameters that are gathered together.

    Attributes:
        name: of the module; empty for the root.
        names: of the parameters, in the order of the buffers.
        numel: of the whole unit.
        sharded: whether ranks keep different parts.
        gathered: whether it is whole now.
    """

    name: str
    names: tuple[str, ...]
    numel: int
    sharded: bool
    gathered: bool


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Bytes that this rank holds for the model, and how often units moved.

    Attributes:
        shards: parts of parameters, in the model's dtype.
        gathered: whole parameters, now; the share of this rank where ranks share the memory.
        gradients: parts of gradients.
        slots: where whole gradients travel.
        saved: parameters and gradients that DDP would hold more.
        num_all_gathers: how often a unit was made whole.
        num_reduce_scatters: how often the gradients of a unit's storage were reduced.
    """

    shards: int
    gathered: int
    gradients: int
    slots: int
    saved: int
    num_all_gathers: int
    num_reduce_scatters: int
