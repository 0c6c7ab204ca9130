"""Says which parameter it was that a forward used while its unit was released.

There it is this rank's part, which has another shape, so torch complains about shapes and names
nothing. Nothing is watched for it: only when a forward has failed, the places where it did are
searched for such a parameter.
"""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NamedTuple

from torch import nn

from echelon.errors import EchelonError, StateError
from echelon.fsdp.unit import Unit


class _Released(NamedTuple):
    """A parameter that is a part now."""

    name: str
    param: nn.Parameter
    unit: str
    shape: tuple[int, ...]


def released_parameter(error: BaseException, units: Sequence[Unit]) -> StateError | None:
    """What to raise instead of ``error``; None if it has to do with no released parameter."""
    if isinstance(error, EchelonError) or not isinstance(error, RuntimeError | IndexError):
        return None
    frames = list(traceback.walk_tb(error.__traceback__))
    # Those that ran were whole; they have been released since, on the way up.
    ran = {id(frame.f_locals.get("self")) for frame, _ in frames}
    released = [
        _Released(member.name, member.param, unit.label, shape)
        for unit in units
        if not unit.gathered and id(unit.module) not in ran
        for storage in unit.storages
        if storage.sharded
        for member, shape in zip(storage.members, storage.cut.shapes, strict=True)
    ]
    for frame, line in reversed(frames):
        found = next(_used(frame, line, released), None)
        if found is not None:
            file = frame.f_code.co_filename.rpartition("/")[2]
            return StateError(
                f"parameter {found.name!r} was used at {file}:{line} while its unit "
                f"{found.unit!r} was released, so it was this rank's part, "
                f"{list(found.param.shape)} of {list(found.shape)}: use it inside of the forward "
                "of its unit, make no unit of that module (then it belongs to the one around it), "
                "or call what uses it inside `with model.full_parameters():`, on all ranks"
            )
    return None


def _used(frame: FrameType, line: int, released: Sequence[_Released]) -> Iterator[_Released]:
    """The released parameters that a line of code works with."""
    values = {id(value) for value in frame.f_locals.values()}
    yield from (one for one in released if id(one.param) in values)
    source = linecache.getline(frame.f_code.co_filename, line)
    names = set(re.findall(r"[\w.]+", re.sub(r"\[(\d+)\]", r".\1", source)))
    for one in released:
        owner, _, local = one.name.rpartition(".")
        tail = f"{owner.rpartition('.')[2]}.{local}".lstrip(".")
        if any(f".{name}.".find(f".{tail}.") >= 0 for name in names):
            yield one
