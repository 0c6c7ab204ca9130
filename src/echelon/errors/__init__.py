"""The exception tree. Each class takes facts and builds its sentence, so messages agree.

::

    EchelonError
    ├── ArgumentError (ValueError)      a call or an option that cannot be carried out
    │   ├── RankError                   a rank that is not in the group
    │   ├── ScheduleError               a pipeline schedule that cannot run
    │   └── UnsupportedError            a combination that this backend or technique does not have
    ├── StateError (RuntimeError)       the right call at the wrong time
    ├── DebuggerQuit                    a user has ended the run in the debugger
    ├── DeviceMemoryError (RuntimeError)  a device has no memory for a unit
    ├── ModelMismatch                   the ranks hold different models
    ├── StageError                      a stage of a pipeline raised
    ├── CheckpointError                 a checkpoint that could not be written or read
    │   ├── CheckpointNotFound          there is no committed checkpoint
    │   ├── CheckpointCorrupt           its bytes are not those that were written
    │   ├── CheckpointTooNew            a newer version of this library has written it
    │   └── CheckpointMismatch          it is of another model, optimizer or state
    ├── BlackboxError                   a black box that cannot be written or read
    │   ├── BlackboxCorrupt             its bytes are not those that were written
    │   ├── ReplayMismatch              the script, a version or the ranks are not those of the run
    │   └── StepNotKept                 a step that cannot be replayed
    ├── NonFiniteError (FloatingPointError)  NaN or Inf in a loss or in gradients
    ├── WorldError                      a world that could not be started
    │   ├── SharedMemoryError           not enough shared memory
    │   ├── AuthenticationError         what speaks as a rank is none of this job
    │   └── StartMismatch               the ranks were started differently
    └── CommError                       ranks that fail to communicate
        ├── CollectiveMismatch          different collectives at one position
        ├── RankFailed                  another rank raised, left or died
        ├── DeadlockError               ranks that wait for one another
        └── CommTimeout (TimeoutError)  a rank that did not come in time
"""

from __future__ import annotations

from echelon.errors.blackbox_errors import (
    BlackboxCorrupt,
    BlackboxError,
    ReplayMismatch,
    StepNotKept,
)
from echelon.errors.checkpoint_errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointTooNew,
)
from echelon.errors.echelon_error import (
    ArgumentError,
    DebuggerQuit,
    EchelonError,
    ModelMismatch,
    NonFiniteError,
    RankError,
    ScheduleError,
    StageError,
    StateError,
    UnsupportedError,
)
from echelon.errors.world_errors import (
    AuthenticationError,
    CollectiveMismatch,
    CommError,
    CommTimeout,
    DeadlockError,
    DeviceMemoryError,
    RankFailed,
    SharedMemoryError,
    StartMismatch,
    WorldError,
)

__all__ = [
    "ArgumentError",
    "AuthenticationError",
    "BlackboxCorrupt",
    "BlackboxError",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointTooNew",
    "CollectiveMismatch",
    "CommError",
    "CommTimeout",
    "DeadlockError",
    "DebuggerQuit",
    "DeviceMemoryError",
    "EchelonError",
    "ModelMismatch",
    "NonFiniteError",
    "RankError",
    "RankFailed",
    "ReplayMismatch",
    "ScheduleError",
    "SharedMemoryError",
    "StageError",
    "StartMismatch",
    "StateError",
    "StepNotKept",
    "UnsupportedError",
    "WorldError",
]

for _name in __all__:  # tracebacks show the name by which everybody imports it
    globals()[_name].__module__ = __name__
