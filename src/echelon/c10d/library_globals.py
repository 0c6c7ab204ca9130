"""Globals of installed libraries that each simulated rank has for itself, and why.

Libraries that people train with keep in globals which rank a process is. What is listed here is
exchanged at each turn. A library that is not here can be each rank's own as a package:
``comm.threads.rank_modules``.
"""

from __future__ import annotations

from typing import Any

from echelon.comm.threads.process_state import register_state
from echelon.comm.threads.replaced_names import Names, Place, empty


def _without_runs(singletons: dict[type, Any]) -> dict[type, Any]:
    """Hydra's objects by their classes but for those of a run that has begun."""
    of_run = {"GlobalHydra", "HydraConfig"}
    return {kind: value for kind, value in singletons.items() if kind.__name__ not in of_run}


PLACES: tuple[Place, ...] = (
    Place(
        "accelerate.state",
        (
            "PartialState._shared_state",
            "AcceleratorState._shared_state",
            "GradientState._shared_state",
        ),
        empty,
        "the number of this rank, its device, and whether it accumulates gradients",
    ),
    Place(
        "hydra.core.singleton",
        ("Singleton._instances",),
        _without_runs,
        "the configuration with which this rank runs",
    ),
    Place(
        "transformers.modeling_utils",
        ("PreTrainedModel.init_weights", "PreTrainedModel.tie_weights"),
        reason="from_pretrained replaces them while it builds a model, in which ranks may wait",
    ),
)

_globals = Names(PLACES)
register_state("libraries", _globals.read, _globals.write, _globals.first_values)
