"""Trains one PyTorch model on many ranks, with the weights that one process would compute.

Names are imported when they are first used, so that ``echelon --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from echelon.process import offered_debugger as _offered_debugger
from echelon.version import __version__

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from echelon import errors, events, observe, pipeline, testing
    from echelon.checkpoint.api import async_save, load, prepare_run, save, steps
    from echelon.checkpoint.async_save import AsyncSave
    from echelon.checkpoint.loading import Loaded
    from echelon.checkpoint.store_path import StorePath
    from echelon.comm.group import Group
    from echelon.comm.mesh import Mesh
    from echelon.comm.work import Window, Work
    from echelon.comm.world import World
    from echelon.ddp import DDP
    from echelon.errors import (
        ArgumentError,
        AuthenticationError,
        BlackboxCorrupt,
        BlackboxError,
        CheckpointCorrupt,
        CheckpointError,
        CheckpointMismatch,
        CheckpointNotFound,
        CheckpointTooNew,
        CollectiveMismatch,
        CommError,
        CommTimeout,
        DeadlockError,
        DebuggerQuit,
        EchelonError,
        ModelMismatch,
        NonFiniteError,
        RankError,
        RankFailed,
        ReplayMismatch,
        ScheduleError,
        SharedMemoryError,
        StageError,
        StartMismatch,
        StateError,
        StepNotKept,
        UnsupportedError,
        WorldError,
    )
    from echelon.fsdp import (
        FSDP,
        BackwardPrefetch,
        MixedPrecision,
        Offload,
        ShardInfo,
        Strategy,
        units,
    )
    from echelon.laboratory.blackbox import Blackbox
    from echelon.laboratory.compare import compare
    from echelon.laboratory.comparison import (
        Cause,
        CauseKind,
        Comparison,
        ValueDifference,
        ValueKind,
    )
    from echelon.laboratory.rank_replay import NoteDifference
    from echelon.laboratory.replay import Replay, replay
    from echelon.laboratory.show import show
    from echelon.laboratory.step_record import RecordedCall, StepRecord
    from echelon.laboratory.step_through import SteppedRun, step_through
    from echelon.laboratory.stepped_call import SteppedCall
    from echelon.launch.run import init, run
    from echelon.modules.sharded_tensor import local_shard
    from echelon.pipeline.api import Pipeline
    from echelon.planner.api import plan
    from echelon.planner.ranked_plans import Plans
    from echelon.plans.parallelize import parallelize
    from echelon.plans.plans import Plan
    from echelon.train.ema import EMA
    from echelon.train.finite import FiniteGuard, NonFinite
    from echelon.train.gathered_rows import all_gather_rows
    from echelon.train.gathering import gather_samples
    from echelon.train.gradient_norm import clip_grad_norm_
    from echelon.train.mapped_values import SharedColumn
    from echelon.train.mixture import Mixture
    from echelon.train.packing import PackedSequences
    from echelon.train.sample_stream import SampleStream
    from echelon.train.sampling import ResumableSampler
    from echelon.train.scaling import GradScaler
    from echelon.train.shared_data import shared_dataset
    from echelon.train.stopping import EXIT_RESUMABLE, StopSignals

__all__ = [
    "DDP",
    "EMA",
    "EXIT_RESUMABLE",
    "FSDP",
    "ArgumentError",
    "AsyncSave",
    "AuthenticationError",
    "BackwardPrefetch",
    "Blackbox",
    "BlackboxCorrupt",
    "BlackboxError",
    "Cause",
    "CauseKind",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointTooNew",
    "CollectiveMismatch",
    "CommError",
    "CommTimeout",
    "Comparison",
    "DeadlockError",
    "DebuggerQuit",
    "EchelonError",
    "FiniteGuard",
    "GradScaler",
    "Group",
    "Loaded",
    "Mesh",
    "MixedPrecision",
    "Mixture",
    "ModelMismatch",
    "NonFinite",
    "NonFiniteError",
    "NoteDifference",
    "Offload",
    "PackedSequences",
    "Pipeline",
    "Plan",
    "Plans",
    "RankError",
    "RankFailed",
    "RecordedCall",
    "Replay",
    "ReplayMismatch",
    "ResumableSampler",
    "SampleStream",
    "ScheduleError",
    "ShardInfo",
    "SharedColumn",
    "SharedMemoryError",
    "StageError",
    "StartMismatch",
    "StateError",
    "StepNotKept",
    "StepRecord",
    "SteppedCall",
    "SteppedRun",
    "StopSignals",
    "StorePath",
    "Strategy",
    "UnsupportedError",
    "ValueDifference",
    "ValueKind",
    "Window",
    "Work",
    "World",
    "WorldError",
    "__version__",
    "all_gather_rows",
    "async_save",
    "clip_grad_norm_",
    "compare",
    "errors",
    "events",
    "gather_samples",
    "init",
    "load",
    "local_shard",
    "observe",
    "parallelize",
    "pipeline",
    "plan",
    "prepare_run",
    "replay",
    "run",
    "save",
    "shared_dataset",
    "show",
    "step_through",
    "steps",
    "testing",
    "units",
]

# The module that defines each name; names that are not here are those of echelon.errors.
_HOMES = {
    "PackedSequences": "echelon.train.packing",
    "Mixture": "echelon.train.mixture",
    "SampleStream": "echelon.train.sample_stream",
    "StorePath": "echelon.checkpoint.store_path",
    "SharedColumn": "echelon.train.mapped_values",
    "shared_dataset": "echelon.train.shared_data",
    "all_gather_rows": "echelon.train.gathered_rows",
    "gather_samples": "echelon.train.gathering",
    "AsyncSave": "echelon.checkpoint.async_save",
    "Loaded": "echelon.checkpoint.loading",
    "async_save": "echelon.checkpoint.api",
    "load": "echelon.checkpoint.api",
    "prepare_run": "echelon.checkpoint.api",
    "local_shard": "echelon.modules.sharded_tensor",
    "save": "echelon.checkpoint.api",
    "steps": "echelon.checkpoint.api",
    "DDP": "echelon.ddp",
    "FSDP": "echelon.fsdp",
    "BackwardPrefetch": "echelon.fsdp",
    "MixedPrecision": "echelon.fsdp",
    "Offload": "echelon.fsdp",
    "ShardInfo": "echelon.fsdp",
    "Strategy": "echelon.fsdp",
    "Pipeline": "echelon.pipeline.api",
    "Cause": "echelon.laboratory.comparison",
    "CauseKind": "echelon.laboratory.comparison",
    "Comparison": "echelon.laboratory.comparison",
    "ValueDifference": "echelon.laboratory.comparison",
    "ValueKind": "echelon.laboratory.comparison",
    "compare": "echelon.laboratory.compare",
    "Plan": "echelon.plans.plans",
    "Plans": "echelon.planner.ranked_plans",
    "plan": "echelon.planner.api",
    "parallelize": "echelon.plans.parallelize",
    "EMA": "echelon.train.ema",
    "FiniteGuard": "echelon.train.finite",
    "NonFinite": "echelon.train.finite",
    "ResumableSampler": "echelon.train.sampling",
    "GradScaler": "echelon.train.scaling",
    "EXIT_RESUMABLE": "echelon.train.stopping",
    "StopSignals": "echelon.train.stopping",
    "clip_grad_norm_": "echelon.train.gradient_norm",
    "Blackbox": "echelon.laboratory.blackbox",
    "NoteDifference": "echelon.laboratory.rank_replay",
    "Replay": "echelon.laboratory.replay",
    "replay": "echelon.laboratory.replay",
    "show": "echelon.laboratory.show",
    "RecordedCall": "echelon.laboratory.step_record",
    "StepRecord": "echelon.laboratory.step_record",
    "SteppedCall": "echelon.laboratory.stepped_call",
    "SteppedRun": "echelon.laboratory.step_through",
    "step_through": "echelon.laboratory.step_through",
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


def _open_debugger(frame: FrameType | TracebackType, header: str | None) -> None:
    importlib.import_module("echelon.laboratory.debugger").stop(frame, header)


_offered_debugger.offer_debugger(_open_debugger)
