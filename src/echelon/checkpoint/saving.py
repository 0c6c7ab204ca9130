"""How ranks save together.

::

    all      [1] tell what they are asked to save; rank 0 makes a folder that is no step yet
    each     [2] writes its file and sees it onto the disk
    all      [3] tell sizes and checksums, or what went wrong
    rank 0   [4] writes the manifest, and renames the folder: now it is a step
    all      [5] hear that it is

What one rank cannot do, all of them raise, and nothing is committed. What goes wrong on one rank
between [1] and [2] is told in [3]: it must not leave the others waiting.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import final

import numpy as np
import torch

from echelon import events
from echelon.checkpoint import files
from echelon.checkpoint.coordinator import Coordinator
from echelon.checkpoint.files import NewFile
from echelon.checkpoint.format import Manifest
from echelon.checkpoint.header import header
from echelon.checkpoint.items import CheckpointItems
from echelon.checkpoint.records import MANIFEST, SavedFile, file_name, step_name
from echelon.checkpoint.saved_step import is_whole
from echelon.checkpoint.sections import Json, Section, merge_sections
from echelon.checkpoint.write_items import WriteItem, merge_reports, plan_writes, report_items
from echelon.comm.group import Group
from echelon.errors import CheckpointError


@final
class Saving:
    """One save of the ranks of ``coordinator``; the methods are called in their order, by all.

    Args:
        root: the folder of the run.
        keep: how many steps are left afterwards; None: all.
    """

    def __init__(self, coordinator: Coordinator, root: Path, step: int, keep: int | None) -> None:
        self._coordinator, self._root, self._step, self._keep = coordinator, root, step, keep
        self._stack = ExitStack()  # holds the lock, on rank 0
        self._made: Path | None = None
        self._replaces = False
        self._items: list[WriteItem] = []
        self._facts: dict[str, Json] = {}
        self._kinds: dict[str, str] = {}
        self._problem: Exception | None = None  # of this rank, of which the others must hear

    def begin(self, call: str, given: CheckpointItems, *, rng: bool) -> None:
        """[1] Agree on what is saved, and make the folder.

        Args:
            call: what the user called.

        Raises:
            ArgumentError: the ranks are asked for different saves.
            CheckpointTooNew: a newer version has saved this step.
            CheckpointError: there is such a step, another save is under way, or the folder cannot
                be made.
        """
        sections: dict[str, Section] = {}

        def request() -> Json:
            sections.update(given.sections(rng=rng))
            digests = {name: part.digest() for name, part in sections.items()}
            own: dict[str, str] = {}
            for part in sections.values():
                own |= part.per_rank_digests(self._coordinator.rank)
            made = self._make_folder() if self._coordinator.rank == 0 else None
            return {"digests": digests, "own": own, "made": made}

        asked: dict[str, Json] = {"call": call, "directory": str(self._root), "step": self._step}
        asked |= {"keep": self._keep, "rng": rng, "names": given.names}
        asked["kinds"] = given.kinds
        try:
            told = self._coordinator.run_on_all("a request to save", request, asked)
            self._made = self._root / told[0]["made"]
            self.prepare(partial(self._plan, sections, told))
        except BaseException:
            self.abandon()
            raise

    def prepare(self, step: Callable[[], None]) -> None:
        """Run ``step`` between [1] and [2]; if it raises, all ranks do when they write."""
        try:
            step()
        except Exception as error:
            self._problem = self._problem or error

    def _plan(self, sections: Mapping[str, Section], told: Sequence[Json]) -> None:
        rank = self._coordinator.rank
        self._items = plan_writes(sections, [one["own"] for one in told], rank)
        self._kinds = {name: part.kind for name, part in sections.items()}
        for name, part in sections.items():
            if rank == 0 or told[rank]["digests"][name] != told[0]["digests"][name]:
                self._facts[name] = part.facts

    def _make_folder(self) -> str:
        files.make_folder(self._root)
        try:
            self._stack.enter_context(files.lock(self._root))
        except BlockingIOError as error:
            raise self._refusal(
                "another save into this folder is under way: wait for it, or give each job a "
                "folder of its own",
                self._root,
            ) from error
        files.sweep(self._root)
        target = self.target
        if target.is_symlink() or target.exists():
            if is_whole(target):
                raise self._refusal(
                    "this step was saved already, and what is committed is never replaced: save "
                    "under another step or into another folder",
                    target,
                )
            self._replaces = True
        self._made = files.temporary(self._root, self._step)
        return self._made.name

    def _refusal(self, what: str, path: Path) -> CheckpointError:
        """Of a folder that is not for us; it may be that another rank has it."""
        if self._coordinator.group is None:
            what += ". Ranks that share a plain model save it together: give group= on all of them"
        return CheckpointError(what, path)

    def hand_over(self, group: Group | None) -> None:
        """Have the ranks talk over ``group`` from now on, which has the same ranks."""
        self._coordinator = Coordinator(group, self._root)

    @property
    def target(self) -> Path:
        """The folder of the step."""
        return self._root / step_name(self._step)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank writes, without the header."""
        return sum(item.nbytes for item in self._items)

    def replace_values(self, copies: Sequence[torch.Tensor]) -> None:
        """WriteItem ``copies`` of ``values`` instead, in the same order."""
        for item, copy in zip(self._items, copies, strict=True):
            item.values = copy

    def values(self) -> list[torch.Tensor]:
        """What this rank writes. Each 1D, or a whole tensor."""
        return [item.values for item in self._items]

    def finish(self) -> Path:
        """[2] to [5]: write, and commit.

        Returns:
            the folder of the step.

        Raises:
            CheckpointError: a rank could not write, or rank 0 could not commit; nothing was
                committed unless the message says so.
        """
        coordinator = self._coordinator
        with events.span(
            "checkpoint.save", rank=coordinator.world_rank, step=self._step, nbytes=self.nbytes
        ):
            try:
                told = coordinator.run_on_all("files of a save", self._write)
                first = partial(self._commit, told) if coordinator.rank == 0 else lambda: None
                coordinator.run_on_all("commit of a save", first)
            except BaseException:
                self.abandon()
                raise
        self._stack.close()
        return self.target

    def abandon(self) -> None:
        """Leave nothing behind."""
        if self._coordinator.rank == 0 and self._made is not None:
            files.discard(self._made)
        self._stack.close()

    def _write(self) -> Json:
        """The file of this rank; what the manifest needs to know of it."""
        if self._problem is not None:
            raise self._problem
        assert self._made is not None
        path = self._made / file_name(self._coordinator.rank)
        head = header([item.entry for item in self._items])
        with NewFile(path) as file:
            head_checksum = file.write(memoryview(head))
            for item in self._items:
                item.offset = file.nbytes
                item.checksum = file.write(item.bytes())
        return {
            "file": [path.name, file.nbytes, len(head), head_checksum],
            "tensors": report_items(self._items),
            "facts": self._facts,
            "threads": torch.get_num_threads(),
        }

    def _commit(self, told: Sequence[Json]) -> None:
        assert self._made is not None
        sections = {
            name: merge_sections(
                name,
                kind,
                {rank: one["facts"].get(name, self._facts[name]) for rank, one in enumerate(told)},
            )
            for name, kind in self._kinds.items()
        }
        manifest = Manifest(
            step=self._step,
            world={"size": self._coordinator.size},
            versions=_versions(),
            threads=tuple(one["threads"] for one in told),
            files=tuple(
                SavedFile(name=name, nbytes=nbytes, header_nbytes=length, header_checksum=found)
                for name, nbytes, length, found in (one["file"] for one in told)
            ),
            tensors=merge_reports([one["tensors"] for one in told], self._root),
            sections=sections,
        )
        files.write_file(self._made / MANIFEST, manifest.dump())
        target = files.commit(self._made, self._root, self._step, replaces=self._replaces)
        self._made = None
        if self._keep is not None:
            try:
                files.prune(self._root, self._step, self._keep)
            except OSError as error:
                raise CheckpointError(
                    f"is saved; but an older step could not be removed: {error}",
                    target,
                    errno=error.errno,
                ) from error


def _versions() -> dict[str, str]:
    return {
        "echelon": version("echelon"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
