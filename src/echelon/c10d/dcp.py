"""Checkpoints of ``torch.distributed.checkpoint`` (DCP), read and written by one process."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save

from echelon.errors import CheckpointCorrupt, CheckpointError
from echelon.process.atomic_files import draft_folder, naming, system_error_behind

_METADATA = ".metadata"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # a disk, or what a user may have of it


def is_dcp(path: Path) -> bool:
    """Whether a folder holds such a checkpoint."""
    return (path / _METADATA).is_file()


def read_dcp(path: Path) -> dict[str, Any]:
    """The nested state dict of a checkpoint, in memory.

    Its metadata are a pickle, which runs whatever code its author put there: read only what you
    have written.

    Raises:
        CheckpointCorrupt: it cannot be read.
        OSError: there is no room beside it for a copy.
    """
    for entry in path.iterdir():
        if not (entry.is_file() or entry.is_dir()):  # a read of a pipe would wait for a writer
            raise CheckpointCorrupt("is no ordinary file", entry)
    with draft_folder(path) as folder:
        file = os.path.join(folder, "state.pt")
        try:
            # As a file of Python, whose errors have a number; torch's own say "unexpected pos".
            with naming(path), open(file, "xb") as copy:
                dcp_to_torch_save(path, copy)  # type: ignore[arg-type]
        # Its own exceptions derive from BaseException; end with those of the interpreter.
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            cause = system_error_behind(error)
            if cause is not None and cause.errno in _FULL:  # of the copy, which is written
                cause.filename = str(path)
                raise cause from None
            raise CheckpointCorrupt(f"DCP cannot read it: {error!r:.300}", path) from error
        state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
    return state


def write_dcp(state: dict[str, Any], path: Path) -> None:
    """Write a nested state dict of tensors and plain values.

    Raises:
        OSError: the system cannot write it.
        CheckpointError: DCP cannot.
    """
    with warnings.catch_warnings():
        # It warns of what no_dist=True has asked for.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(state, checkpoint_id=path, no_dist=True)
        except CheckpointException as error:  # which derives from BaseException
            causes = [cause for cause, _ in error.failures.values()]
            system = next(filter(None, map(system_error_behind, causes)), None)
            if system is not None:
                system.filename = system.filename or str(path)
                raise system from None
            text = "; ".join(map(repr, causes))
            raise CheckpointError(f"DCP cannot write it: {text}", path) from error
