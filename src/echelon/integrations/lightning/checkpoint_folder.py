"""A checkpoint of Lightning as a folder of steps, which ``ec.save`` writes and ``ec.load`` reads.

Lightning replaces a checkpoint by saving to the same path, and looks for ``last.ckpt`` by its name.
So a path exists only once it has a complete step::

    .last.ckpt.echelon-1f3c…/step-000000010/  [1] the first save writes a draft beside the path
    last.ckpt/step-000000010/                 [2] one call of the system makes it visible
    last.ckpt/step-000000020/                 [3] later saves add a step; the older one goes after

A file of Lightning's own, or a link, is exchanged for the draft. What else is at the path was not
saved by this strategy, and is neither replaced nor removed.
"""

from __future__ import annotations

import errno
import os
import stat
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from inspect import signature
from pathlib import Path
from typing import Any, final

from echelon.checkpoint.api import load, save, save_as, steps
from echelon.checkpoint.coordinator import Coordinator
from echelon.checkpoint.files import make_folder, remove_run, writers
from echelon.checkpoint.items import RANDOM
from echelon.checkpoint.loading import Loaded
from echelon.comm.group import Group
from echelon.errors import ArgumentError, UnsupportedError
from echelon.process.atomic_files import (
    draft_folder,
    is_empty_folder,
    is_folder,
    remove_file,
    replace_folder,
    sweep_drafts,
)

_WRITER = "lightning"
_MORE = "more_values"  # holds values whose keys cannot be names of items
_TAKEN = {*signature(save).parameters, RANDOM, _MORE}


@final
class CheckpointFolder:
    """A path to which Lightning saves.

    Args:
        path: as the user gave it.
        group: all ranks, which share what is saved.
    """

    def __init__(self, path: str | os.PathLike[str], group: Group) -> None:
        if "://" in str(path):
            raise UnsupportedError(f"{path}: this strategy saves into folders that all ranks see")
        self.path = Path(os.path.abspath(path))
        self._group = group
        self._coordinator = Coordinator(group, self.path)

    def save(self, step: int, objects: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Save objects with a state and plain values as the only step. All ranks call it.

        Args:
            step: its number, unless the folder has a newer one.
        """
        if taken := sorted(name for name in objects if not _is_name(name, ("model", "optimizer"))):
            raise ArgumentError(f"{taken} cannot be names of modules or optimizers in a checkpoint")
        named = {key: value for key, value in values.items() if _is_name(key)}
        if more := {key: value for key, value in values.items() if key not in named}:
            named[_MORE] = more
        items = {**objects, **named}
        with ExitStack() as stack:  # holds the draft, on rank 0
            number, name = self._coordinator.run_on_first(
                f"a save to {self.path.name}", lambda: self._make_room(step, stack)
            )
            folder = self.path.with_name(name)
            save_as(_WRITER, folder, step=number, keep=1, group=self._group, items=items)
            if folder != self.path:
                self._coordinator.run_on_first(
                    f"the end of a save to {self.path.name}",
                    lambda: replace_folder(folder, self.path, is_ours=_may_be_replaced),
                )

    def load(self, objects: Mapping[str, Any], *, strict: bool, rng: bool) -> dict[str, Any]:
        """Load the objects in place; returns the values. All ranks call it."""
        loaded: Loaded = load(self.path, strict=strict, rng=rng, group=self._group, **objects)
        values = dict(loaded.values)
        return {**values.pop(_MORE, {}), **values}

    def remove(self) -> None:
        """Remove it, if it is there and was saved by Lightning. All ranks call it."""
        what = f"the removal of {self.path.name}"
        if not self._coordinator.run_on_first(what, lambda: _remove(self.path)):
            warnings.warn(
                f"{self.path} was not removed: it has files that neither this strategy nor "
                "Lightning has written into one file",
                stacklevel=3,
            )

    def _make_room(self, step: int, stack: ExitStack) -> tuple[int, str]:
        """The number of the new step, and the name of the folder that it is saved into."""
        make_folder(self.path.parent)
        sweep_drafts(self.path.parent, self.path.name)
        if _is_ours(self.path):
            return max([step - 1, *steps(self.path)]) + 1, self.path.name
        if (
            os.path.lexists(self.path)
            and not is_empty_folder(self.path)
            and not _may_be_replaced(self.path)
        ):
            raise FileExistsError(
                errno.EEXIST,
                "is there already, and is neither a checkpoint of this strategy nor a file of "
                "Lightning's, so it is not replaced: save to another path",
                str(self.path),
            )
        return step, stack.enter_context(draft_folder(self.path)).name


def _is_ours(path: Path) -> bool:
    """Whether a folder has steps that this strategy has saved."""
    return is_folder(path) and writers(path) == [_WRITER]


def _may_be_replaced(path: Path) -> bool:
    """Whether there is a link, or a checkpoint of Lightning's in one file."""
    mode = os.lstat(path).st_mode
    return stat.S_ISLNK(mode) or (stat.S_ISREG(mode) and zipfile.is_zipfile(path))


def _remove(path: Path) -> bool:
    """Remove a checkpoint; whether nothing is left of it."""
    if not os.path.lexists(path):
        return True
    if _is_ours(path):
        return remove_run(path, _WRITER)
    if is_folder(path) or not _may_be_replaced(path):
        return False
    remove_file(path)
    return True


def _is_name(key: str, also: Iterable[str] = ()) -> bool:
    """Whether an item of a checkpoint can have this name."""
    return key in also or (key not in _TAKEN and key != "" and "/" not in key)
