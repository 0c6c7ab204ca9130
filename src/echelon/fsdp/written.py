"""What the user has written outside of forwards: other memory for a part, and values of copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from echelon.errors import StateError
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.storage import Storage, await_readers
from echelon.fsdp.unit import Unit


def take_replaced(units: Sequence[Unit]) -> None:
    """Take over what was given to parameters as other memory, as ``param.data = value`` does.

    Raises:
        StateError: it has not the shape of this rank's part.
    """
    for unit in units:
        for storage in () if unit.gathered else unit.storages:
            for name, param, part in storage.replaced():
                if param.shape != part.shape:
                    raise StateError(
                        f"parameter {name!r} was given a value of {list(param.shape)}, and this "
                        f"rank's part is {list(part.shape)}: give whole values inside `with "
                        "model.full_parameters(writeback=True):`, which all ranks enter, or to "
                        "load_state_dict()"
                    )
                await_readers([storage])
                with torch.no_grad():
                    part.copy_(param.data)
                param.data = part


def make_copies_equal(storages: Sequence[Storage], ranks: HybridGroups) -> None:
    """Give all ranks that hold the same part that of the first of them. All ranks call it."""
    for storage in storages:
        for member, part in zip(storage.members, storage.locals, strict=True):
            label = f"initial {member.name}"
            if not storage.sharded:
                ranks.broadcast(part, label)
            elif ranks.replicas is not None:
                ranks.replicas.broadcast(part, 0, label=label)
