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
from tests.fsdp.plain_job import LINES, REFUSED, Job, Lines, build
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
    units = ec.units.by_type(nn.Sequential) if plan.shard > 1 else None
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


@pytest.mark.parametrize(("kind", "ranks", "models"), [*CASES, *OTHERS])
def test_a_line_of_a_script_is_right_or_refused(kind: str, ranks: int, models: list[str]) -> None:
    for found in run_world(kind, check_all, ranks, args=(models,)):
        assert found == [], "\n".join(found)
