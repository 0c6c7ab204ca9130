"""What torch and its ecosystem ask of gradients is answered for the whole model, or refused."""

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.errors import StateError, UnsupportedError
from echelon.modules.sharded_tensor import ShardedTensor
from tests import reference
from tests.worlds import KINDS, run_world

RANKS = 3
CLOSE = {"rtol": 1e-11, "atol": 1e-13}
ORDERS = (2.0, 1.0, 3.0, math.inf)
SHARDINGS: dict[str, dict[str, Any]] = {
    "by element": {"min_num_params": 0},
    "by rows": {"min_num_params": 0, "layout": "rows"},
    "small units whole": {"min_num_params": 40},
    "flat parameters": {"min_num_params": 0, "use_orig_params": False},
    "gradients only": {"min_num_params": 0, "strategy": ec.Strategy.SHARD_GRAD_OP},
    "nothing": {"min_num_params": 0, "strategy": ec.Strategy.NO_SHARD},
}
Total = Callable[[list[nn.Parameter], float], Tensor]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 1)).double()


def rows(rank: int) -> Tensor:
    return reference.rows(rank, 4, 6)


def plain(ranks: int = RANKS) -> nn.Sequential:
    """The model of one process after a backward of all batches."""
    model = build()
    model(torch.cat([rows(rank) for rank in range(ranks)])).square().mean().backward()
    return model


def sharded(world: ec.World, **options: Any) -> ec.FSDP:
    model = ec.FSDP(build(), world.group, units=ec.units.by_type(nn.Linear), **options)
    model(rows(world.rank)).square().mean().backward()
    return model


def clipped(params: list[nn.Parameter], order: float) -> Tensor:
    return nn.utils.clip_grad_norm_(params, 0.01, order)


def clipped_foreach(params: list[nn.Parameter], order: float) -> Tensor:
    return nn.utils.clip_grad_norm_(params, 0.01, order, foreach=True)


def clipped_in_two_calls(params: list[nn.Parameter], order: float) -> Tensor:
    total = nn.utils.get_total_norm([param.grad for param in params], order)
    nn.utils.clip_grads_with_norm_(params, 0.01, total)
    return total


def clipped_by_hand(params: list[nn.Parameter], order: float) -> Tensor:
    norms = [torch.norm(param.grad.detach(), order).to("cpu") for param in params]
    total = torch.norm(torch.stack(norms), order)
    for param in params:
        param.grad.mul_((0.01 / (total + 1e-6)).clamp(max=1.0))
    return total


def clipped_after_scaling(params: list[nn.Parameter], order: float) -> Tensor:
    for param in params:
        param.grad = param.grad.clone() * 2 / 2
    return clipped(params, order)


TOTALS: tuple[Total, ...] = (
    clipped,
    clipped_foreach,
    clipped_in_two_calls,
    clipped_by_hand,
    clipped_after_scaling,
)


def resetting(model: nn.Module) -> Callable[[], None]:
    """What gives the gradients back that there are now."""
    found = [(param, param.grad, param.grad.clone()) for param in model.parameters()]

    def reset() -> None:
        for param, grad, values in found:
            param.grad = grad
            grad.copy_(values)

    return reset


def check_parts(model: ec.FSDP, world: ec.World, expected: nn.Module) -> None:
    for name, param in model.named_parameters():
        info = model.shard_info(name)[world.rank]
        whole = expected.get_parameter(name).grad.flatten()
        part = whole[info.start : info.start + info.size]
        torch.testing.assert_close(ec.local_shard(param.grad).flatten(), part, **CLOSE)


def check_all_totals(world: ec.World) -> None:
    for name, options in SHARDINGS.items():
        model, expected = sharded(world, **options), plain(world.size)
        reset, reset_expected = resetting(model), resetting(expected)
        for total in TOTALS:
            for order in ORDERS if total is clipped else (2.0, math.inf):
                wanted = clipped([*expected.parameters()], order)
                found = total([*model.parameters()], order)
                assert type(found) is Tensor
                torch.testing.assert_close(found, wanted, **CLOSE, msg=f"{name}, {order}, {total}")
                if model.get_parameter("0.weight").grad is not None:  # and no flat one has it
                    check_parts(model, world, expected)
                reset()
                reset_expected()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_torchs_own_clipping_of_a_sharded_model_is_that_of_one_process(kind: str) -> None:
    run_world(kind, check_all_totals, RANKS)


def check_each_norm(world: ec.World) -> None:
    model, expected = sharded(world, min_num_params=0), plain(world.size)
    for name, param in model.named_parameters():
        whole = expected.get_parameter(name).grad
        for norm in (Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm):
            torch.testing.assert_close(norm(param.grad), norm(whole), **CLOSE)
        torch.testing.assert_close(param.grad.data.float().norm(), whole.float().norm())


@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_of_one_gradient_is_that_of_the_whole_gradient(kind: str) -> None:
    run_world(kind, check_each_norm, RANKS)


def test_a_norm_of_rows_of_a_shard_is_refused() -> None:
    def main(world: ec.World) -> None:
        grad = sharded(world, min_num_params=0).get_parameter("2.weight").grad
        with pytest.raises(UnsupportedError, match=r"dim=0.*no matrix of the model"):
            grad.norm(dim=0)
        with pytest.raises(UnsupportedError, match="ord=2"):
            torch.linalg.norm(grad, 2)
        model = sharded(world, min_num_params=0, layout="rows")
        grad, whole = model.get_parameter("2.weight").grad, plain(2).get_parameter("2.weight").grad
        info = model.shard_info("2.weight")[world.rank]
        of_rows = whole.norm(dim=-1)[info.start // 7 : (info.start + info.size) // 7]
        torch.testing.assert_close(ec.local_shard(grad.norm(dim=-1)), of_rows, **CLOSE)
        with pytest.raises(UnsupportedError, match="dim=0"):
            torch.linalg.vector_norm(x=grad, dim=0)

    ec.run(main, 2)


def test_a_model_around_a_sharded_one_is_clipped_by_the_norm_of_both() -> None:
    def main(world: ec.World) -> None:
        expected = plain(world.size)
        inner = build()
        model = nn.Sequential(ec.FSDP(inner[:3], world.group, min_num_params=0), inner[3])
        model(rows(world.rank)).square().mean().backward()
        for param in model[1].parameters():
            world.group.all_reduce(param.grad, "mean")
        wanted = nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
        torch.testing.assert_close(ec.clip_grad_norm_(model, 0.01), wanted, **CLOSE)
        torch.testing.assert_close(model[1].weight.grad, expected[3].weight.grad, **CLOSE)

    ec.run(main, 2)


def test_clipping_by_value_and_optimizers_work_on_shards() -> None:
    makers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda params: torch.optim.AdamW(params, lr=0.1),
        lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
        lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
        lambda params: torch.optim.Adagrad(params, lr=0.1, weight_decay=0.1),
        lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9),
    ]

    def main(world: ec.World) -> None:
        for make in makers:
            model, expected = sharded(world, min_num_params=0), plain(world.size)
            for one in (model, expected):
                nn.utils.clip_grad_value_(one.parameters(), 0.01)
                optimizer = make(one.parameters())
                optimizer.step()
                if one is model:
                    states = [v for s in optimizer.state.values() for v in s.values()]
                    assert {type(v) for v in states if v is not None} == {Tensor}
            with model.full_parameters():
                for name, param in expected.named_parameters():
                    torch.testing.assert_close(model.get_parameter(name), param, **CLOSE)

    ec.run(main, 2)


def test_a_sharded_gradient_is_copied_as_one_and_not_saved() -> None:
    def main(world: ec.World) -> None:
        grad = sharded(world, min_num_params=0).get_parameter("0.weight").grad
        assert isinstance(grad, ShardedTensor)
        twin = copy.deepcopy(grad)
        assert isinstance(twin, ShardedTensor)
        assert torch.equal(twin, grad)
        assert ec.local_shard(twin).data_ptr() != ec.local_shard(grad).data_ptr()
        with pytest.raises(StateError, match=r"'0\.weight' of unit .*model\.state_dict\(\)"):
            torch.save(grad, io.BytesIO())

    ec.run(main, 2)


JOINS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "cat": lambda gradients: torch.cat([gradient.view(-1) for gradient in gradients]),
    "hstack": lambda gradients: torch.hstack([gradient.ravel() for gradient in gradients]),
    "stack": lambda gradients: torch.stack([*gradients[2:3], *gradients[2:3]]),
    "vector": lambda gradients: nn.utils.parameters_to_vector(gradients),
}


def check_joined(world: ec.World) -> None:
    expected = [param.grad for param in plain(world.size).parameters()]
    for name, options in SHARDINGS.items():
        model = sharded(world, **options)
        gradients = [param.grad for param in model.parameters()]
        for how, join in JOINS.items():
            if how == "stack" and name == "flat parameters":
                continue  # of which there are other ones
            joined = join(gradients)
            torch.testing.assert_close(joined.norm(), join(expected).norm(), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_of_gradients_in_one_tensor_is_that_of_whole_ones(kind: str) -> None:
    run_world(kind, check_joined, RANKS)


def staged(world: ec.World, text: str) -> ec.Pipeline:
    """A pipeline of two stages after a step, under a plan that is written so."""
    options = {"fsdp": {"min_num_params": 0}} if "shard" in text else {}
    plan = ec.Plan.parse(text, microbatches=2, **options)
    layers = [nn.Sequential(*build()[:2]), nn.Sequential(*build()[2:])]
    units = ec.units.by_type(nn.Linear) if plan.shard > 1 else None
    model = ec.parallelize(layers, plan, world, loss_fn=mean_square, units=units)
    assert isinstance(model, ec.Pipeline)
    model.step(rows(0), target=rows(0))
    return model


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def check_stages(world: ec.World, text: str) -> None:
    model = staged(world, text)
    before = [param.grad.clone() for param in model.parameters()]
    with pytest.raises(UnsupportedError, match="only those of its stages"):
        torch.cat([param.grad.view(-1) for param in model.parameters()]).norm()
    for total in TOTALS:
        with pytest.raises(UnsupportedError, match=r"ec\.clip_grad_norm_\(model, max_norm\)"):
            total([*model.parameters()], 2.0)
    for param, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.grad, grad)
    expected = build()
    expected(rows(0)).square().mean().backward()
    wanted = nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
    torch.testing.assert_close(ec.clip_grad_norm_(model, 0.01), wanted, **CLOSE)
    torch.optim.AdamW(model.parameters()).step()
    model.step(rows(1), target=rows(1))


@pytest.mark.parametrize("text", ["pp=2", "pp=2,dp=2", "pp=2,shard=2"])
def test_torchs_own_clipping_of_stages_is_refused_and_names_ours(text: str) -> None:
    ec.run(check_stages, ec.Plan.parse(text, microbatches=2).num_ranks, args=(text,))


@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_torchs_own_clipping_of_stages_is_refused_in_every_world(kind: str) -> None:
    run_world(kind, check_stages, 2, args=("pp=2",))
