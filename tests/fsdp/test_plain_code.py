"""Lines of ordinary scripts over a wrapped model give what one process gives, or a typed error."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
import tests.fsdp.lines_of_gradients
import tests.fsdp.lines_of_values
import tests.fsdp.lines_of_whole  # noqa: F401  (each adds to LINES and REFUSED)
from echelon.errors import EchelonError
from tests.fsdp.plain_job import LINES, REFUSED, Job, Lines, PipelineJob, build, loss_fn
from tests.worlds import run_world

# The matrix ----------------------------------------------------------------------------------

_S = ec.Strategy
MODELS: dict[str, dict[str, Any] | None] = {
    "DDP": None,
    **{
        f"{layout} {strategy.name}": {"layout": layout, "strategy": strategy, "min_num_params": 0}
        for layout in ("flat", "rows")
        for strategy in (_S.FULL_SHARD, _S.SHARD_GRAD_OP)
    },
    "NO_SHARD": {"strategy": _S.NO_SHARD, "min_num_params": 0},
    "flat, small units whole": {"layout": "flat", "min_num_params": 60},
}


def wrap(world: ec.World, options: dict[str, Any] | None) -> Job:
    inner = build()
    if options is None:
        model: nn.Module = ec.DDP(inner, world.group)
    else:
        group, more = world.group, {}
        if options.get("strategy", _S.FULL_SHARD).hybrid:
            mesh = world.mesh(replicate=2, shard=-1)
            group, more = mesh["shard"], {"replicate": mesh["replicate"]}
        units = ec.units.by_type(nn.Sequential)
        model = ec.FSDP(inner, group, units=units, **more, **options)
    return Job(model, inner, [world.rank], world.group)


def stages(world: ec.World, plan: ec.Plan) -> Job:
    """The model under a plan with stages; each line of it has the rows of its own ranks."""
    inner = build()
    units = ec.units.by_type(nn.Linear) if plan.shard > 1 else None
    model = ec.parallelize(inner, plan, world, loss_fn=loss_fn, units=units)
    lines = plan.num_ranks // plan.pp
    mine = [rank for rank in range(world.size) if rank % lines == world.rank % lines]
    return PipelineJob(model, inner, mine, world.group)


def state_of(job: Job) -> dict[str, Tensor]:
    gather = job.model.state_dict
    if isinstance(job.model, ec.Pipeline):
        gather = job.model.whole_state_dict
    return {name: value.clone() for name, value in gather().items()}


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        found = found if isinstance(found, Tensor) else torch.tensor(float(found))
        return torch.allclose(found.double(), expected.double(), 1e-9, 1e-11, equal_nan=True)
    if isinstance(expected, float):
        return math.isclose(float(found), expected, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    return bool(found == expected)


def outcome(lines: Lines, job: Job, world: ec.World, expected: Any) -> str:
    try:
        result, state = lines(job), state_of(job)
    except EchelonError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"
    wanted, wanted_state = expected
    if not (result is None or same(result, wanted)):
        return f"wrong: {result} instead of {wanted}"
    return "right" if same(state, wanted_state) else "wrong: another state"


def plain(lines: Lines, size: int) -> Any:
    model = build()
    job = Job(model, model, [*range(size)])
    return lines(job), state_of(job)


def check_all(world: ec.World, models: list[str]) -> list[str]:
    found = []
    expected = {name: plain(f, world.size) for name, f in {**LINES, **REFUSED}.items()}
    for kind in models:
        options = MODELS.get(kind, {"strategy": _S.HYBRID_SHARD, "min_num_params": 0})
        whole = options is None or options.get("strategy") is _S.NO_SHARD
        for name, lines in {**LINES, **REFUSED}.items():
            text = outcome(lines, wrap(world, options), world, expected[name])
            world.group.barrier()
            may_refuse = name in REFUSED and (not whole or name == "value_of_another_shape")
            if text != "right" and not (may_refuse and text.startswith("refused")):
                found.append(f"{kind}, {name}: {text[:300]}")
    return found


CASES = [("threads", 2, [*MODELS]), ("threads", 3, [*MODELS]), ("threads", 4, ["hybrid"])]
OTHERS = [(kind, 2, ["flat FULL_SHARD", "rows FULL_SHARD"]) for kind in ("processes", "gloo")]


@pytest.mark.slow_for("3")
@pytest.mark.parametrize(("kind", "ranks", "models"), [*CASES, *OTHERS])
def test_a_line_of_a_script_is_right_or_refused(kind: str, ranks: int, models: list[str]) -> None:
    for found in run_world(kind, check_all, ranks, args=(models,)):
        assert found == [], "\n".join(found)


# Stages --------------------------------------------------------------------------------------

# What docs/pipeline.md says: these read the parameters of this rank's stages, and are right there.
OF_THESE_STAGES = {
    "decay_groups_by_dim", "counts", "finite_checks", "logged", "vectors", "lists_of_gradients",
}  # fmt: skip
# And these read or write the model that was cut, all of it as one vector, or its optimizer.
OF_THE_PLAIN_MODEL = {
    "whole_average_of_a_plain_copy", "copied_parameter", "a_whole_vector",
    "optimizer_state_of_one_process",
}  # fmt: skip
PLANS = ["pp=2", "pp=2,dp=2", "pp=2,shard=2"]


def in_stages(world: ec.World, text: str, layout: str, name: str, expected: Any) -> str:
    options = {"fsdp": {"min_num_params": 0, "layout": layout}} if "shard" in text else {}
    job = stages(world, ec.Plan.parse(text, microbatches=2, **options))
    result, state = {**LINES, **REFUSED}[name](job), state_of(job)
    wanted, wanted_state = expected
    if not same(state, wanted_state):
        return "wrong: another state"
    is_right = result is None or name in OF_THESE_STAGES or same(result, of_stages(job, wanted))
    return "right" if is_right or same(result, wanted) else f"wrong: {result} instead of {wanted}"


def of_stages(job: Job, value: Any) -> Any:
    """The part of a list of something for each parameter that is of the stages of this rank."""
    names = [name for name, _ in build().named_parameters()]
    keys = job.model.state_dict().keys()
    if isinstance(value, list) and len(value) == len(names):
        return [item for item, name in zip(value, names, strict=True) if name in keys]
    if isinstance(value, list | tuple):
        return type(value)(of_stages(job, item) for item in value)
    return value


def told(error: BaseException) -> bool:
    """Whether it is ours, or has a note that says what to do in a pipeline."""
    notes = getattr(error, "__notes__", ())
    return isinstance(error, EchelonError) or any("pipe" in note for note in notes)


@pytest.mark.slow_for("rows", "pp=2,dp=2")
@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("text", PLANS)
def test_a_line_of_a_script_is_right_or_refused_under_a_plan(text: str, layout: str) -> None:
    if layout == "rows" and "shard" not in text:
        return
    ranks, found = ec.Plan.parse(text, microbatches=2).num_ranks, []
    for name, lines in {**LINES, **REFUSED}.items():
        if name in OF_THE_PLAIN_MODEL:
            continue
        args = (text, layout, name, plain(lines, ranks))
        try:
            outcomes = ec.run(in_stages, ranks, args=args, timeout=20)
        except Exception as error:
            outcomes = [] if told(error) else [f"raw {type(error).__name__}: {error}"]
        found += [f"{name}: {text[:200]}" for text in outcomes if text != "right"]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("text", PLANS)
def test_sums_over_the_gradients_of_stages_are_refused(text: str) -> None:
    """However they are written."""

    def squares(job: Job) -> Any:
        return torch.stack([p.grad.pow(2).sum() for p in job.params]).sum().sqrt()

    def added(job: Job) -> Any:
        total = torch.zeros(())
        for p in job.params:
            total = total + p.grad.detach().norm() ** 2
        return total

    def of_norms(job: Job) -> Any:
        return sum(p.grad.data.norm(2) ** 2 for p in job.params).sqrt()

    def of_products(job: Job) -> Any:
        return sum(torch.dot(p.grad.flatten(), p.grad.flatten()) for p in job.params) / 2

    def in_a_list(job: Job) -> Any:
        norms = torch.zeros(len(job.params), dtype=torch.float64)
        for i, p in enumerate(job.params):
            norms[i] = p.grad.norm()
        return norms.norm()

    def in_a_row(job: Job) -> Any:
        norms = torch.zeros(len(job.params), dtype=torch.float64)
        for i, p in enumerate(job.params):
            norms[i : i + 1].fill_(p.grad.norm())
        return norms.amax()

    def in_one_place(job: Job) -> Any:
        totals = torch.zeros(2, dtype=torch.float64)
        for p in job.params:
            totals[0] += p.grad.norm()
        return totals

    def by_hypotenuse(job: Job) -> Any:
        total = torch.zeros((), dtype=torch.float64)
        for p in job.params:
            total = torch.hypot(total, p.grad.norm())
        return total

    def by_products_in_place(job: Job) -> Any:
        total = torch.zeros((), dtype=torch.float64)
        for p in job.params:
            total.addcmul_(p.grad.norm(), p.grad.norm())
        return total

    def main(world: ec.World) -> None:
        options = {"fsdp": {"min_num_params": 0}} if "shard" in text else {}
        job = stages(world, ec.Plan.parse(text, microbatches=2, **options))
        job.backward()
        summed = (squares, added, of_norms, of_products, in_a_list, in_a_row, in_one_place)
        for lines in (*summed, by_hypotenuse, by_products_in_place):
            with pytest.raises(ec.UnsupportedError, match=r"ec\.clip_grad_norm_"):
                lines(job)
        own = sum(float(ec.local_shard(p.grad).square().sum()) for p in job.params)
        assert own > 0  # as the error says

    ec.run(main, ec.Plan.parse(text, microbatches=2).num_ranks)


def test_torchs_scaler_is_refused_over_stages() -> None:
    def main(world: ec.World) -> None:
        job = stages(world, ec.Plan(pp=2, microbatches=2))
        optimizer, scaler = job.sgd(), torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.ones(()))
        job.backward()
        with pytest.raises(ec.UnsupportedError, match=r"ec\.GradScaler"):
            scaler.step(optimizer)

    ec.run(main, 2)
