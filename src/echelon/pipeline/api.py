"""``Pipeline``: a model in stages, through which a schedule moves microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, final

from torch import Tensor, nn

from echelon.checks import flag
from echelon.comm.group import Group
from echelon.errors import ArgumentError, CommError, EchelonError, StateError
from echelon.launch.run import entered
from echelon.modules.deferred_hooks import StepHooks
from echelon.modules.sharded_norms import mark_stage_gradients
from echelon.page import View, html_of, view_of
from echelon.pipeline.arguments import (
    PipelineOptions,
    check_agreement,
    check_arguments,
    check_choices,
    check_devices,
    local_stages,
)
from echelon.pipeline.chunk_spec import ChunkSpecs
from echelon.pipeline.data_parallel import ReduceEvery, StageCollectives
from echelon.pipeline.execute import Executor
from echelon.pipeline.measure import Measurement
from echelon.pipeline.microbatch import Batch, BatchSplitter, Loss
from echelon.pipeline.pipeline_view import pipeline_view
from echelon.pipeline.returned_values import (
    LastStage,
    explain_no_parameters,
    loss_of,
    output_of,
)
from echelon.pipeline.schedules.families import schedule as make_schedule
from echelon.pipeline.schedules.ir import WEIGHT, Schedule
from echelon.pipeline.schedules.passes import forwards_only, lower_once
from echelon.pipeline.shared_parameters import check_memory_of_stages, find_shared_parameters
from echelon.pipeline.stage import Stage
from echelon.pipeline.stage_initialization import initialize
from echelon.pipeline.stage_links import links_of
from echelon.pipeline.staged_module import StagedModule
from echelon.pipeline.step_specs import StepKinds
from echelon.train.gradient_norm import norm_over_stages


@final
class Pipeline(StagedModule):
    """Trains a model whose stages are on the ranks of ``group``.

    Law: losses and gradients are those of the whole model on the whole batch.

    A stage takes the output of the previous one: a tuple has its positional arguments, any other
    value is the only one. An output may be any nesting of tensors and plain values. The gradients
    of a parameter that stages on several ranks share are summed.

    Args:
        stages: the parts of the model, in order, on every rank. Those of other ranks are dropped,
            and may be None if no parameter is shared.
        group: the ranks that share the stages.
        microbatches: into how many parts ``step`` splits a batch.
        schedule: a name for ``ec.pipeline.schedule``, or a schedule.
        loss_fn: called with the output of the last stage and the target of a microbatch. A module
            is no part of the model: its buffers are neither moved nor saved.
        loss_reduction: ``"mean"`` if ``loss_fn`` returns a mean over rows, so that each microbatch
            counts by its share of them, or ``"sum"``.
        recompute: whether stages keep their inputs only, and run again in backward.
        args_chunk_spec: for each positional argument ``ec.pipeline.Replicate()``, of which every
            microbatch gets the whole, ``ec.pipeline.TensorChunkSpec(0)``, which has rows, or None:
            a tensor whose dim 0 is as long as the batch has rows. What is unclear is refused.
        kwargs_chunk_spec: the same for keyword arguments, by name.
        target_chunk_spec: the same for the target.
        materialize: gives values to a module whose parameters are on the meta device; its
            ``reset_parameters()`` if None. Only the stages of this rank get memory.
        reduce_every: for stages in ``DDP`` or ``FSDP``: ``"step"`` reduces gradients once, by the
            REDUCE of the schedule; ``"microbatch"`` in each backward, which takes more traffic and,
            with ``FSDP``, less memory, because only shards of gradients are kept.
        window_nbytes: for stages in ``FSDP``: how many bytes of unsharded parameters a rank may
            hold at once, besides those of the stage that computes; all of its stages if None.
        replicate: the ranks that have the same stages and different batches, in one group for each
            rank of the pipeline. Gradients of shared parameters that ``DDP`` or ``FSDP`` ignore
            are averaged over them.
        results_everywhere: whether ``step``, ``eval_step`` and ``pipe(x)`` give what they return to
            every rank, so that code that reads losses and outputs of a plain model runs as it is.
            Each call may say otherwise.
        schedule_options: options for ``ec.pipeline.schedule``.

    Raises:
        ArgumentError: the stages do not fit the group or the schedule.
        ScheduleError: the schedule cannot run.
        ModelMismatch: the ranks have different schedules or options, or modules for one stage whose
            parameters have different shapes.

    Example:
        >>> import torch
        >>> def main(world):
        ...     torch.manual_seed(0)
        ...     stages = [nn.Linear(4, 4), nn.Linear(4, 1)]
        ...     pipe = Pipeline(stages, world.group, microbatches=2, loss_fn=nn.MSELoss())
        ...     loss = pipe.step(torch.ones(8, 4), target=torch.zeros(8, 1), loss_everywhere=True)
        ...     return round(loss.item(), 4)
        >>> from echelon.launch.run import run
        >>> run(main, ranks=2)
        [0.0785, 0.0785]
    """

    _repr_html_ = html_of
    _failure: BaseException | None = None  # of the first step that failed

    def __init__(
        self,
        stages: Sequence[nn.Module | None],
        group: Group,
        *,
        microbatches: int,
        schedule: str | Schedule = "1f1b",
        loss_fn: Loss | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        recompute: bool = False,
        args_chunk_spec: Sequence[Any] | None = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        target_chunk_spec: Any = None,
        materialize: Callable[[nn.Module], None] | None = None,
        reduce_every: ReduceEvery = "step",
        window_nbytes: int | None = None,
        replicate: Group | None = None,
        results_everywhere: bool = False,
        **schedule_options: Any,
    ) -> None:
        super().__init__()
        check_arguments(stages, group, microbatches, schedule, loss_fn, replicate, schedule_options)
        specs = ChunkSpecs(args=args_chunk_spec, kwargs=kwargs_chunk_spec, target=target_chunk_spec)
        options = PipelineOptions(
            loss_reduction=loss_reduction,
            recompute=recompute,
            reduce_every=reduce_every,
            window_nbytes=window_nbytes,
            materialize=materialize,
            results_everywhere=results_everywhere,
        )
        choices = {
            "microbatches": microbatches,
            "schedule": schedule if isinstance(schedule, str) else schedule.name,
            **options.facts(),
            **specs.facts(),
        }
        check_choices(stages, choices, group)
        if isinstance(schedule, str):
            sizes = len(stages), microbatches, group.size
            schedule = make_schedule(schedule, *sizes, **schedule_options)
        options.check_effects(schedule, loss_fn)
        modules = local_stages(schedule, stages, group, microbatches)
        check_memory_of_stages(stages, schedule.placement)
        check_devices(modules, group.device)
        initialize(modules, group, materialize)
        self._stages = _make_stages(modules, schedule, reduce_every, recomputes=recompute)
        parallel = {index: stage.data_parallel for index, stage in self._stages.items()}
        self._collectives = StageCollectives.agree(parallel, group, reduce_every, window_nbytes)
        self._window_nbytes, self._group, self._replicate = window_nbytes, group, replicate
        lowered = self._lower(schedule)
        check_agreement(lowered, group)
        self._schedule, self._loss_fn = schedule, loss_fn
        self._step_hooks = StepHooks()
        self._results_everywhere = results_everywhere
        kinds = StepKinds(modules.values(), agrees=not group.has_tags)
        self._batches = BatchSplitter(group, schedule, loss_reduction, specs, kinds)
        placement, num_ranks = schedule.placement, self._collectives.num_ranks
        self._shared_parameters = find_shared_parameters(stages, placement, group, replicate)
        self._attach(modules, stages, placement, group, replicate, num_ranks)
        self._connect(schedule, lowered, microbatches)

    def _connect(self, schedule: Schedule, lowered: Schedule, microbatches: int) -> None:
        explain_no_parameters()
        self._last = LastStage(self._group, schedule.placement[-1])
        self._to_previous, self._to_next = links_of(schedule.placement, self._group, microbatches)
        self._train_executor = self._executor(lowered)
        self._eval_executors: dict[int, Executor] = {}

    def _executor(self, lowered: Schedule) -> Executor:
        return Executor(
            lowered,
            self._group.rank,
            self._stages,
            self._to_previous,
            self._to_next,
            self._group.ranks[self._group.rank],
        )

    def _lower(self, schedule: Schedule) -> Schedule:
        collectives = self._collectives
        nbytes = collectives.unsharded_nbytes
        return lower_once(
            schedule,
            gather=None if nbytes is None else tuple(nbytes),
            window_nbytes=self._window_nbytes,
            reduce=collectives.has_reductions,
            in_order=not self._group.has_tags,
        )

    # Training --------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        weights: Sequence[float] | None = None,
        finalize: bool = True,
        loss_everywhere: bool | None = None,
        **kwargs: Any,
    ) -> Tensor | None:
        """Forward and backward of one batch; gradients are added to ``.grad``. All ranks call it.

        Args:
            args: the arguments of the first stage; used on its rank.
            target: the target of the loss; used on the rank of the last stage.
            weights: what each microbatch counts, such as its number of tokens; its rows if None.
                One that counts 0 may have any loss, also NaN. Used on the rank of the last stage.
            finalize: whether gradients are complete after this step. If not, those of the next one
                are added to them: for the mean over k steps, let ``loss_fn`` divide by k.
            loss_everywhere: whether every rank gets the loss; None: ``results_everywhere``.
            kwargs: for every stage of this rank; tensors are split like the batch.

        Returns:
            The loss of the batch on the rank of the last stage, or on all; None elsewhere.

        Raises:
            ArgumentError: on every rank, if one rank cannot use its arguments, or if the schedule
                has no backward; on the rank of the last stage, if the loss trains nothing.
            StageError: a stage or the loss raised.
        """
        self._check_not_failed()
        everywhere = self._everywhere("loss_everywhere", loss_everywhere)
        if not self._schedule.has_backward:
            raise ArgumentError(
                f"step() trains, and schedule {self._schedule.name!r} has no backward: use "
                "eval_step(), or another schedule"
            )
        loss_fn = self._needs_loss("step")
        batch = self._batches.batch(args, kwargs, target, weights, loss_fn, training=True)
        for shared in self._shared_parameters:
            shared.begin()
        params = self._local_params()
        self._step_hooks.begin(self._without_torch_wrappers(params))
        try:
            self._run(self._train_executor, batch, finalize=finalize)
        except BaseException:
            for shared in self._shared_parameters:
                shared.forget()
            raise
        for shared in self._shared_parameters:
            shared.sum_over_owners()
        is_reduced = finalize or not self._collectives.has_reductions
        for shared in self._shared_parameters if is_reduced else ():
            shared.average_over_replicas()
        if self._group.size > 1:
            mark_stage_gradients(params)
        if finalize:
            self._call_hooks(params)
        return loss_of(batch, self._last, everywhere=everywhere, call="step")

    def _without_torch_wrappers(self, params: Iterable[nn.Parameter]) -> Iterable[nn.Parameter]:
        """Those of stages in no wrapper of torch, whose own hooks look like those of users."""
        stages = self._stages.values()
        if not any(stage.data_parallel.is_torch for stage in stages):
            return params
        others = (stage.module for stage in stages if not stage.data_parallel.is_torch)
        return (param for module in others for param in module.parameters())

    def _call_hooks(self, params: Iterable[nn.Parameter]) -> None:
        """Call the hooks of users on the gradients of this step and those before that wait."""
        for shared in self._shared_parameters:
            if shared.param.requires_grad and shared.param.grad is not None:
                self._step_hooks.add(shared.param)  # its gradient may have come on another rank
        self._step_hooks.end(params)

    def eval_step(
        self,
        *args: Any,
        target: Any = None,
        weights: Sequence[float] | None = None,
        loss_everywhere: bool | None = None,
        **kwargs: Any,
    ) -> Tensor | None:
        """The loss of one batch, of any size, without gradients. All ranks call it.

        Arguments and errors are those of ``step``. A batch of fewer rows than ``microbatches`` is
        split into single rows, and ``weights`` has one number for each.
        """
        loss_fn = self._needs_loss("eval_step")
        everywhere = self._everywhere("loss_everywhere", loss_everywhere)
        batch = self._evaluate(args, kwargs, target, weights, loss_fn)
        return loss_of(batch, self._last, everywhere=everywhere, call="eval_step")

    def forward(self, *args: Any, outputs_everywhere: bool | None = None, **kwargs: Any) -> Any:
        """The output of the model, without gradients, on the rank of the last stage; else None.

        All ranks call it; the batch may have any size. With ``outputs_everywhere`` (None:
        ``results_everywhere``) the rank of the last stage gives its output to all others.
        """
        everywhere = self._everywhere("outputs_everywhere", outputs_everywhere)
        batch = self._evaluate(args, kwargs, None, None, None)
        return output_of(batch, self._last, everywhere=everywhere)

    def _everywhere(self, name: str, value: bool | None) -> bool:
        """Whether all ranks get what a call returns."""
        if value is None:
            return self._results_everywhere
        flag(name, value)
        return value

    def _needs_loss(self, call: str) -> Loss:
        if self._loss_fn is None:
            raise ArgumentError(f"{call}() needs a loss_fn: give one to Pipeline(...)")
        return self._loss_fn

    def _evaluate(
        self,
        args: Any,
        kwargs: Mapping[str, Any],
        target: Any,
        weights: Sequence[float] | None,
        loss_fn: Loss | None,
    ) -> Batch:
        self._check_not_failed()
        batch = self._batches.batch(args, kwargs, target, weights, loss_fn, training=False)
        num_microbatches = len(batch.weights)
        if num_microbatches not in self._eval_executors:
            forwards = forwards_only(self._schedule, num_microbatches)
            self._eval_executors[num_microbatches] = self._executor(self._lower(forwards))
        self._run(self._eval_executors[num_microbatches], batch)
        return batch

    def _run(self, executor: Executor, batch: Batch, *, finalize: bool = True) -> None:
        try:
            executor.run(batch, finalize=finalize)
        except (EchelonError, KeyboardInterrupt) as error:
            # The other ranks wait for values of this one, even if the caller catches the error.
            self._failure = error
            world = entered()
            if self._group.size > 1 and world is not None and not isinstance(error, CommError):
                world.close(error)
            raise

    def _check_not_failed(self) -> None:
        if self._failure is not None and self._group.size > 1:
            raise StateError(
                "an earlier step of this pipeline failed on this rank, so that the ranks are at "
                f"different points of it ({type(self._failure).__name__}: {self._failure}): let "
                "that error end the rank, and start a new world"
            ) from self._failure

    # The model -------------------------------------------------------------------------------

    @property
    def schedule(self) -> Schedule:
        """The computations of every rank."""
        return self._schedule

    @property
    def has_input(self) -> bool:
        """Whether the first stage is on this rank, which needs the input."""
        return self._schedule.placement[0] == self._group.rank

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is on this rank, which needs the target and has the loss."""
        return self._schedule.placement[-1] == self._group.rank

    @property
    def most_alive(self) -> int:
        """The most microbatches of stages whose activations this rank held in the last step."""
        return self._train_executor.peak_num_alive

    def extra_repr(self) -> str:
        """What ``repr`` shows besides the stages of this rank."""
        plan = self._schedule
        return (
            f"schedule={plan.name!r}, stages={plan.num_stages}, "
            f"microbatches={plan.num_microbatches}, ranks={plan.num_ranks}"
        )

    def measure(self) -> Measurement:
        """A block that times the steps in it and simulates the schedule with the measured costs.

        All ranks enter and leave it.

        Example:
            >>> # with pipe.measure() as measured:
            >>> #     pipe.step(x, target=y)
            >>> # print(measured.simulation.makespan, measured.timeline.makespan)
        """
        return Measurement(self._schedule, self._group)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of all stages; the same plain scalar on all ranks.

        All ranks call it. ``ec.clip_grad_norm_`` calls it for a ``Pipeline``.

        Raises:
            StateError: replicas have not averaged the gradients, so each would have another norm.
        """
        waits_for_replicas = self._collectives.has_reductions and self._collectives.num_ranks > 1
        if waits_for_replicas and self._step_hooks.is_open:
            raise StateError(
                "the norm of gradients that are not complete: the last step had finalize=False, so "
                "replicas have not averaged them; clip after the step that completes them"
            )
        counted_here = {shared.param: shared.is_counted for shared in self._shared_parameters}
        return norm_over_stages(self.stages.values(), counted_here, self._group, norm_type)


@view_of.register
def _(shown: Pipeline) -> View:
    return pipeline_view(shown.schedule, shown.stages._modules, shown._group.rank)


def _make_stages(
    modules: Mapping[int, nn.Module],
    schedule: Schedule,
    reduce_every: ReduceEvery,
    *,
    recomputes: bool,
) -> dict[int, Stage]:
    splits = any(item.kind is WEIGHT for order in schedule.orders for item in order)
    return {
        index: Stage(module, index, splits=splits, recomputes=recomputes, reduce_every=reduce_every)
        for index, module in modules.items()
    }
