"""A folder ``checkpoint-N`` of ``Trainer`` that exists completely or not at all.

It is written under a name that begins with a dot, where ``Trainer`` does not look, and renamed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echelon.comm.group import Group
from echelon.errors import CheckpointNotFound

PREFIX = "checkpoint"


@contextmanager
def new_folder(run: Path, step: int, group: Group) -> Iterator[Path]:
    """The folder in which ``checkpoint-{step}`` is written, visible after the block.

    All ranks enter it. What an interrupted save has left is removed.

    Args:
        run: the folder of the run.
        step: the number in the name.
        group: all ranks of the job.
    """
    folder = run / f"{PREFIX}-{step}"
    draft = run / f".{folder.name}"
    if group.rank == 0:
        run.mkdir(parents=True, exist_ok=True)
        for left in run.glob(f".{PREFIX}-*"):
            shutil.rmtree(left)
        draft.mkdir()
    group.barrier()
    yield draft
    group.barrier()
    if group.rank == 0:
        replaced = run / f".{folder.name}-replaced"
        if folder.exists():
            folder.rename(replaced)
        draft.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    group.barrier()


def state_folder(checkpoint: str | Path) -> Path:
    """The folder of ``ec.save`` in a checkpoint.

    Raises:
        CheckpointNotFound: it has none.
    """
    folder = state_in(Path(checkpoint))
    if not folder.is_dir():
        raise CheckpointNotFound(
            f"{checkpoint} has no folder {folder.name!r}: it was saved with save_only_model=True, "
            "or not by EchelonTrainer; load its weights with from_pretrained",
            Path(checkpoint),
        )
    return folder


def state_in(checkpoint: Path) -> Path:
    """Where a checkpoint has the state of the training."""
    return checkpoint / "echelon"
