"""A checkpoint of Lightning as a folder of steps, which ``ec.save`` writes and ``ec.load`` reads.

Lightning replaces a checkpoint by saving to the same path, and looks for ``last.ckpt`` by its name.
So a path exists only once it has a complete step::

    last.ckpt.saving/step-000000010/   [1] the first save writes beside the path
    last.ckpt/step-000000010/          [2] one rename makes it visible
    last.ckpt/step-000000020/          [3] later saves add a step; the older one goes afterwards
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, final

from echelon.checkpoint.api import load, save, steps
from echelon.checkpoint.coordinator import Coordinator
from echelon.checkpoint.files import make_folder, remove, sync_folder
from echelon.checkpoint.items import RANDOM
from echelon.checkpoint.loading import Loaded
from echelon.comm.group import Group
from echelon.errors import ArgumentError, UnsupportedError

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
        number, is_first = self._coordinator.run_on_first(
            f"a save to {self.path.name}", lambda: self._make_room(step)
        )
        folder = self._beside if is_first else self.path
        named = {key: value for key, value in values.items() if _is_name(key)}
        if more := {key: value for key, value in values.items() if key not in named}:
            named[_MORE] = more
        save(folder, step=number, keep=1, group=self._group, **objects, **named)
        show = self._show if is_first else lambda: None
        self._coordinator.run_on_first(f"the end of a save to {self.path.name}", show)

    def load(self, objects: Mapping[str, Any], *, strict: bool, rng: bool) -> dict[str, Any]:
        """Load the objects in place; returns the values. All ranks call it."""
        loaded: Loaded = load(self.path, strict=strict, rng=rng, group=self._group, **objects)
        values = dict(loaded.values)
        return {**values.pop(_MORE, {}), **values}

    @property
    def _beside(self) -> Path:
        return self.path.with_name(self.path.name + ".saving")

    def _make_room(self, step: int) -> tuple[int, bool]:
        """The number of the new step, and whether it is the first at this path."""
        _remove(self._beside)  # of a save that was killed
        make_folder(self.path.parent)
        known = steps(self.path) if self.path.is_dir() else []
        return max([step - 1, *known]) + 1, not known

    def _show(self) -> None:
        _remove(self.path)  # a file, or a folder without a step
        os.rename(self._beside, self.path)
        sync_folder(self.path.parent)


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, if it is there."""
    _remove(Path(path))


def _remove(path: Path) -> None:
    if os.path.lexists(path):
        remove(path)


def _is_name(key: str, also: Iterable[str] = ()) -> bool:
    """Whether an item of a checkpoint can have this name."""
    return key in also or (key not in _TAKEN and key != "" and "/" not in key)
