"""Trains one PyTorch model on many ranks, with the weights that one process would compute.

Names are imported when they are first used, so that ``echelon --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from echelon.version import __version__

if TYPE_CHECKING:
    from echelon import errors, events, observe, pipeline, testing
    from echelon.checkpoint.api import async_save, load, save, steps
    from echelon.checkpoint.async_save import AsyncSave
    from echelon.checkpoint.loading import Loaded
    from echelon.comm.group import Group
    from echelon.comm.mesh import Mesh
    from echelon.comm.work import Window, Work
    from echelon.comm.world import World
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
    from echelon.fsdp import FSDP, BackwardPrefetch, MixedPrecision, Offload, Strategy, units
    from echelon.launch.run import init, run
    from echelon.pipeline.api import Pipeline
    from echelon.plan.parallelize import parallelize
    from echelon.plan.plans import Plan
    from echelon.train.finite import FiniteGuard, NonFinite
    from echelon.train.gradient_norm import clip_grad_norm_
    from echelon.train.sampling import ResumableSampler
    from echelon.train.scaling import GradScaler
    from echelon.train.stopping import EXIT_RESUMABLE, StopSignals

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

# The module that defines each name; names that are not here are those of echelon.errors.
_HOMES = {
    "AsyncSave": "echelon.checkpoint.async_save",
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
    "Plan": "echelon.plan.plans",
    "parallelize": "echelon.plan.parallelize",
    "FiniteGuard": "echelon.train.finite",
    "NonFinite": "echelon.train.finite",
    "ResumableSampler": "echelon.train.sampling",
    "GradScaler": "echelon.train.scaling",
    "EXIT_RESUMABLE": "echelon.train.stopping",
    "StopSignals": "echelon.train.stopping",
    "clip_grad_norm_": "echelon.train.gradient_norm",
    "World": "echelon.comm.world",
    "Group": "echelon.comm.group",
    "Mesh": "echelon.comm.mesh",
    "init": "echelon.launch.run",
    "run": "echelon.launch.run",
    "Window": "echelon.comm.work",
    "Work": "echelon.comm.work",
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
