"""What saving and loading ask of the place that the steps of a run lie in.

On a disk, a folder becomes a step by a rename (``place``). A store renames nothing, but shows an
object only when all of it is there; so a step exists there when its manifest does, which is written
last (``object_store``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar, final

from echelon.checkpoint.format import PREFIX_NBYTES, SCHEMA, newer_schema
from echelon.checkpoint.records import MANIFEST, MAX_MANIFEST_NBYTES, Replaced, step_name
from echelon.checkpoint.store_path import StorePath
from echelon.errors import CheckpointCorrupt, CheckpointError, CheckpointTooNew
from echelon.errors.message_text import MAX_ROWS, fair_rows

Place = Path | StorePath
# What the writers of steps are called in sentences.
_OWNERS = {
    None: "ec.save",
    "accelerate": "save_state of Accelerate",
    "lightning": "a strategy for Lightning",
}
PlaceType = TypeVar("PlaceType", Path, StorePath)


class OpenFile(Protocol):
    """A file of a checkpoint, open for reading."""

    nbytes: int

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill ``target`` with the bytes from ``offset`` on."""

    def close(self) -> None:
        """Close the file."""


class FileInProgress(Protocol):
    """A file of a checkpoint that is written; a context manager."""

    nbytes: int

    def write(self, data: memoryview) -> str:
        """Append ``data`` and return its checksum."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class StepStorage(ABC, Generic[PlaceType]):
    """A kind of place for checkpoints.

    Attributes:
        max_open_files: how many files a step that is read may hold open.
    """

    max_open_files: int

    @abstractmethod
    def steps(self, root: PlaceType) -> list[int]:
        """The committed steps of a run, oldest first; none where there is no folder."""

    @abstractmethod
    def is_step(self, folder: PlaceType) -> bool:
        """Whether a folder that has the name of a step may be one."""

    @abstractmethod
    def open(self, path: PlaceType, nbytes: int | None = None) -> OpenFile:
        """Open a file, which has ``nbytes`` unless None.

        Raises:
            CheckpointCorrupt: it is not there, or has another size.
        """

    @abstractmethod
    def check_entries(self, folder: PlaceType, sizes: Mapping[str, int]) -> None:
        """Refuse a step that does not have exactly its manifest and files of these sizes."""

    # A save, in this order, on the first rank; only ``create`` is called on all.

    @abstractmethod
    def prepare(self, root: PlaceType, lock: ExitStack) -> None:
        """Make the folder of a run ready for a save, and remove what killed saves have left.

        Raises:
            BlockingIOError: another save is under way.
            CheckpointError: the folder is that of a step.
        """

    @abstractmethod
    def writers(self, root: PlaceType) -> list[str]:
        """The integrations whose steps a run has; none if they are those of ``ec.save``."""

    @abstractmethod
    def claim(self, root: PlaceType, writer: str) -> None:
        """Note that the steps of a run are those of an integration."""

    @final
    def check_writer(self, root: PlaceType, writer: str | None) -> None:
        """Refuse to save among the steps of another writer, which retention would remove.

        Args:
            writer: the integration that saves; None: ``ec.save``.

        Raises:
            CheckpointError: the steps there are those of another one.
        """
        known = self.writers(root)
        if known in ([], [writer]) and (writer is None or known or not self.steps(root)):
            if writer is not None and not known:
                self.claim(root, writer)
            return
        owner = _OWNERS.get(known[0], known[0]) if known else "ec.save"
        raise CheckpointError(
            f"holds steps that {owner} has saved, which {_OWNERS.get(writer, writer)} would remove "
            "or hide: save into another folder",
            root,
        )

    @abstractmethod
    def holds(self, target: PlaceType) -> bool:
        """Whether something is where the folder of a step would be."""

    @abstractmethod
    def make_temporary(self, root: PlaceType, step: int, replaced: Replaced) -> PlaceType:
        """The folder that the files of a step are written into."""

    @abstractmethod
    def others(self, folder: PlaceType) -> list[str]:
        """The names of what no save has written, and removing the folder of a step would remove."""

    @abstractmethod
    def file_name(self, rank: int) -> str:
        """The name of the file that a rank writes."""

    @abstractmethod
    def create(self, path: PlaceType) -> FileInProgress:
        """Begin to write a file."""

    @abstractmethod
    def commit(
        self, temporary: PlaceType, target: PlaceType, manifest: bytes, sizes: Mapping[str, int],
        replaced: Replaced
    ) -> None:  # fmt: skip
        """Make what was written the step ``target``, by one operation.

        Args:
            sizes: of the files that were written.
            replaced: what is there, and goes.
        """

    @abstractmethod
    def discard(self, temporary: PlaceType) -> None:
        """Remove what a save that failed has written."""

    @abstractmethod
    def remove_steps(self, folders: Sequence[PlaceType]) -> None:
        """Remove committed steps of one run."""

    @final
    def prune(self, root: PlaceType, step: int, keep: int) -> None:
        """Remove all but the newest ``keep`` steps up to ``step``, which was just committed.

        Folders that this version cannot read are neither removed nor counted: those without a
        manifest, and steps that a newer version wrote. Neither are those with a file that no save
        has written.
        """
        folders: list[PlaceType] = [root / step_name(n) for n in self.steps(root) if n < step]
        folders = [folder for folder in folders if self._may_go(folder)]
        folders.append(root / step_name(step))
        self.remove_steps(folders[:-keep])

    @final
    def remove_later(self, root: PlaceType, step: int) -> None:
        """Remove the steps after ``step``, which has begun the training anew from there."""
        for folder in reversed(self._later(root, step)):  # so that a kill leaves no gap
            self.remove_steps([folder])

    @final
    def check_later(self, root: PlaceType, step: int) -> None:
        """Refuse to overwrite a training of which not all can be removed.

        Raises:
            CheckpointError: a later step has files that no save has written.
            CheckpointTooNew: a newer version of echelon has saved one.
        """
        for folder in self._later(root, step):
            schema = None
            if others := self.others(folder):
                raise CheckpointError(
                    f"comes after step {step}, which is to be overwritten, and has files that no "
                    f"save has written: move away {names_text(others)}",
                    folder,
                )
            with suppress(CheckpointCorrupt):  # it is removed
                schema = self._newer_schema(folder)
            if schema is not None:
                raise CheckpointTooNew(schema, SCHEMA, folder)

    def _later(self, root: PlaceType, step: int) -> list[PlaceType]:
        return [root / step_name(n) for n in self.steps(root) if n > step]

    def _may_go(self, folder: PlaceType) -> bool:
        """Whether a folder is a step of a schema that this version knows, and nothing else."""
        if self.others(folder):
            return False
        try:
            return self._newer_schema(folder) is None
        except CheckpointCorrupt:
            return False

    def _newer_schema(self, folder: PlaceType) -> int | None:
        """The schema of a step that a newer version has saved."""
        return newer_schema(self._read_beginning(folder))

    @final
    def beginning(self, folder: PlaceType) -> bytes | None:
        """What a manifest begins with, its checksum among it; None where it cannot be read."""
        try:
            return self._read_beginning(folder)
        except (CheckpointError, OSError):  # which a load of this step raises
            return None

    def _read_beginning(self, folder: PlaceType) -> bytes:
        with closing(self.open(folder / MANIFEST)) as file:
            prefix = bytearray(min(file.nbytes, PREFIX_NBYTES))
            file.read_into(memoryview(prefix), 0)
        return bytes(prefix)

    @final
    def read_manifest(self, folder: PlaceType) -> bytes:
        """The bytes of the manifest of a step.

        Raises:
            CheckpointCorrupt: the step has none, or it is larger than any manifest.
        """
        path = folder / MANIFEST
        with closing(self.open(path)) as file:
            if file.nbytes > MAX_MANIFEST_NBYTES:
                raise CheckpointCorrupt(f"has {file.nbytes} bytes, too many for a manifest", path)
            data = bytearray(file.nbytes)
            file.read_into(memoryview(data), 0)
        return bytes(data)


def names_text(names: Sequence[str]) -> str:
    """Names of files for a sentence, of many the first ones.

    Example:
        >>> names_text(["a.txt", "b.txt"])
        'a.txt, b.txt'
    """
    return ", ".join(fair_rows([names], MAX_ROWS))


def refuse_steps(folders: Iterable[Place]) -> None:
    """Refuse to save into a step."""
    for folder in folders:
        raise CheckpointError(
            "this is a step that was saved, and a file more in it would make it a damaged "
            f"one: save into the folder of the run, {folder.parent}, or into another",
            folder,
        )
