"""How ranks save together; the numbers are those of docs/architecture.md.

::

    each     [1] lists the ranges and values that it holds
    all      [2] compare what they are asked to save; rank 0 makes a temporary folder
    each     [3] plans which ranges it writes
    each     [4] writes its file, syncs it to disk, and reports sizes and checksums to all
    rank 0   [5] writes the manifest
    rank 0   [6] renames the folder, which makes it a step; all hear of it

An error on one rank is raised on all of them, and nothing is committed. An error of [3] is reported
with [4]: raised at once, it would leave the other ranks waiting.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import final

import numpy as np
import torch

from echelon import events
from echelon.checkpoint.coordinator import Coordinator
from echelon.checkpoint.format import Manifest
from echelon.checkpoint.header import header
from echelon.checkpoint.items import CheckpointItems
from echelon.checkpoint.place import storage_of
from echelon.checkpoint.records import Replaced, SavedFile, step_name
from echelon.checkpoint.saved_step import is_whole
from echelon.checkpoint.sections import Json, Section, merge_sections
from echelon.checkpoint.step_storage import Place, names_text
from echelon.checkpoint.write_items import WriteItem, merge_reports, plan_writes, report_items
from echelon.comm.group import Group
from echelon.errors import CheckpointError
from echelon.version import __version__

UNDER_WAY = (
    "another save into this folder is under way: wait for it, or give each job a folder of its own"
)


@final
@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """What a save does with the steps that are there.

    Attributes:
        keep: how many steps are left afterwards; None: all.
        overwrite: whether a step of this number is replaced, and later ones are removed.
        writer: the integration whose steps they are; None: ``ec.save``.
    """

    keep: int | None = None
    overwrite: bool = False
    writer: str | None = None


@dataclass(slots=True)
class _Plan:
    """What a rank writes.

    Attributes:
        items: into its file.
        kinds: of all sections, by name.
        facts: of sections, by name; only those that differ from rank 0's, which has all of its own.
    """

    items: list[WriteItem] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Json] = field(default_factory=dict)


@final
class Saving:
    """One save of the ranks of ``coordinator``, all of which call its methods in their order.

    Args:
        root: the folder of the run.
    """

    def __init__(
        self, coordinator: Coordinator, root: Place, step: int, options: SaveOptions
    ) -> None:
        self._coordinator, self._root, self._step = coordinator, root, step
        self._options = options
        self._storage = storage_of(root)
        self._lock = ExitStack()  # holds the lock of the folder, on rank 0
        self._temporary: Place | None = None
        self._replaced = Replaced.NOTHING
        self._plan = _Plan()
        self._error: Exception | None = None  # of this rank, which is reported with [4]

    def begin(self, call: str, items: CheckpointItems, *, rng: bool) -> None:
        """[1] to [3]: agree on what is saved, and make the folder.

        Args:
            call: the name of the function that the user called.

        Raises:
            ArgumentError: the ranks are asked for different saves.
            CheckpointTooNew: a newer version has saved this step.
            CheckpointError: there is such a step, another save is under way, or the folder cannot
                be made.
        """
        request: dict[str, Json] = {
            "call": call,
            "directory": str(self._root),
            "step": self._step,
            "keep": self._options.keep,
            "overwrite": self._options.overwrite,
            "rng": rng,
            "names": items.names,
            "kinds": items.kinds,
        }
        sections: dict[str, Section] = {}

        def describe() -> Json:
            sections.update(items.sections(rng=rng))
            return self._describe(sections)

        try:
            reports = self._coordinator.run_on_all("a request to save", describe, request)
            self._temporary = self._root / reports[0]["temporary"]
            self.prepare(partial(self._make_plan, sections, reports))
        except BaseException:
            self.abandon()
            raise

    def _describe(self, sections: Mapping[str, Section]) -> Json:
        """The digests of what this rank saves, by which ranks see what they hold in common."""
        per_rank: dict[str, str] = {}
        for section in sections.values():
            per_rank |= section.per_rank_digests(self._coordinator.rank)
        return {
            "facts": {name: section.digest() for name, section in sections.items()},
            "per_rank": per_rank,
            "temporary": self._make_folder() if self._coordinator.rank == 0 else None,
        }

    def prepare(self, step: Callable[[], None]) -> None:
        """Run ``step`` before [4]; if it raises, all ranks raise in ``finish``."""
        try:
            step()
        except Exception as error:
            self._error = self._error or error

    def _make_plan(self, sections: Mapping[str, Section], reports: Sequence[Json]) -> None:
        rank = self._coordinator.rank
        self._plan = _Plan(
            plan_writes(sections, [report["per_rank"] for report in reports], rank),
            {name: section.kind for name, section in sections.items()},
            {
                name: section.facts
                for name, section in sections.items()
                if rank == 0 or reports[rank]["facts"][name] != reports[0]["facts"][name]
            },
        )

    def _make_folder(self) -> str:
        try:
            self._storage.prepare(self._root, self._lock)
        except BlockingIOError as error:
            raise self._refusal(UNDER_WAY, self._root) from error
        self._storage.check_writer(self._root, self._options.writer)
        if self._options.overwrite:
            self._storage.check_later(self._root, self._step)
        if self._storage.holds(self.target):
            self._replaced = self._what_is_there()
        self._temporary = self._storage.make_temporary(self._root, self._step, self._replaced)
        return self._temporary.name

    def _what_is_there(self) -> Replaced:
        """What has the name of the step already, if it may be replaced."""
        target = self.target
        if not self._storage.is_step(target):
            raise CheckpointError(
                "is no folder, so no save has written it, and it is not replaced: move it away, or "
                "save under another step",
                target,
            )
        if others := self._storage.others(target):
            raise CheckpointError(
                "has files that no save has written, so it is not replaced: move away "
                f"{names_text(others)}, or save under another step",
                target,
            )
        if not is_whole(target):
            return Replaced.DAMAGED
        if not self._options.overwrite:
            raise self._refusal(
                "this step was saved already, and what is committed is never replaced: go on from "
                "it by ec.load, or save under another step or into another folder, or with "
                "overwrite=True. ec.prepare_run finds it before the first step",
                target,
            )
        return Replaced.WHOLE

    def _refusal(self, what: str, path: Place) -> CheckpointError:
        """The error for a folder that is in use, perhaps by another rank of the same script."""
        if self._coordinator.group is None:
            what += ". Ranks that share a plain model save it together: give group= on all of them"
        return CheckpointError(what, path)

    def hand_over(self, group: Group | None) -> None:
        """Have the ranks communicate over ``group``, which has the same ranks, from now on."""
        self._coordinator = Coordinator(group, self._root)

    @property
    def target(self) -> Place:
        """The folder of the step."""
        return self._root / step_name(self._step)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank writes, without the header."""
        return sum(item.nbytes for item in self._plan.items)

    def replace_values(self, copies: Sequence[torch.Tensor]) -> None:
        """Write ``copies`` of ``values`` instead, in the same order."""
        for item, copy in zip(self._plan.items, copies, strict=True):
            item.values = copy

    def values(self) -> list[torch.Tensor]:
        """What this rank writes. Each tensor is 1D, or a full one."""
        return [item.values for item in self._plan.items]

    def finish(self) -> Place:
        """[4] to [6]: write and commit, and return the folder of the step.

        Raises:
            CheckpointError: a rank could not write, or rank 0 could not commit; nothing was
                committed unless the message says so.
            CommError: another rank failed meanwhile; ``ec.steps`` tells what was committed.
        """
        coordinator = self._coordinator
        with events.span(
            "checkpoint.save", rank=coordinator.world_rank, step=self._step, nbytes=self.nbytes
        ):
            try:
                reports = coordinator.collect_on_first("files of a save", self._write)
                coordinator.run_on_first("commit of a save", partial(self._commit, reports))
            except BaseException:
                self.abandon()
                raise
        self._lock.close()
        return self.target

    def abandon(self) -> None:
        """Remove what was written, and release the lock."""
        if self._coordinator.rank == 0 and self._temporary is not None:
            self._storage.discard(self._temporary)
        self._lock.close()

    def _write(self) -> Json:
        """Write the file of this rank; what the manifest says of it."""
        if self._error is not None:
            raise self._error
        assert self._temporary is not None
        path = self._temporary / self._storage.file_name(self._coordinator.rank)
        head = header([item.entry for item in self._plan.items])
        with self._storage.create(path) as file:
            head_checksum = file.write(memoryview(head))
            for item in self._plan.items:
                item.offset = file.nbytes
                item.checksum = file.write(item.bytes())
        saved = SavedFile(
            name=path.name,
            nbytes=file.nbytes,
            header_nbytes=len(head),
            header_checksum=head_checksum,
        )
        return {
            "file": asdict(saved),
            "tensors": report_items(self._plan.items),
            "facts": self._plan.facts,
            "threads": torch.get_num_threads(),
        }

    def _commit(self, reports: Sequence[Json] | None) -> None:
        assert self._temporary is not None
        assert reports is not None
        sections = {}
        for name, kind in self._plan.kinds.items():
            facts = [report["facts"].get(name, self._plan.facts[name]) for report in reports]
            sections[name] = merge_sections(name, kind, dict(enumerate(facts)))
        manifest = Manifest(
            step=self._step,
            world={"size": self._coordinator.size},
            versions=_versions(),
            threads=tuple(report["threads"] for report in reports),
            files=tuple(SavedFile(**report["file"]) for report in reports),
            tensors=merge_reports([report["tensors"] for report in reports], self._root),
            sections=sections,
        )
        target, sizes = self.target, {file.name: file.nbytes for file in manifest.files}
        self._storage.commit(self._temporary, target, manifest.dump(), sizes, self._replaced)
        self._temporary = None
        if self._options.overwrite:
            with self._naming("a later"):
                self._storage.remove_later(self._root, self._step)
        if self._options.keep is not None:
            with self._naming("an older"):
                self._storage.prune(self._root, self._step, self._options.keep)

    @contextmanager
    def _naming(self, which: str) -> Iterator[None]:
        """Have an error of the body, which removes steps, say that this one is saved."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"is saved; but {which} step could not be removed: {error}",
                self.target,
                errno=error.errno,
            ) from error


@final
class SkippedSave:
    """A save that writes nothing, because a step of another run is computed again.

    Args:
        target: the folder of the step, if it were saved.
    """

    def __init__(self, target: Place) -> None:
        self.target = target

    def finish(self) -> Place:
        """The folder of the step."""
        return self.target


def _versions() -> dict[str, str]:
    return {
        "echelon": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
