"""Modules that ``torch.compile`` was given keep the plain model's names in every state."""

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

import echelon as ec
from tests.worlds import run_world

WIDTH = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x))


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def nothing(model: nn.Sequential) -> nn.Module:
    return model


def outside(model: nn.Sequential) -> nn.Module:
    return compiled(model)


def inside(model: nn.Sequential) -> nn.Module:
    model[0] = compiled(model[0])
    model[1].up = compiled(model[1].up)
    return model


def both(model: nn.Sequential) -> nn.Module:
    return compiled(inside(model))


WAYS = (nothing, outside, inside, both)
Way = Callable[[nn.Sequential], nn.Module]


def stages_of(model: nn.Sequential, way: Way) -> list[nn.Module]:
    if way in (inside, both):
        inside(model)
    stages = ec.pipeline.split(model, 2)
    return [compiled(stage) for stage in stages] if way in (outside, both) else stages


def pipeline(world: ec.World, model: nn.Sequential, way: Way) -> ec.Pipeline:
    stages = stages_of(model, way)
    return ec.Pipeline(stages, world.group, microbatches=1, loss_fn=nn.functional.mse_loss)


def wrapped_pipeline(world: ec.World, model: nn.Sequential, way: Way) -> ec.Pipeline:
    """The first stage in DDP, the second in FSDP, each on its rank alone."""
    first, second = stages_of(model, way)
    alone = [world.group.subgroup([rank]) for rank in range(world.size)][world.rank]
    stages: list[nn.Module | None] = [None, None]
    if world.rank == 0:
        stages[0] = ec.DDP(first, alone)
    else:
        stages[1] = ec.FSDP(second, alone, units=ec.units.whole())
    return ec.Pipeline(stages, world.group, microbatches=1, loss_fn=nn.functional.mse_loss)


WRAPS: dict[str, Callable[[ec.World, nn.Sequential, Way], nn.Module]] = {
    "DDP": lambda w, m, way: ec.DDP(way(m), w.group),
    "FSDP": lambda w, m, way: ec.FSDP(way(m), w.group, units=ec.units.by_type(nn.Linear)),
    "FSDP, flat": lambda w, m, way: ec.FSDP(
        way(m), w.group, units=ec.units.by_type(nn.Linear), use_orig_params=False
    ),
    "Pipeline": pipeline,
    "Pipeline of DDP and FSDP": wrapped_pipeline,
}


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    save = getattr(model, "whole_state_dict", model.state_dict)
    return dict(save())


def names_of_parameters(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def states_are_plain(world: ec.World, name: str) -> None:
    for way in WAYS:
        model = WRAPS[name](world, net(), way)
        plain = net().state_dict()
        assert same(whole(model), plain), (way, list(whole(model)))
        names = set(model.state_dict())
        assert names <= set(plain), (way, names)
        model.load_state_dict(net(1).state_dict(), strict=name != "Pipeline")
        assert same(whole(model), net(1).state_dict()), way
        if hasattr(model, "sharded_state_dict"):
            parts = model.sharded_state_dict()
            assert set(parts) <= set(plain), (way, list(parts))
            model.load_state_dict(plain)
            model.load_sharded_state_dict(parts)
            assert same(whole(model), net(1).state_dict()), way
        if "Pipeline" not in name and name != "FSDP, flat":
            assert names_of_parameters(model) == names_of_parameters(net()), way


def every_state_is_plain(world: ec.World) -> None:
    for name in WRAPS:
        states_are_plain(world, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPS)
def test_a_state_dict_has_the_names_of_the_plain_model_with(name):
    run_world("threads", states_are_plain, 2, (name,))


@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_a_state_dict_has_the_names_of_the_plain_model_over(kind):
    run_world(kind, every_state_is_plain, 2)


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose states differ by parameter, without a forward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = param.detach().clone()
    optimizer.step()
    return optimizer


def optimizers_are_plain(world: ec.World, name: str) -> None:
    plain = net()
    names = names_of_parameters(plain)
    for way in WAYS:
        model = WRAPS[name](world, net(), way)
        optimizer = stepped(model)
        state = model.optimizer_state_dict(optimizer)
        assert sorted(state["state"]) == sorted(names), (way, sorted(state["state"]))
        again = WRAPS[name](world, net(), nothing)
        other = torch.optim.AdamW(again.parameters(), lr=0.1)
        again.load_optimizer_state_dict(other, state)
        model.load_optimizer_state_dict(optimizer, again.optimizer_state_dict(other))
        found = model.optimizer_state_dict(optimizer)["state"]
        for key in names:
            assert torch.equal(found[key]["exp_avg"], state["state"][key]["exp_avg"]), (way, key)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WRAPS if name != "DDP"])
def test_an_optimizer_state_has_the_names_of_the_plain_model_with(name):
    run_world("threads", optimizers_are_plain, 2, (name,))


def saves_and_loads(world: ec.World, folder: str) -> None:
    for saver in WRAPS:
        for i, (way, other) in enumerate([(both, nothing), (nothing, both), (inside, outside)]):
            path = f"{folder}/{saver}-{i}"
            model = WRAPS[saver](world, net(1), way)
            optimizer = stepped(model)
            ec.save(path, model=model, optimizer=optimizer, step=1)
            expected = whole(model)
            for loader in WRAPS:
                found = WRAPS[loader](world, net(), other)
                ec.load(path, model=found, optimizer=stepped(found))
                assert same(whole(found), expected), (saver, loader, way, other)


@pytest.mark.slow
def test_a_checkpoint_goes_from_compiled_to_plain_and_back(tmp_path):
    run_world("threads", saves_and_loads, 2, (str(tmp_path),))


def test_a_copy_of_a_compiled_replica_has_plain_names_too():
    def main(world: ec.World) -> None:
        clone = copy.deepcopy(ec.DDP(both(net()), world.group))
        assert same(clone.state_dict(), net().state_dict())
        larger = nn.ModuleDict({"inner": clone})
        assert list(larger.state_dict()) == [f"inner.{key}" for key in net().state_dict()]
        larger.load_state_dict({f"inner.{k}": v for k, v in net(1).state_dict().items()})
        assert same(clone.state_dict(), net(1).state_dict())

    run_world("threads", main, 2)


def test_old_names_are_still_loaded():
    def main(world: ec.World) -> None:
        old = both(net(1)).state_dict()
        assert all(key.startswith("_orig_mod.") for key in old)
        for name in ("DDP", "FSDP", "Pipeline"):
            model = WRAPS[name](world, net(), both)
            model.load_state_dict(old, strict=name != "Pipeline")
            assert same(whole(model), net(1).state_dict()), name

    run_world("threads", main, 2)


def test_stages_that_were_cut_by_hand_have_the_names_of_a_sequential_of_them():
    def main(world: ec.World) -> None:
        plain = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 1))
        stages = [compiled(stage) for stage in copy.deepcopy(plain)]
        pipe = ec.Pipeline(stages, world.group, microbatches=1)
        assert list(pipe.whole_state_dict()) == list(plain.state_dict())
        pipe.load_state_dict(plain.state_dict())
        assert same(pipe.whole_state_dict(), plain.state_dict())

    run_world("threads", main, 2)
