"""No option of a pipeline is inert: given in any company, it changes what can be observed, or is
refused.

Options are enumerated by the signature of ``Pipeline``, so a new one without a row fails. The
companies are all kinds of stages with all kinds of schedules, each with every other option. What is
observed of a rank: what the calls return, gradients and values, how often stages run and on what,
collectives, unshards and memory by their events.
"""

import inspect
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from tests.laws.test_no_option_is_inert import EVENTS, FACTS, digest
from tests.worlds import events_of, run_world

Options = dict[str, Any]
REFUSED = (ec.ArgumentError, ec.ModelMismatch, ec.UnsupportedError, ec.ScheduleError)
ROWS_OF_BATCH = 8


class Stage(nn.Module):
    """Notes what it is given; a second argument and a keyword come into its output as sums."""

    def __init__(self, seed: int, seen: list[Any], weight: nn.Parameter | None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(6, 6)
        if weight is not None:
            self.layer.weight = weight
        self.__dict__["seen"] = seen

    def forward(self, x: Tensor, table: Tensor | None = None, mask: Any = None) -> Tensor:
        shapes = [None if t is None else tuple(t.shape) for t in (x, table, mask)]
        self.seen.append((shapes, torch.is_grad_enabled()))
        return torch.tanh(self.layer(x)) + sum(t.sum() for t in (table, mask) if t is not None)


def reset(module: nn.Module) -> None:
    """Other first values than those of ``reset_parameters``."""
    for tensor in module.parameters(recurse=False):
        tensor.detach().fill_(0.1)


def loss(output: Tensor, target: Any) -> Tensor:
    """A mean over the first target's rows, and a part that depends on the second one."""
    first, second = target
    return (output - first).square().mean() + 0.1 * second.sum()


WHOLE = ec.pipeline.Replicate()
# By option, each value that is tried, and the company in which it is; "meta", "tied" and "stages"
# are about the stages, and are no options.
ROWS: dict[str, list[tuple[Any, Options]]] = {
    "microbatches": [(4, {})],
    "schedule": [("gpipe", {}), ("1f1b", {}), ("zb-h1", {})],
    "loss_fn": [(lambda output, target: output.sum(), {})],
    "loss_reduction": [("sum", {})],
    "recompute": [(True, {})],
    "args_chunk_spec": [((None, WHOLE), {})],
    "kwargs_chunk_spec": [({"mask": WHOLE}, {})],
    "target_chunk_spec": [((None, WHOLE), {})],
    "materialize": [(reset, {}), (reset, {"meta": True})],
    "reduce_every": [("microbatch", {})],
    "window_nbytes": [(0, {})],
    "replicate": [("replicate", {}), ("replicate", {"tied": True})],
    "results_everywhere": [(True, {})],
    "schedule_options": [({"factor": 1}, {}), ({"k": 2}, {}), ({"fused": True}, {})],
}
SCHEDULES = {
    "1f1b": 2, "gpipe": 2, "zb-h1": 2, "interleaved": 4, "zb": 4, "zb-v": 4, "dualpipe-v": 4,
    "forward-only": 2,
}  # fmt: skip
KINDS = ("plain", "ddp", "fsdp")


def made(mesh: ec.Mesh, options: Options, seen: list[Any]) -> ec.Pipeline:
    options = {"schedule": "1f1b", "microbatches": 5, "loss_fn": loss, **options}
    kind, tied = options.pop("stages"), options.pop("tied", False)
    with torch.device("meta" if options.pop("meta", False) else "cpu"):
        torch.manual_seed(9)
        weight = nn.Parameter(torch.randn(6, 6)) if tied else None
        number = SCHEDULES[options["schedule"]]
        stages: list[nn.Module] = [
            Stage(i, seen, weight if i in (0, number - 1) else None) for i in range(number)
        ]
    ignored = [weight] if weight is not None else []
    if kind == "ddp":
        stages = [ec.DDP(stage, mesh["dp"], ignored=ignored) for stage in stages]
    elif kind == "fsdp":
        stages = [ec.FSDP(stage, mesh["dp"], min_num_params=0, ignored=ignored) for stage in stages]
    if "replicate" in options:
        options["replicate"] = mesh["dp"]
    options |= options.pop("schedule_options", {})
    return ec.Pipeline(stages, mesh["pp"], **options)


def attempt(seen: list[Any], call: Any) -> None:
    """Note what a call returns, or that it refuses."""
    try:
        seen.append(digest(call()))
    except REFUSED as error:
        seen.append(f"refused: {error}")


def observed(world: World, mesh: ec.Mesh, options: Options) -> Any:
    """What this rank sees of a training, or the refusal to begin it."""
    seen: list[Any] = []
    torch.manual_seed(0)
    with events_of(world.rank, *EVENTS) as events:
        try:
            pipe = made(mesh, options, seen)
        except REFUSED as error:
            return f"refused: {error}"
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + world.rank % 2)
            x, y, table = torch.randn(3, ROWS_OF_BATCH, 6, generator=generator)
            mask = torch.arange(float(ROWS_OF_BATCH))
            args, kwargs = (x, table), {"mask": mask}
            attempt(seen, lambda: pipe.step(*args, target=(y, table), **kwargs))  # noqa: B023
            attempt(seen, lambda: pipe.eval_step(*args, target=(y, table), **kwargs))  # noqa: B023
            attempt(seen, lambda: pipe(*args, **kwargs))  # noqa: B023
            seen += [digest(param.grad) for param in pipe.parameters()]
            seen += [digest(param) for param in pipe.parameters()]
            pipe.zero_grad()
        seen.append(pipe.most_alive)
    return [*seen, *((event.name, *map(event.facts.get, FACTS)) for event in events)]


def has_nothing_to_do(name: str, company: Options) -> bool:
    """What the docstring says.

    Wrapped stages are replicated already, and ``replicate`` is for what they share. A rank with one
    stage holds no more than the stage that computes, which ``window_nbytes`` does not count.
    """
    if name == "replicate":
        return company["stages"] != "plain" and not company.get("tied")
    is_single = SCHEDULES[company["schedule"]] == 2
    return name == "window_nbytes" and company["stages"] == "fsdp" and is_single


class Observer:
    """Observes each company of options once."""

    def __init__(self, world: World) -> None:
        self._world, self._mesh = world, world.mesh(pp=2, dp=-1)
        self._known: dict[str, Any] = {}

    def see(self, options: Options) -> Any:
        key = repr(sorted(options.items(), key=lambda item: item[0]))
        if key not in self._known:
            self._known[key] = observed(self._world, self._mesh, options)
        return self._known[key]

    def inert(self, company: Options, name: str, value: Any) -> list[str]:
        """The option, if no rank sees it in this company, which is not refused by itself."""
        if company.get(name) == value:
            return []
        first, second = self.see(company), self.see({**company, name: value})
        is_other = first != second or isinstance(first, str)
        if any(self._world.group.all_gather_object(is_other)) or has_nothing_to_do(name, company):
            return []
        return [f"{name}={value!r:.60} with {company!r:.150} does nothing"]


def inert(world: World, kind: str) -> list[str]:
    observer, found = Observer(world), []
    for schedule in SCHEDULES:
        for name, values in ROWS.items():
            for value, with_it in values:
                company = {"stages": kind, "schedule": schedule, **with_it}
                found += observer.inert(company, name, value)
    return found


@pytest.mark.timeout(240)
@pytest.mark.slow_for("ddp", "fsdp")
@pytest.mark.parametrize("kind", KINDS)
def test_an_option_is_seen_or_refused_with_every_stage_and_schedule(kind: str) -> None:
    for found in run_world("threads", inert, 4, (kind,), timeout=200):
        assert found == []


def inert_in_pairs(world: World, kind: str) -> list[str]:
    """The options that do nothing once another one is given."""
    observer, found = Observer(world), []
    for first, second in permutations(ROWS, 2):
        for (value, with_it), (other, with_other) in product(ROWS[first], ROWS[second]):
            company = {"stages": kind, "schedule": "1f1b", **with_it, **with_other, second: other}
            found += observer.inert(company, first, value)
    return found


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", KINDS)
def test_an_option_is_seen_or_refused_beside_every_other(kind: str) -> None:
    for found in run_world("threads", inert_in_pairs, 4, (kind,), timeout=200):
        assert found == []


def test_what_is_observed_is_the_same_in_every_run() -> None:
    def main(world: World) -> bool:
        observers = [Observer(world) for _ in range(2)]
        return all(
            observers[0].see({"stages": kind}) == observers[1].see({"stages": kind})
            for kind in KINDS
        )

    assert all(ec.run(main, 4))


def test_every_option_has_a_row() -> None:
    assert {*inspect.signature(ec.Pipeline).parameters} - {"stages", "group"} == {*ROWS}
