"""``EchelonAccelerator``: an ``Accelerator`` whose models ``DDP``, ``FSDP`` or a plan shares.

Accelerate has no plug-in for a wrapper. It leaves a model alone that is marked as prepared, and
asks a wrapper for ``no_sync``; what else it does to models of its own wrappers is overridden here.
Its other collectives, such as ``gather``, run on the default group of ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import (
    DistributedType,
    DynamoBackend,
    convert_outputs_to_fp32,
    recursively_apply,
)
from accelerate.utils.modeling import get_mixed_precision_context_manager
from torch import Tensor, nn
from torch.utils.data import DataLoader

from echelon.c10d.default_group import start_default_group
from echelon.checkpoint.api import load, save_as, steps
from echelon.checkpoint.place import Folder
from echelon.comm.streams import device_of
from echelon.ddp import DDP
from echelon.errors import ArgumentError, UnsupportedError
from echelon.fsdp import FSDP
from echelon.fsdp.units import Rule
from echelon.integrations.accelerate.process_group_options import (
    check_ddp_options,
    timeout_of,
)
from echelon.integrations.accelerate.state_items import state_items
from echelon.integrations.accelerate.uneven_batches import are_batches_uneven
from echelon.integrations.sharing import Sharing, Wrapper
from echelon.launch.run import init
from echelon.pipeline.api import Pipeline
from echelon.plans.plans import Plan


class EchelonAccelerator(Accelerator):
    """An ``Accelerator`` whose models this library shares among the ranks.

    Law: with the same global batches, weights are those of ``Accelerator`` in one process.

    ``backward``, ``accumulate``, ``no_sync``, ``clip_grad_norm_``, ``gather_for_metrics`` and the
    data loaders are Accelerate's. ``save_state`` and ``load_state`` are ``ec.save`` and
    ``ec.load``, so a state may be loaded on another number of ranks or with another plan.

    Args:
        args: of ``Accelerator``.
        plan: ``"ddp"``, ``"fsdp"``, or an ``ec.Plan`` without stages.
        units: what FSDP gathers at once; None: the blocks of a model of ``transformers``.
        options: more options of ``ec.DDP`` or ``ec.FSDP``, where ``plan`` is a name.
        kwargs: of ``Accelerator``; ``cpu`` is True where there is no accelerator.

    Raises:
        ArgumentError: the plan is for another number of ranks, or an option does not fit it.
        UnsupportedError: another wrapper, a compiler, or float16 is asked for, or options of
            PyTorch's DDP that change what is summed, or ranks are simulated.
    """

    def __init__(
        self,
        *args: Any,
        plan: str | Plan = "ddp",
        units: Rule | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.sharing = Sharing(plan=plan, units=units, options=options or {})
        self.loss_fn: Callable[[Any, Any], Tensor] | None = None  # of a pipeline
        self._num_joins = 0
        self.world = init(timeout=timeout_of(kwargs.get("kwargs_handlers")))
        if self.world.backend == "threads":
            raise UnsupportedError(
                "Accelerate keeps the rank of a process in its globals, so ranks must be "
                "processes: use `echelon run --world processes`"
            )
        if isinstance(plan, Plan):
            plan.check_world(self.world)
        if device_of(self.world.device).is_host:
            start_default_group(self.world.group.timeout)
            kwargs.setdefault("cpu", True)
        super().__init__(*args, **kwargs)
        self._check_options()

    def _check_options(self) -> None:
        if self.num_processes != self.world.size:
            raise ArgumentError(
                f"Accelerate sees {self.num_processes} processes and the job has "
                f"{self.world.size}: without an accelerator give cpu=True, and use_cpu=True to "
                "TrainingArguments"
            )
        kind = self.distributed_type
        if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise UnsupportedError(f"{kind.value} shares models itself: leave its plugin out")
        if self.parallelism_config is not None:
            raise UnsupportedError("parallelism_config is Accelerate's own: give plan=ec.Plan(...)")
        check_ddp_options(self.ddp_handler)
        if self.mixed_precision in ("fp16", "fp8"):
            raise UnsupportedError(
                f"mixed_precision={self.mixed_precision!r} needs a scaler or kernels of Accelerate "
                "that do not know shards: use 'bf16', or ec.MixedPrecision in options"
            )
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise UnsupportedError(
                "a compiled model cannot be wrapped: compile its blocks, as docs/fsdp.md shows"
            )

    # Preparing -------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As ``Accelerator``; an optimizer keeps the parameters of the stages of this rank."""
        prepared = super().prepare(*args, device_placement=device_placement)
        stages = nn.ModuleList(model for model in self._models if isinstance(model, Pipeline))
        kept = set(stages.parameters())
        for optimizer in self._optimizers if stages else ():
            for group in optimizer.param_groups:
                group["params"] = [param for param in group["params"] if param in kept]
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Share a model among the ranks; for evaluation only, leave it as it is on each rank."""
        if not evaluation_mode:
            _restore_forward(model)  # of a model that was evaluated before
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        if evaluation_mode or isinstance(prepared, Wrapper):
            return prepared
        return self._share(prepared)

    def _share(self, model: nn.Module) -> nn.Module:
        if self.sharing.num_stages > 1 and self.loss_fn is None:
            raise UnsupportedError(
                "forward and backward of a pipeline are one call, and an Accelerate loop has two: "
                "use EchelonTrainer, or ec.parallelize and pipe.step in a loop of your own"
            )
        if self.sharing.num_stages > 1:
            _restore_forward(model)  # which stages run on a part of the model
        shared = self.sharing.share(model, self.world, self.loss_fn)
        if isinstance(shared, Pipeline) and self.native_amp:
            self._autocast_stages(shared)
        shared._is_accelerate_prepared = True  # type: ignore[assignment]  # Accelerate's mark
        self._models[self._models.index(model)] = shared
        return shared

    def _autocast_stages(self, pipe: Pipeline) -> None:
        """Compute as Accelerate's ``forward`` of the whole model: the last output is float32."""
        plan = self.sharing.plan
        assert isinstance(plan, Plan), "only a plan has stages"
        for index, stage in pipe.stages.items():
            autocast = get_mixed_precision_context_manager(True, self.autocast_handler)
            forward = autocast(stage.forward)
            is_last = int(index) == plan.pp * plan.chunks - 1
            stage.forward = convert_outputs_to_fp32(forward) if is_last else forward

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """As ``Accelerator``; ranks of one pipeline read the same batches."""
        num_stages = self.sharing.num_stages
        if num_stages == 1 or getattr(data_loader, "_is_accelerate_prepared", False):
            prepared = super().prepare_data_loader(
                data_loader, device_placement, slice_fn_for_dispatch
            )
            self._check_even(prepared)
            return prepared
        if self.dispatch_batches:
            raise UnsupportedError(
                "dispatch_batches has rank 0 read for ranks with batches of their own, and the "
                "stages of a pipeline share a batch: leave it out"
            )
        data_size = self.num_processes // num_stages
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=data_size,
            process_index=self.process_index % data_size,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._check_even(prepared)
        self._dataloaders.append(prepared)
        return prepared

    def _check_even(self, loader: DataLoader[Any]) -> None:
        """Refuse, on all ranks, a loader whose last batches are not for all ranks of FSDP."""
        shares_steps = self.sharing.shards or self.sharing.num_stages > 1
        if shares_steps and are_batches_uneven(loader):
            raise UnsupportedError(
                "even_batches=False gives some ranks a batch more than others, and under this plan "
                "all ranks take part in each step: keep even_batches=True, use drop_last=True, or "
                "plan='ddp' with join_uneven_inputs"
            )

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The model that was prepared. Under FSDP its parameters are shards."""
        inner = model.module if isinstance(model, DDP | FSDP) else model
        plain: nn.Module = super().unwrap_model(inner, keep_fp32_wrapper, keep_torch_compile)
        return plain

    # Training --------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As ``Accelerator``; refused where ranks without a batch would be waited for."""
        loader = self.gradient_state.active_dataloader
        is_shared = self.world.size > 1 and any(isinstance(each, DDP) for each in self._models)
        if is_shared and not self._num_joins and are_batches_uneven(loader):
            raise UnsupportedError(
                "even_batches=False gives some ranks a batch more than others, which would wait "
                "for them in its backward: train inside of `with accelerator.join_uneven_inputs("
                "[model]):`, keep even_batches=True, or use drop_last=True"
            )
        super().backward(loss, **kwargs)

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Nothing: a backward outside of ``no_sync`` reduces what those inside have kept."""
        yield

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[nn.Module], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Let ranks with fewer batches than others wait for them, under ``DDP``."""
        for model in joinables:
            if self.world.size > 1 and not isinstance(model, DDP):
                raise UnsupportedError(
                    f"{type(model).__name__} needs the same number of batches on all ranks: keep "
                    "even_batches=True, or use plan='ddp'"
                )
        samplers: list[Any] = [
            getattr(loader, "batch_sampler", None) for loader in self._dataloaders
        ]
        kept = {sampler: getattr(sampler, "even_batches", None) for sampler in samplers}
        with ExitStack() as stack:
            for model in joinables:
                if isinstance(model, DDP):
                    stack.enter_context(model.join())
            self._num_joins += 1
            try:
                for sampler, value in kept.items():
                    if value is not None and even_batches is not None:
                        sampler.even_batches = even_batches
                yield
            finally:
                self._num_joins -= 1
                for sampler, value in kept.items():
                    if value is not None:
                        sampler.even_batches = value

    def gather(self, tensor: Any) -> Any:
        """The values of all ranks with batches of their own, one after the other."""
        gathered, num_stages = super().gather(tensor), self.sharing.num_stages
        if num_stages == 1:
            return gathered
        # Ranks of the first stage come first.
        return recursively_apply(lambda rows: rows[: len(rows) // num_stages], gathered)

    # States ----------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The state of the plain model; under FSDP and in stages on rank 0, and empty elsewhere.

        All ranks call it.
        """
        if isinstance(model, FSDP | Pipeline):
            return model.whole_state_dict(rank0_only=True)
        state: dict[str, Tensor] = super().get_state_dict(model, unwrap)
        return state

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Refused: such a hook changes a list of weights that no rank has."""
        raise UnsupportedError(
            "save_state writes shards, and a hook would get whole weights: save what it saves with "
            "register_for_checkpointing"
        )

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Refused, as ``register_save_state_pre_hook``."""
        raise UnsupportedError("load_state has no hooks: use register_for_checkpointing")

    def save_state(
        self, output_dir: Folder | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> str:
        """Save everything prepared and registered with ``ec.save``. All ranks call it.

        Law: after a crash at any instant the folder has this state or the one before.

        Returns:
            The folder of the step inside ``output_dir``, which replaces the one before. With
            ``automatic_checkpoint_naming`` these are steps of ``checkpoints`` in ``project_dir``,
            of which ``total_limit`` stay.

        Raises:
            CheckpointError: the folder has steps that ``ec.save`` has saved, which this would
                remove; or a rank could not write. On all ranks.
        """
        if kwargs or not safe_serialization:
            raise UnsupportedError(
                "ec.save writes safetensors and has no options of other writers: leave "
                f"safe_serialization and {sorted(kwargs)} out"
            )
        config = self.project_configuration
        folder, keep = self._state_folder(output_dir), 1
        if config.automatic_checkpoint_naming:
            keep = config.total_limit
        # The newest is the same on all ranks: no later step is committed before all are here.
        step = max(steps(folder), default=-1) + 1
        items = {**state_items(self), "accumulated": self.step}
        group = self.world.group
        path = save_as("accelerate", folder, step=step, keep=keep, group=group, items=items)
        config.iteration = step + 1
        return str(path)

    def load_state(
        self, input_dir: Folder | None = None, load_kwargs: Any = None, **kwargs: Any
    ) -> None:
        """Load what ``save_state`` saved, on any number of ranks. All ranks call it."""
        if kwargs or load_kwargs:
            raise UnsupportedError("ec.load has no options of other readers: leave them out")
        items = state_items(self)
        loaded = load(self._state_folder(input_dir), group=self.world.group, **items)
        self.step = loaded.values["accumulated"]
        self.project_configuration.iteration = loaded.step + 1

    def _state_folder(self, folder: Folder | None) -> Folder:
        if folder is not None and not self.project_configuration.automatic_checkpoint_naming:
            return folder
        if self.project_configuration.automatic_checkpoint_naming:
            return folder or f"{self.project_dir}/checkpoints"
        raise ArgumentError("give the folder of the state, or automatic_checkpoint_naming")


def _restore_forward(model: nn.Module) -> None:
    """Undo the autocast that Accelerate has put around the ``forward`` of a model."""
    forward = vars(model).pop("_original_forward", None)
    if forward is not None:
        del model.forward
        if getattr(forward, "__func__", None) is not type(model).forward:
            model.forward = forward
