"""A folder ``checkpoint-N`` of ``Trainer`` that exists completely or not at all.

It is written as a draft beside it, whose name begins with a dot, where ``Trainer`` does not look,
and becomes the checkpoint by one call of the operating system.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from echelon.checkpoint.coordinator import Coordinator
from echelon.checkpoint.files import make_folder, steps
from echelon.comm.group import Group
from echelon.errors import CheckpointError, CheckpointNotFound, EchelonError
from echelon.process.atomic_files import (
    draft_folder,
    is_empty_folder,
    is_folder,
    remove_folder,
    replace_folder,
    sweep_drafts,
    sync_tree,
)

PREFIX = "checkpoint"
_NAME = re.compile(rf"{PREFIX}-(0|[1-9][0-9]{{0,17}})")
_STATE = "trainer_state.json"


@contextmanager
def new_folder(run: Path, step: int, group: Group) -> Iterator[Path]:
    """The folder in which ``checkpoint-{step}`` is written, visible after the block.

    All ranks enter it. What interrupted saves have left is removed. A checkpoint of this step is
    exchanged for the new one.

    Args:
        run: the folder of the run.
        step: the number in the name.
        group: all ranks of the job.

    Raises:
        CheckpointError: on all ranks. A rank could not write; or there is something else of this
            name, which is not replaced.
    """
    folder = run / _name(step)
    coordinator = Coordinator(group, folder)
    error: Exception | None = None

    def check() -> None:
        if error is not None:
            raise error

    def show() -> None:
        sync_tree(draft)
        replace_folder(draft, folder, is_ours=_is_checkpoint)

    with ExitStack() as stack:  # holds the draft, on rank 0
        draft = run / coordinator.run_on_first("a checkpoint", lambda: _make_draft(folder, stack))
        try:
            yield draft
        except (EchelonError, OSError) as raised:
            error = raised
        except Exception as raised:  # safetensors has a class of its own for a full disk
            error = CheckpointError(
                f"could not be written: {type(raised).__name__}: {raised}", folder
            )
            error.__cause__ = raised
        coordinator.run_on_all("the files of a checkpoint", check)
        coordinator.run_on_first("the end of a checkpoint", show)


def _make_draft(folder: Path, stack: ExitStack) -> str:
    make_folder(folder.parent)
    sweep_drafts(folder.parent, f"{PREFIX}-")
    if os.path.lexists(folder) and not is_empty_folder(folder) and not _is_checkpoint(folder):
        raise FileExistsError(
            errno.EEXIST,
            "is there already, and no trainer has saved it, so it is not replaced: move it away, "
            "or take another output_dir",
            str(folder),
        )
    return stack.enter_context(draft_folder(folder)).name


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder, of whatever name, is a checkpoint that a trainer has saved."""
    return is_folder(folder) and (is_folder(state_in(folder)) or (folder / _STATE).is_file())


def rotate(run: Path, step: int, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints up to ``step``, by the numbers of their steps.

    Times do not count: a clock may have been set back, and a folder may have been copied. Later
    checkpoints, and folders that no trainer has saved, neither count nor go.

    Args:
        run: the folder of the run.
        step: of the checkpoint that was just saved, which stays.
        limit: how many stay; None: all.
        best: the checkpoint that stays in any case; None: no other.

    Raises:
        OSError: one cannot be removed.
    """
    if limit is None or limit <= 0:
        return
    known = [number for number in _saved_steps(run) if number <= step]
    kept = {step} | {n for n in known if best is not None and run / _name(n) == Path(best)}
    for number in known[:]:
        if len(known) > max(limit, len(kept)) and number not in kept:
            remove_folder(run / _name(number))
            known.remove(number)


def _saved_steps(run: Path) -> list[int]:
    """The steps of the checkpoints in a run, oldest first."""
    saved = []
    for name in os.listdir(run):
        match, folder = _NAME.fullmatch(name), run / name
        if match is not None and _is_checkpoint(folder):
            state = state_in(folder)
            if not is_folder(state) or steps(state) == [int(match[1])]:
                saved.append(int(match[1]))
    return sorted(saved)


def _name(step: int) -> str:
    return f"{PREFIX}-{step}"


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
