"""Ray Train: groups of this library in its workers, and checkpoints that it knows.

Ray starts the workers, tells each its rank, and restarts them after a failure. ``ec.init()`` in the
training function of a ``TorchTrainer`` is then the world of these workers.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import ray.train
from ray.train.torch import TorchConfig

from echelon.checkpoint.api import load, save, steps
from echelon.checkpoint.loading import Loaded
from echelon.errors import UnsupportedError
from echelon.launch.run import init

_PREFIX = "checkpoint_step-"
_TorchBackend: Any = TorchConfig().backend_cls  # it has no public name


def register_backend() -> None:
    """Make ``"echelon"`` a backend of ``torch.distributed`` in this process."""
    import echelon.c10d  # noqa: F401


@final
class EchelonBackend(_TorchBackend):
    """Starts the default process group of the workers, as Ray's own does."""

    def on_start(self, worker_group: Any, backend_config: EchelonConfig) -> None:
        """Register the backend in each worker, then start the group."""
        worker_group.execute(register_backend)
        super().on_start(worker_group, backend_config)


@final
@dataclass
class EchelonConfig(TorchConfig):
    """A ``TorchConfig`` whose default process group is of the backend ``"echelon"``.

    PyTorch's own DDP and FSDP in the training function, also by ``ray.train.torch.prepare_model``,
    then communicate through shared memory. All workers are on one host.

    Example:
        >>> # TorchTrainer(train, torch_config=EchelonConfig(), scaling_config=...).fit()
    """

    backend: str = "echelon"

    @property
    def backend_cls(self) -> type[EchelonBackend]:
        """The class that starts it."""
        return EchelonBackend


def report(metrics: Mapping[str, Any], *, step: int, **items: Any) -> None:
    """Save a step with ``ec.save`` and report it to Ray with the metrics. All workers call it.

    The step is saved where Ray keeps the checkpoints of the run, so nothing is copied. Ray removes
    old ones as its ``CheckpointConfig`` says.

    Args:
        metrics: plain values, of which Ray keeps those of rank 0.
        step: number of the step.
        items: what is saved, as for ``ec.save``: ``model``, ``optimizer`` and others by name.

    Raises:
        UnsupportedError: the storage of the run is no folder.
        Exception: as ``ec.save``.

    Example:
        >>> # report({"loss": loss.item()}, step=step, model=model, optimizer=optimizer)
    """
    world = init()
    # An attempt that ended between its save and its report may have left a folder of this step.
    name = f"{_PREFIX}{step:09d}_{uuid.uuid4().hex[:8]}"
    name = world.group.broadcast_object(name, src=0)
    folder = _storage() / name
    save(folder, step=step, **items)
    checkpoint = ray.train.Checkpoint.from_directory(folder) if world.rank == 0 else None
    mode = ray.train.CheckpointUploadMode.NO_UPLOAD
    ray.train.report(dict(metrics), checkpoint=checkpoint, checkpoint_upload_mode=mode)


def resume(**items: Any) -> Loaded | None:
    """Load the newest step that ``report`` has saved, on any number of workers. All call it.

    Ray asks its workers for their reports about once a second. A checkpoint that it has not heard
    of when a worker dies is whole all the same, and is taken.

    Args:
        items: what is loaded, as for ``ec.load``.

    Returns:
        What ``ec.load`` returns; None if nothing was saved yet.

    Example:
        >>> # loaded = resume(model=model, optimizer=optimizer)
        >>> # first = loaded.step + 1 if loaded else 1
    """
    world = init()
    folder = _newest() if world.rank == 0 else None
    folder = world.group.broadcast_object(folder, src=0)
    return None if folder is None else load(folder, **items)


def _newest() -> str | None:
    """The folder of the newest step in the storage of this run."""
    saved = [
        (step, folder.stat().st_mtime, str(folder))
        for folder in _storage().glob(f"{_PREFIX}*")
        for step in steps(folder)
    ]
    return max(saved)[-1] if saved else None


def _storage() -> Path:
    """The folder of this run, which all workers see."""
    storage = ray.train.get_context().get_storage()
    kind = storage.storage_filesystem.type_name
    if kind != "local":
        raise UnsupportedError(
            f"the storage of this run is {kind!r}, and a step is saved in a folder: give "
            "RunConfig a storage_path that all workers see as a folder"
        )
    return Path(storage.experiment_fs_path)
