"""Ordinary functions of torch that take parameters are right on parts, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

import echelon as ec
from echelon.errors import StateError
from tests.worlds import KINDS, run_world

KINDS_OF_FSDP: tuple[dict[str, Any], ...] = (
    {},
    {"layout": "rows"},
    {"use_orig_params": False},
    {"precision": ec.MixedPrecision(compute=torch.float32)},
    {"min_num_params": 45},
)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 7)).double()


def rows(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 6, dtype=torch.float64, generator=generator)


def shard(world: ec.World, **options: Any) -> ec.FSDP:
    options = {"min_num_params": 0, "units": ec.units.by_type(nn.Linear), **options}
    return ec.FSDP(build(), world.group, **options)


def vectors(world: ec.World) -> None:
    for options in KINDS_OF_FSDP:
        for look in (lambda model: model.state_dict(), trained):
            model, expected = shard(world, **options), build()
            with torch.no_grad():
                for param in expected.parameters():
                    param.mul_(2).add_(1)
            vector = parameters_to_vector(model.parameters()).detach()
            vector_to_parameters(vector * 2 + 1, model.parameters())
            before = [param.data_ptr() for param in model.parameters()]
            for name, value in look(model).items():
                torch.testing.assert_close(value, expected.state_dict()[name], msg=str(options))
            assert before != [param.data_ptr() for param in model.parameters()]
            for param in model.parameters():
                param.data = param.data.clone()  # and again, between forward and the next
            for name, value in look(model).items():
                torch.testing.assert_close(value, expected.state_dict()[name])


def trained(model: ec.FSDP) -> dict[str, Tensor]:
    model(rows(0)).sum().backward()
    model.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_values_given_to_parameters_as_other_memory_are_kept(kind: str) -> None:
    run_world(kind, vectors, 2)


def test_a_value_that_is_no_part_is_refused() -> None:
    def main(world: ec.World) -> None:
        model = shard(world)
        model.get_parameter("0.weight").data = torch.ones(6, 6, dtype=torch.float64)
        for look in (lambda: model(rows(0)), model.state_dict, model.sharded_state_dict):
            with pytest.raises(StateError, match=r"'0.weight' was given a value of \[6, 6\]"):
                look()

    ec.run(main, 2)


def initialises(world: ec.World) -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_uniform_(module.weight, a=1.0)
            nn.init.orthogonal_(module.weight)
            nn.init.constant_(module.bias, 0.5)

    for options in KINDS_OF_FSDP:
        expected, model = build(), shard(world, **options)
        for one in (expected, model):
            torch.manual_seed(7)
            assert one.apply(fill) is one
        if "precision" not in options:  # whole parameters have the dtype of compute
            for name, value in model.state_dict().items():
                torch.testing.assert_close(value, expected.state_dict()[name])
        torch.manual_seed(world.rank)  # also where ranks draw otherwise, they end up equal
        model.apply(fill)
        state = [*model.state_dict().values()]
        for theirs in world.group.all_gather_object([value.tolist() for value in state]):
            assert theirs == [value.tolist() for value in state]
        model(rows(world.rank)).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_apply_initialises_whole_parameters(kind: str) -> None:
    run_world(kind, initialises, 2)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "global prune": lambda layer: prune.global_unstructured(
        [(layer, "weight")], prune.L1Unstructured, amount=0.5
    ),
}


def changes(world: ec.World) -> None:
    for name, change in CHANGES.items():
        model = shard(world)
        change(model.module[0])
        with pytest.raises(StateError, match="change the model first and wrap it then"):
            model(rows(world.rank))
        plain, before = build(), build()
        for one in (plain, before):
            torch.manual_seed(0)
            change(one[0])
        model = ec.FSDP(before, world.group, units=ec.units.by_type(nn.Linear), min_num_params=0)
        torch.testing.assert_close(model(rows(0)), plain(rows(0)), msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_pruned_and_normalised_layers_are_wrapped_and_not_changed_afterwards(kind: str) -> None:
    run_world(kind, changes, 2)


def averages(world: ec.World) -> None:
    model, plain = shard(world), build()
    mean, plain_mean = AveragedModel(model), AveragedModel(plain)
    shadow = [param.detach().clone() for param in model.parameters()]  # as EMA helpers keep it
    for one, average in ((model, mean), (plain, plain_mean)):
        for _ in range(2):
            with torch.no_grad():
                for param in one.parameters():
                    param.add_(1)
            average.update_parameters(one)
    with torch.no_grad():
        for value, param in zip(shadow, model.parameters(), strict=True):
            value.lerp_(param, 0.25)
            param.copy_(value)
    for name, value in mean.module.state_dict().items():
        torch.testing.assert_close(value, plain_mean.module.state_dict()[name])
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, build().state_dict()[name] + 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_averages_of_parts_are_averages_of_the_whole(kind: str) -> None:
    run_world(kind, averages, 2)


def test_norms_of_parameters_are_those_of_parts_but_inside_full_parameters() -> None:
    def main(world: ec.World) -> None:
        model, plain = shard(world), build()
        wanted = sum(param.norm() for param in plain.parameters())
        assert sum(param.norm() for param in model.parameters()) < wanted
        with model.full_parameters():
            torch.testing.assert_close(sum(p.norm() for p in model.parameters()), wanted)

    ec.run(main, 2)


def test_the_clipping_of_accelerate_is_that_of_one_process() -> None:
    accelerate = pytest.importorskip("accelerate")

    def main(world: ec.World) -> None:
        model, plain = shard(world), build()
        model(rows(world.rank)).square().mean().backward()
        plain(torch.cat([rows(0), rows(1)])).square().mean().backward()
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        found = Idle().clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(found, wanted)

    class Idle(accelerate.Accelerator):  # type: ignore[misc, name-defined]
        """An accelerator that has found one process."""

        distributed_type = accelerate.DistributedType.MULTI_CPU

        def __init__(self) -> None:
            pass

        def unscale_gradients(self, optimizer: object = None) -> None:
            """Nothing is scaled."""

    ec.run(main, 2)
