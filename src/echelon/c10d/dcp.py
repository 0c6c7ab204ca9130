"""Checkpoints of ``torch.distributed.checkpoint`` (DCP), read and written by one process."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save

from echelon.errors import CheckpointCorrupt, CheckpointError
from echelon.process.atomic_files import draft_folder

_METADATA = ".metadata"


def is_dcp(path: Path) -> bool:
    """Whether a folder holds such a checkpoint."""
    return (path / _METADATA).is_file()


def read_dcp(path: Path) -> dict[str, Any]:
    """The nested state dict of a checkpoint, in memory.

    Its metadata are a pickle, which runs whatever code its author put there: read only what you
    have written.

    Raises:
        CheckpointCorrupt: it cannot be read.
    """
    for entry in path.iterdir():
        if not (entry.is_file() or entry.is_dir()):  # a read of a pipe would wait for a writer
            raise CheckpointCorrupt("is no ordinary file", entry)
    with draft_folder(path) as folder:
        file = os.path.join(folder, "state.pt")
        try:
            dcp_to_torch_save(path, file)
        # Its own exceptions derive from BaseException; end with those of the interpreter.
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise CheckpointCorrupt(f"DCP cannot read it: {error!r:.300}", path) from error
        state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
    return state


def write_dcp(state: dict[str, Any], path: Path) -> None:
    """Write a nested state dict of tensors and plain values.

    Raises:
        CheckpointError: it cannot be written.
    """
    with warnings.catch_warnings():
        # It warns of what no_dist=True has asked for.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(state, checkpoint_id=path, no_dist=True)
        except CheckpointException as error:  # which derives from BaseException
            causes = [repr(cause) for cause, _ in error.failures.values()]
            raise CheckpointError(f"DCP cannot write it: {'; '.join(causes)}", path) from error
