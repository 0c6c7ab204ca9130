"""New memory of some ranks of a group, mapped by all; or the same error on every rank."""

from __future__ import annotations

import torch

from echelon.comm.shm.area import Area
from echelon.comm.shm.segment import Segment
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import SharedMemoryError

_NOTE_NBYTES = 64
_REFUSED = "!"  # before what was needed and what there was


def share_segments(
    area: Area,
    call: CollectiveCall,
    nbytes: int,
    *,
    what: str,
    timeout: float,
    reserve: bool = True,
) -> dict[int, Segment]:
    """Make a segment on each rank that wants one and map all of them: by rank. Takes two rounds.

    Args:
        nbytes: of this rank's segment; 0 makes none.
        what: it is for, in errors.
        reserve: take the memory now; else when it is touched.

    Raises:
        SharedMemoryError: on some rank there is not enough; raised on all, so they stay in step.
    """
    mine, note = None, ""
    try:
        if nbytes:
            mine = Segment.create(nbytes, what=what, reserve=reserve)
            note = mine.token
    except SharedMemoryError as error:
        note = f"{_REFUSED}{error.needed}:{error.available}"
    slots = area.parts(torch.uint8, _NOTE_NBYTES)
    slots[area.rank].copy_(
        torch.frombuffer(bytearray(note.encode().ljust(_NOTE_NBYTES)), dtype=torch.uint8)
    )
    area.next_round(call, timeout)
    notes = [bytes(slot.numpy()).decode().strip() for slot in slots]
    refused = {rank: text for rank, text in enumerate(notes) if text.startswith(_REFUSED)}
    segments = {
        rank: mine if mine and rank == area.rank else Segment.open(token, populate=reserve)
        for rank, token in enumerate(notes)
        if token and not refused
    }
    area.next_round(call, timeout)  # all have opened it
    if mine is not None:
        mine.unpublish()
    for rank, text in refused.items():
        needed, available = map(int, text.removeprefix(_REFUSED).split(":"))
        raise SharedMemoryError(f"{what} (on rank {area.ranks[rank]})", needed, available)
    return segments
