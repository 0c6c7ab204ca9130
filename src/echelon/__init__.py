"""Trains one PyTorch model on many ranks, with the same weights as one process would give.

Names are loaded when they are first used, so that ``echelon --help`` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from echelon.version import __version__

if TYPE_CHECKING:
    from echelon import errors, events, observe, pipeline, testing
    from echelon.checkpoint.api import async_save, load, save, steps
    from echelon.checkpoint.background import AsyncSave
    from echelon.checkpoint.loading import Loaded
    from echelon.ddp import DDP
    from echelon.errors import (
        ArgumentError,
        AuthenticationError,
        CheckpointCorrupt,
        CheckpointError,
        CheckpointMismatch,
        CheckpointNotFound,
        CheckpointTooNew,
        CollectiveMismatch,
        CommError,
        CommTimeout,
        DeadlockError,
        EchelonError,
        ModelMismatch,
        NonFiniteError,
        RankError,
        RankFailed,
        ScheduleError,
        SharedMemoryError,
        StageError,
        StartMismatch,
        StateError,
        UnsupportedError,
        WorldError,
    )
    from echelon.finite import FiniteGuard, NonFinite
    from echelon.fsdp import FSDP, BackwardPrefetch, MixedPrecision, Offload, Strategy, units
    from echelon.gradients import clip_grad_norm_
    from echelon.parallel import parallelize
    from echelon.pipeline.api import Pipeline
    from echelon.plans import Plan
    from echelon.sampling import ResumableSampler
    from echelon.scaling import GradScaler
    from echelon.stopping import EXIT_RESUMABLE, StopSignals
    from echelon.world.base import World
    from echelon.world.group import Group
    from echelon.world.mesh import Mesh
    from echelon.world.run import init, run
    from echelon.world.work import Window, Work

__all__ = [
    "DDP",
    "EXIT_RESUMABLE",
    "FSDP",
    "ArgumentError",
    "AsyncSave",
    "AuthenticationError",
    "BackwardPrefetch",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointTooNew",
    "CollectiveMismatch",
    "CommError",
    "CommTimeout",
    "DeadlockError",
    "EchelonError",
    "FiniteGuard",
    "GradScaler",
    "Group",
    "Loaded",
    "Mesh",
    "MixedPrecision",
    "ModelMismatch",
    "NonFinite",
    "NonFiniteError",
    "Offload",
    "Pipeline",
    "Plan",
    "RankError",
    "RankFailed",
    "ResumableSampler",
    "ScheduleError",
    "SharedMemoryError",
    "StageError",
    "StartMismatch",
    "StateError",
    "StopSignals",
    "Strategy",
    "UnsupportedError",
    "Window",
    "Work",
    "World",
    "WorldError",
    "__version__",
    "async_save",
    "clip_grad_norm_",
    "errors",
    "events",
    "init",
    "load",
    "observe",
    "parallelize",
    "pipeline",
    "run",
    "save",
    "steps",
    "testing",
    "units",
]

# Where each name lives; a module itself where the value ends in its own name.
_HOMES = {
    "AsyncSave": "echelon.checkpoint.background",
    "Loaded": "echelon.checkpoint.loading",
    "async_save": "echelon.checkpoint.api",
    "load": "echelon.checkpoint.api",
    "save": "echelon.checkpoint.api",
    "steps": "echelon.checkpoint.api",
    "DDP": "echelon.ddp",
    "FSDP": "echelon.fsdp",
    "BackwardPrefetch": "echelon.fsdp",
    "MixedPrecision": "echelon.fsdp",
    "Offload": "echelon.fsdp",
    "Strategy": "echelon.fsdp",
    "Pipeline": "echelon.pipeline.api",
    "Plan": "echelon.plans",
    "parallelize": "echelon.parallel",
    "FiniteGuard": "echelon.finite",
    "NonFinite": "echelon.finite",
    "ResumableSampler": "echelon.sampling",
    "GradScaler": "echelon.scaling",
    "EXIT_RESUMABLE": "echelon.stopping",
    "StopSignals": "echelon.stopping",
    "clip_grad_norm_": "echelon.gradients",
    "World": "echelon.world.base",
    "Group": "echelon.world.group",
    "Mesh": "echelon.world.mesh",
    "init": "echelon.world.run",
    "run": "echelon.world.run",
    "Window": "echelon.world.work",
    "Work": "echelon.world.work",
}
_MODULES = {
    "errors": "echelon.errors",
    "events": "echelon.events",
    "observe": "echelon.observe",
    "pipeline": "echelon.pipeline",
    "testing": "echelon.testing",
    "units": "echelon.fsdp.units",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'echelon' has no attribute {name!r}")
    if name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        value = getattr(importlib.import_module(_HOMES.get(name, "echelon.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
