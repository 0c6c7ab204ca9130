"""Trains one PyTorch model on many ranks, with the weights that one process would compute.

Names are imported when they are first used, so that ``echelon --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from echelon.process import offered_debugger as _offered_debugger
from echelon.version import __version__ as __version__

if TYPE_CHECKING:  # for type checkers and editors
    from types import FrameType, TracebackType

    from echelon import errors as errors
    from echelon import events as events
    from echelon import observe as observe
    from echelon import pipeline as pipeline
    from echelon import testing as testing
    from echelon.checkpoint.api import async_save as async_save
    from echelon.checkpoint.api import load as load
    from echelon.checkpoint.api import prepare_run as prepare_run
    from echelon.checkpoint.api import save as save
    from echelon.checkpoint.api import steps as steps
    from echelon.checkpoint.async_save import AsyncSave as AsyncSave
    from echelon.checkpoint.loading import Loaded as Loaded
    from echelon.checkpoint.store_path import StorePath as StorePath
    from echelon.comm.group import Group as Group
    from echelon.comm.mesh import Mesh as Mesh
    from echelon.comm.work import Window as Window
    from echelon.comm.work import Work as Work
    from echelon.comm.world import World as World
    from echelon.ddp import DDP as DDP
    from echelon.errors import ArgumentError as ArgumentError
    from echelon.errors import AuthenticationError as AuthenticationError
    from echelon.errors import BlackboxCorrupt as BlackboxCorrupt
    from echelon.errors import BlackboxError as BlackboxError
    from echelon.errors import CheckpointCorrupt as CheckpointCorrupt
    from echelon.errors import CheckpointError as CheckpointError
    from echelon.errors import CheckpointMismatch as CheckpointMismatch
    from echelon.errors import CheckpointNotFound as CheckpointNotFound
    from echelon.errors import CheckpointTooNew as CheckpointTooNew
    from echelon.errors import CollectiveMismatch as CollectiveMismatch
    from echelon.errors import CommError as CommError
    from echelon.errors import CommTimeout as CommTimeout
    from echelon.errors import DeadlockError as DeadlockError
    from echelon.errors import DebuggerQuit as DebuggerQuit
    from echelon.errors import EchelonError as EchelonError
    from echelon.errors import ModelMismatch as ModelMismatch
    from echelon.errors import NonFiniteError as NonFiniteError
    from echelon.errors import RankError as RankError
    from echelon.errors import RankFailed as RankFailed
    from echelon.errors import ReplayMismatch as ReplayMismatch
    from echelon.errors import ScheduleError as ScheduleError
    from echelon.errors import SharedMemoryError as SharedMemoryError
    from echelon.errors import StageError as StageError
    from echelon.errors import StartMismatch as StartMismatch
    from echelon.errors import StateError as StateError
    from echelon.errors import StepNotKept as StepNotKept
    from echelon.errors import UnsupportedError as UnsupportedError
    from echelon.errors import WorldError as WorldError
    from echelon.fsdp import FSDP as FSDP
    from echelon.fsdp import BackwardPrefetch as BackwardPrefetch
    from echelon.fsdp import MixedPrecision as MixedPrecision
    from echelon.fsdp import Offload as Offload
    from echelon.fsdp import ShardInfo as ShardInfo
    from echelon.fsdp import Strategy as Strategy
    from echelon.fsdp import units as units
    from echelon.laboratory.blackbox import Blackbox as Blackbox
    from echelon.laboratory.compare import compare as compare
    from echelon.laboratory.comparison import Cause as Cause
    from echelon.laboratory.comparison import CauseKind as CauseKind
    from echelon.laboratory.comparison import Comparison as Comparison
    from echelon.laboratory.comparison import ValueDifference as ValueDifference
    from echelon.laboratory.comparison import ValueKind as ValueKind
    from echelon.laboratory.rank_replay import NoteDifference as NoteDifference
    from echelon.laboratory.replay import Replay as Replay
    from echelon.laboratory.replay import replay as replay
    from echelon.laboratory.show import show as show
    from echelon.laboratory.step_record import RecordedCall as RecordedCall
    from echelon.laboratory.step_record import StepRecord as StepRecord
    from echelon.laboratory.step_through import SteppedRun as SteppedRun
    from echelon.laboratory.step_through import step_through as step_through
    from echelon.laboratory.stepped_call import SteppedCall as SteppedCall
    from echelon.launch.run import init as init
    from echelon.launch.run import run as run
    from echelon.modules.sharded_tensor import local_shard as local_shard
    from echelon.pipeline.api import Pipeline as Pipeline
    from echelon.planner.api import plan as plan
    from echelon.planner.ranked_plans import Plans as Plans
    from echelon.plans.parallelize import parallelize as parallelize
    from echelon.plans.plans import Plan as Plan
    from echelon.train.ema import EMA as EMA
    from echelon.train.finite import FiniteGuard as FiniteGuard
    from echelon.train.finite import NonFinite as NonFinite
    from echelon.train.gathered_rows import all_gather_rows as all_gather_rows
    from echelon.train.gathering import gather_samples as gather_samples
    from echelon.train.gradient_norm import clip_grad_norm_ as clip_grad_norm_
    from echelon.train.mapped_values import SharedColumn as SharedColumn
    from echelon.train.mixture import Mixture as Mixture
    from echelon.train.packing import PackedSequences as PackedSequences
    from echelon.train.sample_stream import SampleStream as SampleStream
    from echelon.train.sampling import ResumableSampler as ResumableSampler
    from echelon.train.scaling import GradScaler as GradScaler
    from echelon.train.shared_data import shared_dataset as shared_dataset
    from echelon.train.stopping import EXIT_RESUMABLE as EXIT_RESUMABLE
    from echelon.train.stopping import StopSignals as StopSignals

# The public names of each module, by which they are imported when they are first used.
_NAMES = {
    "echelon": "errors events observe pipeline testing",
    "echelon.checkpoint.api": "async_save load prepare_run save steps",
    "echelon.checkpoint.async_save": "AsyncSave",
    "echelon.checkpoint.loading": "Loaded",
    "echelon.checkpoint.store_path": "StorePath",
    "echelon.comm.group": "Group",
    "echelon.comm.mesh": "Mesh",
    "echelon.comm.work": "Window Work",
    "echelon.comm.world": "World",
    "echelon.ddp": "DDP",
    "echelon.errors": (
        "ArgumentError AuthenticationError BlackboxCorrupt BlackboxError CheckpointCorrupt "
        "CheckpointError CheckpointMismatch CheckpointNotFound CheckpointTooNew "
        "CollectiveMismatch CommError CommTimeout DeadlockError DebuggerQuit EchelonError "
        "ModelMismatch NonFiniteError RankError RankFailed ReplayMismatch ScheduleError "
        "SharedMemoryError StageError StartMismatch StateError StepNotKept UnsupportedError "
        "WorldError"
    ),
    "echelon.fsdp": "FSDP BackwardPrefetch MixedPrecision Offload ShardInfo Strategy units",
    "echelon.laboratory.blackbox": "Blackbox",
    "echelon.laboratory.compare": "compare",
    "echelon.laboratory.comparison": "Cause CauseKind Comparison ValueDifference ValueKind",
    "echelon.laboratory.rank_replay": "NoteDifference",
    "echelon.laboratory.replay": "Replay replay",
    "echelon.laboratory.show": "show",
    "echelon.laboratory.step_record": "RecordedCall StepRecord",
    "echelon.laboratory.step_through": "SteppedRun step_through",
    "echelon.laboratory.stepped_call": "SteppedCall",
    "echelon.launch.run": "init run",
    "echelon.modules.sharded_tensor": "local_shard",
    "echelon.pipeline.api": "Pipeline",
    "echelon.planner.api": "plan",
    "echelon.planner.ranked_plans": "Plans",
    "echelon.plans.parallelize": "parallelize",
    "echelon.plans.plans": "Plan",
    "echelon.train.ema": "EMA",
    "echelon.train.finite": "FiniteGuard NonFinite",
    "echelon.train.gathered_rows": "all_gather_rows",
    "echelon.train.gathering": "gather_samples",
    "echelon.train.gradient_norm": "clip_grad_norm_",
    "echelon.train.mapped_values": "SharedColumn",
    "echelon.train.mixture": "Mixture",
    "echelon.train.packing": "PackedSequences",
    "echelon.train.sample_stream": "SampleStream",
    "echelon.train.sampling": "ResumableSampler",
    "echelon.train.scaling": "GradScaler",
    "echelon.train.shared_data": "shared_dataset",
    "echelon.train.stopping": "EXIT_RESUMABLE StopSignals",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'echelon' has no attribute {name!r}")
    home = _HOMES[name]
    if home == __name__:  # a module
        value: Any = importlib.import_module(f"{home}.{name}")
    else:
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _open_debugger(frame: FrameType | TracebackType, header: str | None) -> None:
    importlib.import_module("echelon.laboratory.debugger").stop(frame, header)


_offered_debugger.offer_debugger(_open_debugger)
