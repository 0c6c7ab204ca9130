"""What other code, or forward itself, does to the parameters of FSDP is right or is refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

import echelon as ec
from echelon.errors import StateError
from tests import reference
from tests.reference import assert_states_close
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
    return reference.rows(rank, 2, 6)


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
            before = [ec.local_shard(param).data_ptr() for param in model.parameters()]
            assert_states_close(look(model), expected.state_dict())
            assert before == [ec.local_shard(param).data_ptr() for param in model.parameters()]
            for param in model.parameters():
                param.data = param.data.clone()  # and again, between forward and the next
            assert_states_close(look(model), expected.state_dict())


def trained(model: ec.FSDP) -> dict[str, Tensor]:
    model(rows(0)).sum().backward()
    model.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_values_given_to_parameters_as_other_memory_are_kept(kind: str) -> None:
    run_world(kind, vectors, 2)


def test_a_value_of_another_shape_than_the_whole_is_refused() -> None:
    def main(world: ec.World) -> None:
        param = shard(world).get_parameter("0.weight")
        for shape in ([7], [36], list(ec.local_shard(param).shape), [3, 6]):
            with pytest.raises(StateError, match=r"a value of .* for \.data of '0.weight'"):
                param.data = torch.ones(shape, dtype=torch.float64)

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
            assert_states_close(model.state_dict(), expected.state_dict())
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
        with pytest.raises(StateError, match=r"wrap it then|needs the whole tensor"):
            change(model.module[0])
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
    assert_states_close(mean.module.state_dict(), plain_mean.module.state_dict())
    raised = {name: value + 0.5 for name, value in build().state_dict().items()}
    assert_states_close(model.state_dict(), raised)


@pytest.mark.parametrize("kind", KINDS)
def test_averages_of_parts_are_averages_of_the_whole(kind: str) -> None:
    run_world(kind, averages, 2)


def test_norms_of_parameters_are_those_of_whole_ones_inside_full_parameters_and_outside() -> None:
    def main(world: ec.World) -> None:
        model, plain = shard(world), build()
        wanted = sum(param.norm() for param in plain.parameters())
        found = sum(param.norm() for param in model.parameters())
        torch.testing.assert_close(found, wanted)
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


# What forward writes into a parameter, or returns of it ------------------------------------------


class Standardised(nn.Linear):
    """Weight standardisation in place."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.sub_(self.weight.mean()).div_(self.weight.std())
        return super().forward(x)


class Replaced(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data / 2
        return super().forward(x)


class Lookup(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight[:2].detach()


class Table(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight


class Renormed(nn.Embedding):
    """Writes the rows that it looks up, as ``max_norm`` does, which is refused at wrapping."""

    def forward(self, index: Tensor) -> Tensor:
        with torch.no_grad():
            torch.embedding_renorm_(self.weight, index, 1.0, 2.0)
        return super().forward(index)


def embed() -> nn.Module:
    return nn.Sequential(Renormed(8, 4), nn.Linear(4, 4))


WRITING: dict[str, Callable[[], nn.Module]] = {
    "0.weight": embed,
    "1.weight": lambda: nn.Sequential(nn.Embedding(8, 4), Standardised(4, 4)),
    "1.weight'": lambda: nn.Sequential(nn.Embedding(8, 4), Replaced(4, 4)),
}
RETURNING = [
    lambda: nn.Sequential(nn.Embedding(8, 4), Lookup(4, 4)),
    lambda: nn.Sequential(nn.Embedding(8, 4), Table(4, 4)),
]
RULES = [ec.units.whole(), ec.units.by_type(nn.Linear)]


def refusals(world: ec.World) -> list[str]:
    said = []
    index = torch.arange(4) + world.rank
    for make in [*WRITING.values(), *RETURNING]:
        for rule in RULES:
            model = ec.FSDP(make(), world.group, units=rule, min_num_params=0)
            try:
                model(index).sum().backward()
            except ec.StateError as error:
                said.append(str(error))
            else:
                said.append("nothing")
            world.group.barrier()
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_that_writes_into_a_parameter_is_told_which(kind: str) -> None:
    for said in run_world(kind, refusals, 2):
        told = iter(said)
        for name in WRITING:
            for _ in RULES:
                assert re.search(f"wrote into parameter '{name.rstrip(chr(39))}'", next(told))
        for sentence in told:
            assert re.search(r"returned a view of its own parameter '\w+(\.\w+)*'", sentence)


def keep_outside(world: ec.World) -> float:
    """The ways that the message names."""
    torch.manual_seed(0)
    inner = embed()
    model = ec.FSDP(inner, world.group, ignored=[inner[0]], min_num_params=0)
    model(torch.arange(8)).sum().backward()
    assert model.state_dict()["0.weight"].norm(dim=1).max() <= 1.0 + 1e-6
    torch.manual_seed(0)
    model = ec.FSDP(nn.Linear(4, 4), world.group, min_num_params=0)
    with model.full_parameters(writeback=True), torch.no_grad():
        model.module.weight.copy_(F.normalize(model.module.weight))
    return float(model.state_dict()["weight"].norm(dim=1).max())


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_be_written_is_kept(kind: str) -> None:
    assert run_world(kind, keep_outside, 2) == pytest.approx([1.0, 1.0])


def train_inside(world: ec.World) -> tuple[list[float], float]:
    """A forward, an evaluation and a backward inside the block, and a write between them."""
    torch.manual_seed(0)
    rule = ec.units.by_type(nn.Linear)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = ec.FSDP(inner, world.group, units=rule, min_num_params=0)
    x = torch.full((1, 4), 1.0 + world.rank)
    with model.full_parameters(writeback=True):
        with torch.no_grad():
            inner[0].weight.fill_(2.0)
            inner[0].bias.zero_()
            inner[1].weight.fill_(3.0)
            model(x)
        loss = model(x).sum()
        assert inner[0].weight.shape == (4, 4)
        with pytest.raises(ec.StateError, match="after the block"):
            loss.backward(retain_graph=True)
    loss.backward()
    grads = world.group.all_gather_object(ec.local_shard(inner[0].weight.grad).tolist())
    return [v for part in grads for v in part], float(model.state_dict()["1.weight"].sum())


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_inside_full_parameters_is_that_of_what_was_written(kind: str) -> None:
    for grads, total in run_world(kind, train_inside, 2):
        assert grads == [4.5] * 16
        assert total == 12.0


def write_without_saying_so(world: ec.World) -> None:
    model = ec.FSDP(nn.Linear(4, 4), world.group, min_num_params=0)
    with model.full_parameters(), torch.no_grad():
        model.module.weight.zero_()


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_write_that_full_parameters_would_lose_is_refused(kind: str) -> None:
    with pytest.raises(ec.StateError, match="writeback=True"):
        run_world(kind, write_without_saying_so, 2)
