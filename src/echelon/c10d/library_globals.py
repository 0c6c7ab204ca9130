"""Globals of installed libraries that each simulated rank has for itself, and why.

Libraries that people train with keep in globals which rank a process is. What is listed here is
exchanged at each turn. A library that is not here can be each rank's own as a package:
``comm.threads.rank_modules``.
"""

from __future__ import annotations

from typing import Any

from echelon.c10d.exchanged_globals import ExchangedGlobals, Place, Values
from echelon.comm.threads.process_state import register_state


def _empty(value: Any) -> Any:
    return type(value)()


PLACES: tuple[Place, ...] = (
    Place(
        "accelerate.state",
        (
            "PartialState._shared_state",
            "AcceleratorState._shared_state",
            "GradientState._shared_state",
        ),
        _empty,
        "the number of this rank, its device, and whether it accumulates gradients",
    ),
)

_globals = ExchangedGlobals(PLACES)


def _nothing(_: Values) -> Values:
    return {}


register_state("libraries", _globals.save, _globals.restore, _nothing)
