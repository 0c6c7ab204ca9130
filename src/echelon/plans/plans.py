"""``Plan``: how ranks share a model; a plan that cannot be carried out is refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from inspect import Parameter, signature
from typing import Any, Self, final

from echelon.checks import instance, integer, mapping, one_of
from echelon.comm.world import World
from echelon.ddp import DDP
from echelon.ddp.options import DDPOptions
from echelon.errors import ArgumentError
from echelon.fsdp import FSDP, Strategy
from echelon.fsdp.policy import FSDPOptions
from echelon.page import html_of
from echelon.pipeline.api import Pipeline
from echelon.pipeline.arguments import PipelineOptions
from echelon.pipeline.schedules.families import FAMILIES
from echelon.pipeline.schedules.families import schedule as make_schedule
from echelon.pipeline.schedules.ir import Schedule
from echelon.plans.axes import AXES, axes_of, text_of

# Options that a plan's ``pipeline``, ``fsdp`` and ``ddp`` may not have, and what sets them instead.
_SET_ELSEWHERE = {
    **dict.fromkeys(("microbatches", "schedule", "strategy"), "it is a field of Plan itself"),
    **dict.fromkeys(("loss_fn", "units"), "give it to parallelize"),
    **dict.fromkeys(("stages", "module", "group", "replicate"), "parallelize knows it"),
    "ignored": "parallelize knows it: the parameters that stages share",
}
_SET_BY_SCHEDULE = ("sync", "backward_prefetch", "forward_prefetch", "limit_all_gathers")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How ranks share a model: ``pp * dp * shard`` of them.

    Attributes:
        pp: stages run on so many ranks, one after the other.
        dp: so many replicas, each with batches of its own.
        shard: so many ranks keep parts of the same parameters, each with batches of its own.
        microbatches: into how many parts a batch is cut; needed with ``pp`` > 1.
        schedule: a name for ``ec.pipeline.schedule``, or a schedule; ``"1f1b"`` if None.
        chunks: stages per rank, where ``parallelize`` cuts the model.
        strategy: what is sharded; ``FULL_SHARD`` if None. With ``dp`` > 1 it is the hybrid one.
        pipeline: more options of ``ec.Pipeline`` and of the schedule, with ``pp`` > 1.
        fsdp: more options of ``ec.FSDP``, with ``shard`` > 1.
        ddp: options of ``ec.DDP``, with ``dp`` > 1 and ``shard`` = 1.

    Raises:
        ArgumentError: a number is below 1, an option belongs to an axis of length 1, or there is
            no option of that name or with that value.

    Example:
        >>> plan = Plan(pp=2, shard=4, microbatches=8, pipeline={"recompute": True})
        >>> plan.num_ranks, str(plan)
        (8, 'pp=2,shard=4')
    """

    pp: int = 1
    dp: int = 1
    shard: int = 1
    microbatches: int | None = None
    schedule: str | Schedule | None = None
    chunks: int = 1
    strategy: Strategy | None = None
    pipeline: Mapping[str, Any] = field(default_factory=dict, hash=False)
    fsdp: Mapping[str, Any] = field(default_factory=dict, hash=False)
    ddp: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in (*AXES, "chunks"):
            integer(name, getattr(self, name), low=1)
        for name in ("pipeline", "fsdp", "ddp"):
            mapping(name, getattr(self, name))
            object.__setattr__(self, name, dict(getattr(self, name)))  # which nobody else changes
        self._check_pipeline()
        self._check_sharding()
        self._check_replicas()

    @classmethod
    def parse(cls, text: str, **options: Any) -> Self:
        """The plan with the axes of a text, as ``str(plan)`` gives it.

        Args:
            options: the other fields.

        Raises:
            ArgumentError: it names something else than axes.

        Example:
            >>> Plan.parse("pp=2,dp=2", microbatches=4).num_ranks
            4
        """
        if not isinstance(text, str):
            raise ArgumentError(f"plan is {text!r:.80}; give a text such as 'pp=2,shard=2'")
        axes: dict[str, Any] = {**axes_of(text)}
        return cls(**axes, **options)

    def _check_pipeline(self) -> None:
        defaults: dict[str, Any] = {
            "microbatches": None,
            "schedule": None,
            "chunks": 1,
            "pipeline": {},
        }
        for name, default in defaults.items():
            value = getattr(self, name)
            if self.pp == 1 and value != default:
                raise ArgumentError(
                    f"{name} is {value!r:.80}, which is for pipelines, and pp is 1: leave it out, "
                    "or use pp > 1"
                )
        if self.pp == 1:
            return
        if self.microbatches is None:
            raise ArgumentError(
                f"pp is {self.pp} without microbatches: give at least as many as stages, such as "
                f"microbatches={4 * self.pp}, of which a rank has some work while others wait"
            )
        if "materialize" in self.pipeline and self.dp * self.shard > 1:
            raise ArgumentError(
                "pipeline has 'materialize', and stages are replicated or sharded before there is "
                "a pipeline: with shard > 1, give it in fsdp"
            )
        options, schedule_options = self.split_options()
        known = {option for family in FAMILIES.values() for option in family.options}
        unknown = {name: value for name, value in schedule_options.items() if name not in known}
        _check_names("pipeline", Pipeline, {**options, **unknown}, {})
        _check_values(PipelineOptions, options)
        schedule = self.make_schedule()
        sizes = (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches)
        if sizes != (self.pp, self.pp * self.chunks, self.microbatches):
            raise ArgumentError(
                f"schedule is for {sizes[0]} ranks, {sizes[1]} stages and {sizes[2]} microbatches, "
                f"and pp is {self.pp}, pp * chunks {self.pp * self.chunks} and microbatches "
                f"{self.microbatches}: they must agree"
            )

    def _check_sharding(self) -> None:
        if self.shard == 1:
            defaults: dict[str, Any] = {"strategy": None, "fsdp": {}}
            for name, default in defaults.items():
                value = getattr(self, name)
                if value != default:
                    raise ArgumentError(
                        f"{name} is {value!s:.80}, and shard is 1: leave it out, or use shard > 1"
                    )
            return
        if self.strategy is not None:
            allowed = (
                [Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP]
                if self.dp > 1
                else [strategy for strategy in Strategy if not strategy.hybrid]
            )
            one_of("strategy", self.strategy, allowed)
        strategy = {"strategy": self.strategy or Strategy.FULL_SHARD}
        _check_names("fsdp", FSDP, self.fsdp, self._set_elsewhere())
        values = {name: value for name, value in self.fsdp.items() if value is not None}
        _check_values(FSDPOptions, {**values, **strategy})

    def _check_replicas(self) -> None:
        only_replicates = self.shard == 1 and (self.dp > 1 or self.pp == 1)
        if self.ddp and not only_replicates:
            raise ArgumentError(
                f"ddp is {self.ddp!r:.80}, and nothing is only replicated with {self}: use dp > 1 "
                "and shard = 1, or leave it out"
            )
        _check_names("ddp", DDP, self.ddp, self._set_elsewhere())
        _check_values(DDPOptions, self.ddp)

    def _set_elsewhere(self) -> dict[str, str]:
        """Options that have no effect in a pipeline, and the reason."""
        reason = "in a pipeline the schedule says when stages are gathered and reduced"
        return dict.fromkeys(_SET_BY_SCHEDULE, reason) if self.pp > 1 else {}

    def split_options(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options in ``pipeline`` for ``ec.Pipeline``, and those for the schedule."""
        known = {*signature(Pipeline).parameters, *_SET_ELSEWHERE}
        items = self.pipeline.items()
        options = {name: value for name, value in items if name in known}
        return options, {name: value for name, value in items if name not in known}

    def make_schedule(self) -> Schedule:
        """The schedule of a plan with ``pp`` > 1."""
        options = self.split_options()[1]
        assert self.microbatches is not None, "without a pipeline there is none"
        if isinstance(self.schedule, Schedule):
            if options:
                raise ArgumentError(
                    f"pipeline has {sorted(options)}, which ec.Pipeline has not, and options of a "
                    "schedule belong to its name"
                )
            return self.schedule
        name = "1f1b" if self.schedule is None else self.schedule
        return make_schedule(name, self.pp * self.chunks, self.microbatches, self.pp, **options)

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the plan is for."""
        return self.pp * self.dp * self.shard

    @property
    def data_size(self) -> int:
        """Over how many ranks a batch is split; ranks of one ``pp`` line have the same rows.

        Example:
            >>> Plan(pp=2, dp=2, shard=2, microbatches=2).data_size
            4
        """
        return self.dp * self.shard

    def data_rank(self, world: World) -> int:
        """Which of the ``data_size`` parts of a batch a rank of ``world`` reads.

        With ``pp`` > 1 the ranks of the first stage need its inputs, and those of the last stage
        its targets. ``ec.ResumableSampler`` takes ``(plan.data_rank(world), plan.data_size)``.

        Raises:
            ArgumentError: the world has another number of ranks than the plan.

        Example:
            >>> from echelon.launch.run import run
            >>> run(Plan(pp=2, shard=2, microbatches=2).data_rank, ranks=4)
            [0, 1, 0, 1]
        """
        self.check_world(world)
        return world.rank % self.data_size

    def check_world(self, world: World) -> None:
        """Raise an ArgumentError for a world with another number of ranks."""
        instance("world", world, World)
        if self.num_ranks != world.size:
            raise ArgumentError(
                f"the plan is for pp * dp * shard = {self.pp} * {self.dp} * {self.shard} = "
                f"{self.num_ranks} ranks, and there are {world.size}"
            )

    _repr_html_ = html_of

    def __repr__(self) -> str:
        changed = []
        for option in fields(self):
            default = option.default if option.default is not MISSING else {}
            if (value := getattr(self, option.name)) != default:
                changed.append(f"{option.name}={value!r:.200}")
        return f"Plan({', '.join(changed)})"

    def __str__(self) -> str:
        return text_of({name: getattr(self, name) for name in AXES})


def _check_names(
    what: str, wrapper: type, options: Mapping[str, Any], set_elsewhere: Mapping[str, str]
) -> None:
    """Refuse options that ``wrapper`` does not have, or that are set elsewhere."""
    set_elsewhere = {**_SET_ELSEWHERE, **set_elsewhere}
    parameters = signature(wrapper).parameters.values()
    known = [param.name for param in parameters if param.kind is not Parameter.VAR_KEYWORD]
    for name in options:
        if name in set_elsewhere:
            raise ArgumentError(f"{what} has {name!r}: {set_elsewhere[name]}")
        if name not in known:
            free = ", ".join(option for option in known if option not in set_elsewhere)
            raise ArgumentError(
                f"{what} has {name!r}, which is no option of ec.{wrapper.__name__}: it has {free}"
            )


def _check_values(options_class: type, options: Mapping[str, Any]) -> None:
    """Refuse values that the options of a wrapper refuse; its other arguments are not checked."""
    names = {option.name for option in fields(options_class)}
    options_class(**{name: value for name, value in options.items() if name in names})
