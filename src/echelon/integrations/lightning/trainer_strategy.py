"""``EchelonStrategy``: the Trainer of Lightning over ``DDP``, ``FSDP`` or a ``Plan``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast, final
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn

from echelon.ddp import DDP
from echelon.errors import ArgumentError, UnsupportedError
from echelon.fsdp import FSDP
from echelon.fsdp.units import Rule
from echelon.integrations.lightning.checkpoint_folder import CheckpointFolder
from echelon.integrations.lightning.launched_ranks import LaunchedRanks
from echelon.integrations.lightning.lightning_file import load_states
from echelon.integrations.sharing import Sharing
from echelon.plans.plans import Plan
from echelon.values.encoding import encode

_WEIGHTS, _OPTIMIZERS = "state_dict", "optimizer_states"  # keys of Lightning's checkpoints

_wrappers: WeakKeyDictionary[nn.Module, tuple[Sharing, nn.Module]] = WeakKeyDictionary()


class ShardsOnRanks(dict[str, Any]):
    """Stands for a state that ``ec.save`` writes from the ranks themselves; it stays empty."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(
            f"{key}: the checkpoint of this strategy is written from the shards of the ranks, and "
            "hooks see no weights in it; trainer.strategy.model.state_dict() gathers them"
        )


@final
class EchelonStrategy(LaunchedRanks, ParallelStrategy):
    """``Trainer(strategy=...)`` over ranks that ``echelon run``, torchrun or srun have started.

    Law: after k steps the weights are those of one process on all batches together.

    Checkpoints are folders that ``ec.save`` writes; they can be loaded on another number of ranks
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
        >>> from echelon import Strategy
        >>> EchelonStrategy("fsdp", strategy=Strategy.SHARD_GRAD_OP).sharing.plan
        'fsdp'
    """

    model: nn.Module | None  # the base class has it, whose types are not read

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

    # Setting up ------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._layer_sync is not None:
            raise UnsupportedError(
                "sync_batchnorm=True: torch's SyncBatchNorm sums its statistics outside of this "
                "library's groups; leave it out, or use layers without statistics of a batch"
            )

    def setup_environment(self) -> None:
        """Meet the other ranks."""
        super().setup_environment()
        reset_seed()
        self._meet()

    def setup(self, trainer: pl.Trainer) -> None:
        """Wrap the model, and make the optimizers."""
        assert self.accelerator is not None
        assert self.model is not None
        self._check(trainer)
        self.accelerator.setup(trainer)
        self.model = self._wrapped(self.model)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self._reset_optimizers_and_schedulers()
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if self.sharing.shards:
            self._share_scaler(self.precision_plugin)
        if is_fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _check(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        if trainer.checkpoint_callbacks:
            owners = (self.lightning_module, cast(Any, trainer).datamodule)
            _check_hyperparameters(owner.hparams for owner in owners if owner is not None)
        if not self.sharing.shards:
            return
        if not self.lightning_module.automatic_optimization:
            raise UnsupportedError(
                "automatic_optimization=False runs backwards and steps of optimizers inside of "
                "the model's forward, where parameters of FSDP are unsharded: use 'echelon_ddp', "
                "or Fabric with a model for each optimizer"
            )
        averages = (StochasticWeightAveraging, WeightAveraging)
        for callback in cast(Any, trainer).callbacks:
            if isinstance(callback, averages):
                raise UnsupportedError(
                    f"{type(callback).__name__} copies the model before it is sharded: use "
                    "'echelon_ddp', or average shards with AveragedModel(trainer.strategy.model)"
                )
            if isinstance(callback, ModelPruning):
                raise UnsupportedError(
                    "ModelPruning ranks the elements of whole parameters, of which each rank has a "
                    "part between steps: use 'echelon_ddp'"
                )
        if self._is_finetuned:
            raise UnsupportedError(
                "BaseFinetuning compares parameters by their values, and shards without an element "
                "are all equal: use 'echelon_ddp', or give the optimizer a group for each layer "
                "and freeze layers in on_train_epoch_start"
            )

    def _wrapped(self, model: nn.Module) -> nn.Module:
        """The wrapper of ``model``; one that an earlier fit has left is taken again."""
        sharing, wrapper = _wrappers.pop(model, (None, None))
        if wrapper is not None and sharing != self.sharing:
            cast(FSDP, wrapper).unwrap()
            wrapper = None
        if wrapper is None:
            model = self.precision_plugin.convert_module(model)
            self.model_to_device()
            with _thawed(model) if self._is_finetuned else nullcontext():
                wrapper = self.sharing.share(model, self._meet())
        return wrapper

    @property
    def _is_finetuned(self) -> bool:
        assert self.lightning_module is not None
        callbacks = cast(Any, self.lightning_module.trainer).callbacks
        return any(isinstance(callback, BaseFinetuning) for callback in callbacks)

    def model_to_device(self) -> None:
        """Move the model to the device of this rank, except for what is on meta."""
        assert self.model is not None
        if not any(tensor.is_meta for tensor in self.model.parameters()):
            self.model.to(self.root_device)

    # Training --------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients local, for accumulation."""
        if isinstance(self.model, DDP | FSDP):
            with self.model.no_sync():
                yield
        else:
            yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Tell DDP of a backward that begins inside of its forward."""
        assert self.lightning_module is not None
        if isinstance(self.model, DDP) and not self.lightning_module.automatic_optimization:
            self.model.reduce_in_backward_of(closure_loss)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor reduced in place over all ranks, or those of a process group of torch."""
        return self._reduce(tensor, group, reduce_op)

    # Checkpoints -----------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Ranks load into what is sharded."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Optimizers are loaded with the model."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Stands for the weights in a checkpoint that Lightning assembles."""
        return ShardsOnRanks()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Stands for the state of an optimizer."""
        return ShardsOnRanks()

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Save through ``ec.save``. All ranks call it."""
        if self._is_interrupted:
            warnings.warn(
                f"{filepath} was not saved: this rank ends by an error, and others may be anywhere",
                stacklevel=2,
            )
            return
        if storage_options is not None:
            raise UnsupportedError("storage_options are for a CheckpointIO, and ec.save uses none")
        values = dict(checkpoint)
        weights = values.pop(_WEIGHTS)
        states = values.pop(_OPTIMIZERS, [])
        for state in (weights, *states):
            if not isinstance(state, ShardsOnRanks) or state:
                raise UnsupportedError(
                    "a hook has changed state_dict or optimizer_states of a checkpoint, which "
                    "this strategy writes from the ranks: save what the hook adds under other keys"
                )
        objects = {"model": self.model, **(self._named_optimizers if states else {})}
        folder = CheckpointFolder(self.broadcast(str(filepath)), self._meet().group)
        folder.save(checkpoint["global_step"], objects, values)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load through ``ec.load``, or from a file of Lightning's. All ranks call it."""
        path = self.broadcast(str(checkpoint_path))
        assert self.lightning_module is not None
        assert self.model is not None
        is_fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self._named_optimizers if is_fitting else {}
        strict = self.lightning_module.strict_loading
        if os.path.isfile(path):
            file = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
            load_states(self.model, [*optimizers.values()], file, strict=strict)
            return file
        folder = CheckpointFolder(path, self._meet().group)
        values = folder.load({"model": self.model, **optimizers}, strict=strict, rng=is_fitting)
        if is_fitting:
            self._meet().step = values["global_step"]
        return {**values, _WEIGHTS: ShardsOnRanks(), _OPTIMIZERS: []}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing is left to load."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing is left to load."""

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint of this strategy or a file of Lightning's. All ranks call it."""
        if not self._is_interrupted:
            CheckpointFolder(self.broadcast(str(filepath)), self._meet().group).remove()

    @property
    def _named_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        optimizers = enumerate(self.optimizers)
        return {f"optimizer_{i}" if i else "optimizer": each for i, each in optimizers}

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes files; not used for checkpoints."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise UnsupportedError(
            f"{type(io).__name__}: this strategy saves through ec.save, not through a CheckpointIO"
        )

    # The end ---------------------------------------------------------------------------------

    @property
    def _is_interrupted(self) -> bool:
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is None or self.world_size == 1:
            return False
        return trainer.state.status == TrainerStatus.INTERRUPTED

    def teardown(self) -> None:
        """Take DDP off the model. FSDP stays, so that its shards can be saved and tested."""
        module = self.lightning_module
        if isinstance(self.model, DDP):
            self.model.unwrap()
            self.model = module
        elif module is not None and isinstance(self.model, FSDP) and not self._is_interrupted:
            _wrappers[module] = (self.sharing, self.model)
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


@contextmanager
def _thawed(model: nn.Module) -> Iterator[None]:
    """Wrap what a callback has frozen until a later epoch as what is trained."""
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    for name, param in model.named_parameters():
        if name in frozen:
            param.requires_grad_(param.is_floating_point() or param.is_complex())
    try:
        yield
    finally:
        for name, param in model.named_parameters():
            if name in frozen:
                param.requires_grad = False


def _check_hyperparameters(owners: Iterable[Mapping[str, Any]]) -> None:
    """Refuse, before the first step, what the first save could not write."""
    for hyperparameters in owners:
        for name, value in hyperparameters.items():
            try:
                encode(value, f"hyper_parameters.{name}")
            except ArgumentError as error:
                raise ArgumentError(
                    f"{error}; or leave it out: save_hyperparameters(ignore=[{name!r}])"
                ) from None
