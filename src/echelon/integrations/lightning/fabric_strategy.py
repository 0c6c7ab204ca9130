"""``EchelonFabricStrategy``: Lightning Fabric over ``DDP``, ``FSDP`` or a ``Plan``."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, final

import torch
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.optim import Optimizer

from echelon.ddp import DDP
from echelon.errors import ArgumentError, UnsupportedError
from echelon.fsdp import FSDP
from echelon.fsdp.units import Rule
from echelon.integrations.lightning.checkpoint_folder import CheckpointFolder
from echelon.integrations.lightning.launched_ranks import LaunchedRanks
from echelon.integrations.sharing import Sharing
from echelon.plans.plans import Plan


@final
class _NoSync(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Keep gradients local in a backward inside of the block."""
        if not enabled:
            return nullcontext()
        if not isinstance(module, DDP | FSDP):
            raise ArgumentError(
                f"no_backward_sync got a {type(module).__name__}: give what fabric.setup returned"
            )
        return module.no_sync()


@final
class EchelonFabricStrategy(LaunchedRanks, ParallelStrategy):
    """``Fabric(strategy=...)`` over ranks that ``echelon run``, torchrun or srun have started.

    Law: after k steps the weights are those of one process on all batches together.

    ``fabric.save`` writes a folder through ``ec.save``; it can be loaded on another number of ranks
    and with another plan.

    Args:
        plan: ``"ddp"``, ``"fsdp"``, or an ``ec.Plan`` without stages.
        units: what FSDP gathers at once.
        timeout: how long a rank waits for others in one call; None: as for ``ec.init``.
        options: more options of ``ec.DDP`` or ``ec.FSDP``, where ``plan`` is a name.

    Raises:
        ArgumentError: there is no option of that name or with that value.
        UnsupportedError: the plan has a pipeline.

    Example:
        >>> EchelonFabricStrategy("ddp", bucket_bytes=2**20).sharing.plan
        'ddp'
    """

    def __init__(
        self,
        plan: str | Plan = "ddp",
        *,
        units: Rule | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        self._prepare(Sharing(plan=plan, units=units, options=options), timeout)
        super().__init__()
        self._backward_sync_control = _NoSync()

    def setup_environment(self) -> None:
        """Meet the other ranks."""
        super().setup_environment()
        self._meet()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap a model."""
        wrapper = self.sharing.share(module, self._meet())
        if self.sharing.shards:
            self._share_scaler(self.precision)
        return wrapper

    def module_to_device(self, module: nn.Module) -> None:
        """Move a model to the device of this rank, except for what is on meta."""
        if not any(tensor.is_meta for tensor in module.parameters()):
            module.to(self.root_device)

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """With ``empty_init`` and FSDP, make modules on meta; FSDP gives them values."""
        if empty_init and self.sharing.shards:
            return torch.device("meta")
        return super().module_init_context(empty_init)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor reduced in place over all ranks, or those of a process group of torch."""
        return self._reduce(tensor, group, reduce_op)

    # Checkpoints -----------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save through ``ec.save``. All ranks call it."""
        for name, value in {"storage_options": storage_options, "filter": filter}.items():
            if value:
                raise UnsupportedError(f"{name} of fabric.save: ec.save saves all of a model")
        folder = CheckpointFolder(self.broadcast(str(path)), self._meet().group)
        objects = {name: item for name, item in state.items() if _is_object(item)}
        values = {name: item for name, item in state.items() if name not in objects}
        folder.save(0, objects, values)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load through ``ec.load``, or from a file of Lightning's. All ranks call it."""
        path = self.broadcast(str(path))
        if os.path.isfile(path):
            self._check_file(state)
            return super().load_checkpoint(path, state, strict, weights_only)
        if not isinstance(state, dict):
            raise UnsupportedError(
                "a folder of ec.save is loaded into objects: call fabric.load(path, "
                "{'model': model, ...}) with the names of the save"
            )
        objects = {name: item for name, item in state.items() if _is_object(item)}
        folder = CheckpointFolder(path, self._meet().group)
        values = folder.load(objects, strict=strict, rng=True)
        asked = [name for name in state if name not in objects]
        if strict and (missing := [name for name in asked if name not in values]):
            raise KeyError(f"{path} has no value {missing[0]!r}; it has {sorted(values)}")
        state.update({name: values.pop(name) for name in asked if name in values})
        return values

    def _check_file(self, state: object) -> None:
        items = state.values() if isinstance(state, dict) else [state]
        if self.sharing.shards and any(isinstance(item, Optimizer) for item in items):
            raise UnsupportedError(
                "an optimizer over shards cannot take its state from a file: leave it out of "
                "state, or load the file with 'echelon_ddp' and save it again"
            )

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The full state of a model. All ranks call it."""
        return module.state_dict()


def _is_object(item: object) -> bool:
    return hasattr(item, "state_dict") and hasattr(item, "load_state_dict")
