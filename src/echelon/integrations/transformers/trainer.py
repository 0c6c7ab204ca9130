"""``EchelonTrainer``: the ``Trainer`` of transformers on ``DDP``, ``FSDP`` or a plan.

``Trainer`` has no plug-in either. To it, every plan is what it calls distributed training:
``model`` stays the plain model, and ``model_wrapped`` is what trains and evaluates. Its checkpoints
get the state of the training by ``ec.save``, beside the weights that ``from_pretrained`` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Trainer
from transformers.trainer_callback import ExportableState

from echelon.checkpoint.api import load, save
from echelon.checkpoint.coordinator import Coordinator
from echelon.errors import UnsupportedError
from echelon.fsdp import FSDP
from echelon.fsdp.units import Rule
from echelon.integrations.accelerate import EchelonAccelerator
from echelon.integrations.accelerate.state_items import plain_optimizer
from echelon.integrations.sharing import Sharing, Wrapper
from echelon.integrations.transformers.stage_training import StageTraining, causal_loss, of_tokens
from echelon.integrations.transformers.trainer_checkpoint import (
    PREFIX,
    new_folder,
    rotate,
    state_folder,
    state_in,
)
from echelon.integrations.transformers.unsupported_arguments import (
    refuse_arguments,
    refuse_short_batch,
)
from echelon.pipeline.api import Pipeline
from echelon.plans.plans import Plan
from echelon.train.gradient_norm import clip_grad_norm_

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object
_NO_LOGITS = (
    "compute_metrics needs logits, which are on the last rank of a pipeline only: leave it out; "
    "the evaluation gives the loss"
)
# What a callback may ask for; the ranks do it together if one of them asks.
_REQUESTS = (
    "should_training_stop",
    "should_epoch_stop",
    "should_save",
    "should_evaluate",
    "should_log",
)


class EchelonTraining(_Base):
    """What ``EchelonTrainer`` adds to a ``Trainer``, for a trainer of one's own.

    Args:
        args: of the trainer.
        plan: ``"ddp"``, ``"fsdp"``, or an ``ec.Plan``, also with stages.
        units: what FSDP gathers at once; None: the blocks of the model.
        options: more options of ``ec.DDP`` or ``ec.FSDP``, where ``plan`` is a name.
        kwargs: of the trainer.

    Raises:
        ArgumentError: the plan is for another number of ranks, or an option does not fit it.
        UnsupportedError: an option of ``TrainingArguments`` that does not work; says what does.
    """

    accelerator: EchelonAccelerator

    def __init__(
        self,
        *args: Any,
        plan: str | Plan = "ddp",
        units: Rule | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(plan, Plan) and plan.pp > 1:
            plan = of_tokens(plan)
        self._sharing = Sharing(plan=plan, units=units, options=options or {})
        self._stages: StageTraining | None = None
        self._num_parameters: int | None = None
        super().__init__(*args, **kwargs)
        if self._sharing.num_stages > 1 and self.compute_metrics is not None:
            raise UnsupportedError(_NO_LOGITS)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_args: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return self._accelerator_args

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, as this class does."""
        refuse_arguments(self.args, self._sharing)
        super().create_accelerator_and_postprocess()
        sharing = self._sharing
        self.accelerator = EchelonAccelerator(
            plan=sharing.plan,
            units=sharing.units,
            options=sharing.options,
            cpu=self.args.use_cpu,
            **self._accelerator_args,
        )
        gather, by_pickle = self.accelerator.gather_for_metrics, self.args.eval_use_gather_object
        self.gather_function = partial(gather, use_gather_object=by_pickle)

    # Training --------------------------------------------------------------------------------

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        if self._num_parameters is None and hasattr(self.model, "num_parameters"):
            self._num_parameters = self.model.num_parameters(exclude_embeddings=True)
        if self._sharing.num_stages > 1 and self._stages is None:
            self._stages = self._make_stages()
            self.accelerator.loss_fn = self._stages.loss_fn
        plan = self._sharing.plan
        if isinstance(plan, Plan) and plan.microbatches is not None:
            num_batches = max_steps * self.args.gradient_accumulation_steps
            refuse_short_batch(train_dataloader, plan.microbatches, num_batches)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _make_stages(self) -> StageTraining:
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func
        elif self.label_smoother is not None:
            loss = partial(_smoothed, self.label_smoother)
        else:
            loss = causal_loss(self.accelerator.unwrap_model(self.model))
        num_replicas = self.accelerator.num_processes // self._sharing.num_stages
        return StageTraining(
            loss, num_replicas, getattr(self.model, "main_input_name", "input_ids")
        )

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        """The shared model, if there is one already."""
        return self.model_wrapped if isinstance(self.model_wrapped, Wrapper) else model

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """As ``Trainer``; a pipeline runs forward and backward of its microbatches."""
        if self._stages is None:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        assert isinstance(model, Pipeline)
        model.train()
        return self._stages.step(
            model,
            self._prepare_inputs(inputs),
            num_items_in_batch,
            finalize=self.accelerator.sync_gradients,
        ).detach()

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return clip_grad_norm_(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return clip_grad_norm_(model, float("inf")) if grad_norm is None else grad_norm

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As ``Trainer``, by the parameters of the plain model."""
        if self._num_parameters is None:
            return int(super().floating_point_ops(inputs))
        main_input = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        tokens = 0 if main_input is None else main_input.numel()
        return 6 * tokens * self._num_parameters // self._sharing.num_stages

    def get_total_train_batch_size(self, args: Any) -> int:
        """As ``Trainer``; the stages of a pipeline share a batch."""
        return int(super().get_total_train_batch_size(args)) // self._sharing.num_stages

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        asked = torch.tensor(
            [bool(getattr(self.control, name)) for name in _REQUESTS], device="cpu"
        )
        asked = asked.to(torch.uint8)
        self.accelerator.world.group.all_reduce(asked, "max", label="requests of callbacks")
        for name, is_asked in zip(_REQUESTS, asked.tolist(), strict=True):
            setattr(self.control, name, bool(is_asked))
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: each trial is a job."""
        raise UnsupportedError("hyperparameter_search: start a job for each trial")

    # Evaluation ------------------------------------------------------------------------------

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As ``Trainer``; a pipeline gives a loss only, FSDP is unsharded for ``generate``."""
        if isinstance(model, Pipeline):
            if not prediction_loss_only:
                raise UnsupportedError(_NO_LOGITS)
            assert self._stages is not None
            inputs = self._prepare_inputs(inputs)
            num_items = self._get_num_items_in_batch([inputs], self.args.device)
            return self._stages.evaluate(model, inputs, num_items), None, None
        generates = getattr(self.args, "predict_with_generate", False) and not prediction_loss_only
        whole: AbstractContextManager[object] = nullcontext()
        if generates and isinstance(model, FSDP):
            whole = model.full_parameters()
            model = model.module
        with whole:
            loss, logits, labels = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **kwargs
            )
        if loss is not None and (self.model_accepts_loss_kwargs or self.compute_loss_func):
            # Trainer multiplies by all ranks, also where a plan has stages and is not trained yet.
            loss = loss / self._sharing.num_stages
        return loss, logits, labels

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer``; refused on a pipeline, whose logits are on one rank only."""
        if self._sharing.num_stages > 1:
            raise UnsupportedError(
                "predict() of a pipeline: save_model(), and predict with the plain model"
            )
        return super().predict(*args, **kwargs)

    # Checkpoints -----------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the weights of the plain model for ``from_pretrained``. All ranks call it."""
        if not isinstance(self.model_wrapped, Wrapper):
            super().save_model(output_dir, _internal_call)
            return
        state = self.accelerator.get_state_dict(self.model_wrapped)
        if isinstance(self.model_wrapped, Pipeline):
            once = {name for name, _ in self.model.named_parameters()}
            each = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
            # Names of one parameter, which from_pretrained ties again.
            state = {name: value for name, value in state.items() if name not in each - once}
        self._save(output_dir, state_dict=state)
        self.accelerator.world.group.barrier()

    def _training_state(self) -> dict[str, Any]:
        return {
            "model": self.model_wrapped,
            "optimizer": plain_optimizer(self.optimizer),
            "scheduler": self.lr_scheduler,
        }

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save ``checkpoint-N``, which exists completely or not at all. All ranks call it."""
        self.store_flos()
        run, step = Path(self._get_output_dir(trial)), self.state.global_step
        group = self.accelerator.world.group
        with new_folder(run, step, group) as folder:
            self.save_model(str(folder), _internal_call=True)
            if not self.args.save_only_model:
                save(state_in(folder), step=step, group=group, **self._training_state())
            self._note_best(run)
            if self.args.should_save:
                self._write_trainer_state(folder)
        best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
        Coordinator(group, run).run_on_first(
            "the rotation of checkpoints", lambda: rotate(run, step, limit, best)
        )

    def _note_best(self, run: Path) -> None:
        best = self.state.best_global_step
        if best and (best == self.state.global_step or (run / f"{PREFIX}-{best}").exists()):
            self.state.best_model_checkpoint = str(run / f"{PREFIX}-{best}")

    def _write_trainer_state(self, folder: Path) -> None:
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, callbacks = type(callback).__name__, self.state.stateful_callbacks
                if isinstance(callbacks[name], list):
                    callbacks[name].append(callback.state())
                else:
                    callbacks[name] = callback.state()
        self.state.save_to_json(str(folder / "trainer_state.json"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        state_folder(resume_from_checkpoint)  # which is loaded when the model is shared

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load model, optimizer and schedule."""
        if checkpoint is not None:
            group = self.accelerator.world.group
            load(state_folder(checkpoint), group=group, rng=False, **self._training_state())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load(state_folder(checkpoint), group=self.accelerator.world.group)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        folder, group = state_folder(self.state.best_model_checkpoint), self.accelerator.world.group
        load(folder, group=group, rng=False, model=self.model_wrapped)


def _smoothed(smoother: Any, output: Any, labels: Tensor, num_items: Any) -> Tensor:
    value: Tensor = smoother(output, labels, shift_labels=True, num_items_in_batch=num_items)
    return value


class EchelonTrainer(EchelonTraining, Trainer):
    """The ``Trainer`` of transformers, whose model this library shares among the ranks.

    Law: with the same global batches, weights are those of ``Trainer`` in one process.

    It takes what ``Trainer`` takes, and ``plan``, ``units`` and ``options`` of ``EchelonTraining``.
    """


class EchelonSeq2SeqTrainer(EchelonTraining, Seq2SeqTrainer):
    """``Seq2SeqTrainer``, as ``EchelonTrainer`` is to ``Trainer``: it can predict by generating."""
