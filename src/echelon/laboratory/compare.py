"""``compare``: trains on ranks and on one process, and says whether they compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Literal, final

import torch
from torch import nn

from echelon import checks
from echelon.errors import ArgumentError, UnsupportedError
from echelon.fsdp.units import Rule
from echelon.laboratory.batch_rows import Loss, checked_batches
from echelon.laboratory.causes import samples_cause, stream_cause
from echelon.laboratory.comparison import Cause, Comparison, ValueDifference, ValueKind
from echelon.laboratory.explain import Trainings
from echelon.laboratory.one_process import MakeModel, MakeOptimizer, OneProcess
from echelon.laboratory.rank_training import (
    PlanTraining,
    RankTraining,
    TrainFunction,
    check_sizes,
)
from echelon.laboratory.seen_rows import SeenRows
from echelon.laboratory.value_pairs import distance
from echelon.laboratory.value_recorder import TrainingValues
from echelon.laboratory.verdict import verdict
from echelon.launch.program import MOST_RANKS
from echelon.launch.run import run
from echelon.plans.plans import Plan

WorldName = Literal["threads", "processes"]
_RANKS = 2  # of a function, if nothing else is said


def compare(
    make_model: MakeModel,
    batches: Iterable[Any],
    plan_or_function: Plan | TrainFunction,
    *,
    loss_fn: Loss,
    optimizer: MakeOptimizer,
    steps: int = 3,
    ranks: int | None = None,
    world: WorldName = "threads",
    clip: float | None = None,
    units: Rule | None = None,
) -> Comparison:
    """Train on ranks and on one process, in float64, and say where they first differ, and why.

    Args:
        make_model: returns a new model, equal each time after ``torch.manual_seed``.
        batches: one for each step: (inputs, target), a dict or a tensor, with rows in dim 0.
        plan_or_function: a plan, which shares each batch evenly; or a function of (world, model,
            batches, optimizer) that makes a step for each batch, of which it takes this rank's
            rows, and returns the model as it wrapped it, or None if it did not wrap it.
        loss_fn: a number from output and target; a dict or tensor is its own target.
        optimizer: returns a new optimizer of an iterable of parameters.
        steps: how many.
        ranks: how many train, for a function; 2 if None.
        world: ``"threads"``: simulated ranks; ``"processes"``: local processes.
        clip: the largest norm of gradients, in a plan and on one process; None for any.
        units: which modules FSDP gathers at once, for a plan with ``shard`` > 1.

    Returns:
        What was found: ``print`` it.

    Raises:
        ArgumentError: models differ from call to call, or an argument does not fit another one.
        UnsupportedError: the model does not run in float64, or it draws random numbers and it is
            not known for which rows.
        Exception: what the function raises on a rank.

    Example:
        >>> from torch.nn.functional import mse_loss
        >>> data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)]
        >>> sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        >>> model = lambda: nn.Linear(4, 1)
        >>> compare(model, data, Plan(dp=2), loss_fn=mse_loss, optimizer=sgd).verdict
        'the same: plan dp=2 on 2 ranks and one process, 3 steps in float64'
    """
    checks.integer("steps", steps, low=1)
    if ranks is not None:
        checks.integer("ranks", ranks, low=1, high=MOST_RANKS)
    checks.one_of("world", world, ("threads", "processes"))
    if clip is not None:
        checks.positive("clip", clip)
    checks.function("make_model", make_model, "nothing that returns a new model")
    checks.function("loss_fn", loss_fn, "output and target")
    checks.function("optimizer", optimizer, "parameters that returns a new optimizer")
    alone = OneProcess(
        make_model=make_model,
        batches=checked_batches(batches, steps),
        loss_fn=loss_fn,
        optimizer=optimizer,
        clip=clip,
    )
    return _Comparing(alone, _job_of(plan_or_function, alone, ranks, units), world).result()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    """What ranks do: how many, the function that each runs, and how it is called in messages."""

    what: str
    ranks: int
    function: TrainFunction
    plan: Plan | None


def _job_of(
    plan_or_function: object, alone: OneProcess, ranks: int | None, units: Rule | None
) -> _Job:
    if isinstance(plan_or_function, Plan):
        plan = plan_or_function
        if ranks not in (None, plan.num_ranks):
            raise ArgumentError(
                f"ranks is {ranks}, and the plan {plan} is for {plan.num_ranks}: leave ranks out"
            )
        check_sizes(plan, alone.batches)
        function = PlanTraining(plan=plan, loss_fn=alone.loss_fn, units=units, clip=alone.clip)
        return _Job(what=f"plan {plan}", ranks=plan.num_ranks, function=function, plan=plan)
    if not callable(plan_or_function):
        raise ArgumentError(
            f"plan_or_function is {plan_or_function!r:.80}; give an ec.Plan, or a function of "
            "(world, model, batches, optimizer) that trains on a rank"
        )
    if units is not None:
        raise ArgumentError("units are for a plan; a function wraps the model itself")
    _check_parameters(plan_or_function)
    name = getattr(plan_or_function, "__name__", type(plan_or_function).__name__)
    return _Job(what=name, ranks=ranks or _RANKS, function=plan_or_function, plan=None)


def _check_parameters(function: Callable[..., Any]) -> None:
    try:
        parameters = signature(function)
    except ValueError:  # of a function in C, which nobody knows
        return
    try:
        parameters.bind("world", "model", "batches", "optimizer")
    except TypeError as error:
        raise ArgumentError(
            f"the function takes {parameters}, and it is called with (world, model, batches, "
            f"optimizer): {error}"
        ) from error


@final
class _Comparing:
    """Runs the trainings of one comparison, and compares them."""

    def __init__(self, alone: OneProcess, job: _Job, world: WorldName) -> None:
        self._alone, self._job, self._world = alone, job, world

    def result(self) -> Comparison:
        """Train, and compare."""
        alone = self._alone
        models = _models(alone, self._job.ranks)
        expected = alone.train()
        is_random = any(root.is_random for values in expected.steps for root in values.roots)
        if is_random:
            self._check_random()
        ranks = self._train_on_ranks(models)
        seen = SeenRows(ranks, alone.batches, self._job.plan)
        if is_random:
            problem = self._problem_of_streams(seen)
            if problem is not None:
                return problem
            alone = replace(alone, parts=seen.parts())
            expected = alone.train()
        trainings = Trainings(
            alone=alone, expected=expected, ranks=ranks, seen=seen, plan=self._job.plan
        )
        return verdict(trainings, self._job.what)

    def _check_random(self) -> None:
        plan = self._job.plan
        if plan is not None and plan.pp > 1:
            raise UnsupportedError(
                "the model draws random numbers, such as those of dropout, and the stages of "
                f"{plan} draw them in an order of their own: compare with a dropout of 0"
            )

    def _train_on_ranks(self, models: Sequence[nn.Module]) -> list[TrainingValues]:
        training = RankTraining(
            function=self._job.function,
            make_model=self._alone.make_model,
            models=() if self._world == "processes" else models,
            batches=self._alone.batches,
            optimizer=self._alone.optimizer,
            name=self._job.what,
        )
        return run(training, self._job.ranks, self._world)

    def _problem_of_streams(self, seen: SeenRows) -> Comparison | None:
        """Why the random numbers of ranks cannot be those of one process; None if they can."""
        for step in range(len(self._alone.batches)):
            covered = seen.coverage(step)
            if covered is None:
                raise UnsupportedError(
                    f"the model draws random numbers, such as those of dropout, and in step {step} "
                    "it is not known for which rows: give it rows of the batches as they are, or "
                    "compare with a dropout of 0"
                )
            if not covered.is_partition:
                cause = samples_cause(covered)
                ranks = range(self._job.ranks)
                return self._only(ValueDifference.of_step(step, ValueKind.ROWS, ranks), cause)
        alike = seen.alike_streams()
        if alike is None:
            return None
        difference = ValueDifference.of_step(alike.step, ValueKind.STREAM, alike.ranks)
        return self._only(difference, stream_cause(alike))

    def _only(self, difference: ValueDifference, cause: Cause) -> Comparison:
        return Comparison(
            what=self._job.what,
            ranks=self._job.ranks,
            steps=len(self._alone.batches),
            differences=(difference,),
            causes=(cause,),
            notes=("values were not compared, because they follow from this",),
        )


def _models(alone: OneProcess, ranks: int) -> list[nn.Module]:
    """One model for each rank, all of them equal.

    Raises:
        ArgumentError: ``make_model`` gives no new module each time, or another one each time.
    """
    models = [alone.make() for _ in range(max(ranks, 2))]
    first, second = ({**_state(model)} for model in models[:2])
    if models[0] is models[1] or any(first[name] is second.get(name) for name in first):
        raise ArgumentError(
            "make_model returned the same module or parameter twice: build a new model in it each "
            "time, since each rank trains one of its own"
        )
    for name, tensor in first.items():
        other = second.get(name)
        if other is None or other.shape != tensor.shape or bool(distance(tensor, other).any()):
            raise ArgumentError(
                f"make_model gave two models that differ in {name!r}, although torch.manual_seed "
                "came before each: draw its weights from torch's own random stream"
            )
    return models[:ranks]


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
