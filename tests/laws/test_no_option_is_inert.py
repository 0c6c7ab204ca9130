"""No option is inert: given in any company, it changes what can be observed, or is refused.

Options are enumerated by the signatures of the constructors, so a new one without a row fails. What
is observed of a rank: collectives, unshards and memory by their events, values, and gradients.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from tests.worlds import events_of, run_world

Options = dict[str, Any]
EVENTS = ("collective.issue", "ddp.bucket", "memory", "fsdp.gather", "fsdp.prefetch",
          "fsdp.release")  # fmt: skip
FACTS = ("op", "nbytes", "unit", "category", "bucket", "label")
LOW = torch.bfloat16


class Layer(nn.Linear):
    """A unit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


class Mean(nn.Module):
    """Statistics of its inputs, in a buffer of any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def reset_parameters(self) -> None:
        self.mean.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.5)
        return x - self.mean.to(x.dtype)


class Net(nn.Sequential):
    """Units, and a part with statistics; it casts what it is given."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(rank)  # so that it matters who gives the first values
        layers = [Layer(6, 6) for _ in range(5)]
        super().__init__(nn.Linear(6, 6), *layers, Mean(), nn.Linear(6, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:  # a layer that is no unit is unsharded now
            is_plain = type(module) is nn.Linear
            x = module(x.to(module.weight.dtype) if is_plain else x)
        return x


def reset(module: nn.Module) -> None:
    """Other first values than those of ``reset_parameters``."""
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        tensor.detach().fill_(0.1)


# Options that are seen only in company, as "of": (value, company); "meta" is where the model is.
DDP_ROWS: dict[str, list[tuple[Any, Options]]] = {
    "bucket_bytes": [(200, {})],
    "first_bucket_bytes": [(0, {})],
    "sync": [("manual", {}), ("overlap", {"sync": "manual"})],
    "broadcast_buffers": [(False, {})],
    "init": [("verify", {}), ("trust", {"check_replicas": 0})],
    "gradient_dtype": [(LOW, {})],
    "reduction": [("sum", {}), (7, {})],
    "check_replicas": [(0, {}), (1, {})],
    "ignored": [([0], {})],
}
DDP_COMPANY: list[Options] = [
    {"sync": sync, "reduction": reduction}
    for sync in ("overlap", "manual")
    for reduction in ("mean", 3)
]
FSDP_ROWS: dict[str, list[tuple[Any, Options]]] = {
    "units": [(ec.units.by_type(Layer), {"units": None})],
    "strategy": [],  # every other row, in the company of each
    "layout": [("rows", {})],
    "precision": [
        (ec.MixedPrecision(compute=LOW), {}),
        (ec.MixedPrecision(reduce=LOW), {}),
        (ec.MixedPrecision(master=torch.float64), {}),
        (ec.MixedPrecision(buffers=LOW), {}),
        (
            ec.MixedPrecision(compute=LOW, keep=(Layer,)),
            {"precision": ec.MixedPrecision(compute=LOW)},
        ),
    ],
    "min_num_params": [(50, {})],
    "ignored": [([0], {})],
    "init": [("verify", {}), ("trust", {"check_replicas": 0})],
    "reduction": [("sum", {}), (7, {})],
    "replicate": [("group", {})],
    "backward_prefetch": [("POST", {}), ("NONE", {})],
    "forward_prefetch": [(2, {})],
    "limit_all_gathers": [(False, {"forward_prefetch": 4})],
    "use_orig_params": [(False, {})],
    "offload": [("OPTIMIZER", {}), ("ALL", {})],
    "check_replicas": [
        (0, {"min_num_params": 50}),
        (1, {"min_num_params": 50}),
        (1, {"min_num_params": 1000}),
    ],
    "materialize": [(reset, {}), (reset, {"meta": True})],
}
PREFETCHES = ("backward_prefetch", "forward_prefetch", "limit_all_gathers")
OFF = (("backward_prefetch", "NONE"),)  # asks for nothing, so it is right where nothing happens


def has_nothing_to_do(name: str, value: Any, strategy: str, world: World) -> bool:
    """What the docstring of FSDP says: the same script runs where memory is shared, or on a CPU."""
    if name == "offload":
        return True
    if name in PREFETCHES and world.group.shares_memory:
        return True
    return (name, value) in OFF and strategy != "FULL_SHARD"


def made(technique: str, world: World, options: Options) -> nn.Module:
    """The wrapped model."""
    options = dict(options)
    with torch.device("meta" if options.pop("meta", False) else "cpu"):
        net = Net(world.rank)
    if "ignored" in options:
        options["ignored"] = [net[i] for i in options["ignored"]]
    if technique == "ddp":
        return ec.DDP(net, world.group, **options)
    for name, kind in (
        ("strategy", ec.Strategy),
        ("backward_prefetch", ec.BackwardPrefetch),
        ("offload", ec.Offload),
    ):
        if name in options:
            options[name] = kind[options[name]]
    if "replicate" in options:
        options["replicate"] = world.group
    return ec.FSDP(net, world.group, **{"units": ec.units.by_type(Layer),
                                        "min_num_params": 0, **options})  # fmt: skip


def digest(tensor: torch.Tensor | None) -> Any:
    """A value as text."""
    return None if tensor is None else (str(tensor.dtype), ec.local_shard(tensor).tolist())


def observed(technique: str, world: World, options: Options) -> Any:
    """What this rank sees of a training, or the refusal to begin it."""
    seen: list[Any] = []
    torch.manual_seed(0)
    with events_of(world.rank, *EVENTS) as events:
        try:
            model: Any = made(technique, world, options)
        except (ec.ArgumentError, ec.ModelMismatch, ec.UnsupportedError) as error:
            return f"refused: {error}"
        for module in model.modules():
            if isinstance(module, Layer):  # what has begun before a unit computes
                module.register_forward_hook(lambda *args: seen.append(len(events)))
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + world.rank)
            model(torch.randn(4, 6, generator=generator)).float().square().sum().backward()
            seen += [digest(param.grad) for param in model.parameters()]
            if options.get("sync") == "manual":
                model.sync_gradients()
            seen += [digest(tensor) for tensor in [*model.parameters(), *model.buffers()]]
            seen += [digest(param.grad) for param in model.parameters()]
            model.zero_grad()
    return [*seen, *((event.name, *map(event.facts.get, FACTS)) for event in events)]


def companies(technique: str) -> Iterator[Options]:
    if technique == "ddp":
        yield from DDP_COMPANY
    else:
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIMIZER", "NO_SHARD"):
            yield {"strategy": strategy}


def inert(world: World, technique: str) -> list[str]:
    """The options that this rank does not see, and those of which the table says so wrongly."""
    found = []
    known: dict[str, Any] = {}  # what is seen without the option is the same for most of them

    def see(options: Options) -> Any:
        key = repr(sorted(options.items()))
        if key not in known:
            known[key] = observed(technique, world, options)
        return known[key]

    for company in companies(technique):
        rows = DDP_ROWS if technique == "ddp" else FSDP_ROWS
        for name, values in rows.items():
            for value, with_it in values:
                base = {**company, **with_it}
                if base.get(name) == value:
                    continue
                without, with_option = see(base), see({**base, name: value})
                nothing = technique == "fsdp" and has_nothing_to_do(
                    name, value, base.get("strategy", ""), world
                )
                is_same = without == with_option and not isinstance(without, str)
                if is_same and not nothing and world.rank == 0:
                    found.append(f"{name}={value!r:.60} with {base!r:.120} does nothing")
    return found


@pytest.mark.slow_for("gloo")
@pytest.mark.parametrize("kind", ["threads", "gloo"])
@pytest.mark.parametrize("technique", ["ddp", "fsdp"])
def test_an_option_is_seen_or_refused_in_every_company(technique: str, kind: str) -> None:
    assert run_world(kind, inert, 2, (technique,))[0] == []


@pytest.mark.parametrize("technique", ["ddp", "fsdp"])
def test_what_is_observed_is_the_same_in_every_run(technique: str) -> None:
    def main(world: World) -> bool:
        return observed(technique, world, {}) == observed(technique, world, {})

    assert all(ec.run(main, 2))


@pytest.mark.parametrize(("of", "rows"), [(ec.DDP, DDP_ROWS), (ec.FSDP, FSDP_ROWS)])
def test_every_option_has_a_row(of: type, rows: dict[str, Any]) -> None:
    assert set(inspect.signature(of).parameters) - {"module", "group"} == set(rows)
