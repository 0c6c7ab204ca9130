"""What ``no_sync`` keeps belongs to ``.grad``: it is dropped as in one process, and not read."""

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.errors import StateError
from echelon.observe.meters import tensor_bytes
from tests.fsdp.kinds import KINDS, model, wrapped

# What drops gradients ------------------------------------------------------------------------


def zero_model(one: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    one.zero_grad()


def zero_model_in_place(one: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    one.zero_grad(set_to_none=False)


def zero_optimizer(one: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def zero_in_place(one: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def drop_each(one: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in one.parameters():
        param.grad = None


def zero_data(one: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in one.parameters():
        param.grad.data.zero_()


def drop_every_other(one: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in of_first_layer(one):
        param.grad = None


def zero_every_other(one: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.optim.SGD(of_first_layer(one), lr=0.1, foreach=True).zero_grad(set_to_none=False)


def replace(one: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in one.parameters():
        param.grad = torch.ones_like(param)


def put_aside_and_back(one: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    kept = [param.grad for param in one.parameters()]
    one.zero_grad()
    for param, gradient in zip(one.parameters(), kept, strict=True):
        param.grad = gradient


def of_first_layer(one: nn.Module) -> list[nn.Parameter]:
    """One parameter of several that share a unit, or the only one of it."""
    return list(one.parameters())[:1]


DROPS = (
    zero_model,
    zero_model_in_place,
    zero_optimizer,
    zero_in_place,
    drop_each,
    zero_data,
    drop_every_other,
    zero_every_other,
    replace,
    put_aside_and_back,
)
PARTIAL = (drop_every_other, zero_every_other)  # of one parameter, which may be a flat one


def train(one: Any, rank: int, size: int, drop: Callable[..., None], reduced: bool) -> list[Tensor]:
    """Weights after steps of two kept backwards and a reduced one; ``drop`` comes after the first.

    With ``reduced``, another that was reduced comes before them.
    """
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1, foreach=True)
    x = torch.arange(32.0).view(8, 4).sin()[rank::size]
    for step in range(2):
        for k in range(not reduced, 4):
            is_kept = k in (1, 2) and isinstance(one, ec.FSDP)
            with one.no_sync() if is_kept else nullcontext():
                one(x + k + 4 * step).square().mean().backward()
            if k == 1:
                drop(one, optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
    return [value.clone() for value in one.state_dict().values()]


def drops(world: ec.World, name: str) -> None:
    for drop in DROPS:
        if drop in PARTIAL and "use_orig_params" in KINDS[name]:
            continue
        for reduced in (False, True):
            actual = train(wrapped(world, name), world.rank, world.size, drop, reduced)
            expected = train(model(), 0, 1, drop, reduced)
            at = f"{drop.__name__}, reduced={reduced}: "
            torch.testing.assert_close(actual, expected, msg=lambda text, at=at: at + text)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_what_no_sync_keeps_is_dropped_as_in_one_process(name: str) -> None:
    ec.run(drops, 4 if name == "hybrid" else 2, args=(name,))


def drops_a_few(world: ec.World, name: str) -> None:
    for drop in (zero_optimizer, zero_in_place, drop_every_other):
        actual = train(wrapped(world, name), world.rank, world.size, drop, True)
        torch.testing.assert_close(actual, train(model(), 0, 1, drop, True))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("flat", "threads"), ("some small units", "threads"), ("rows", "processes")],
)
def test_zero_grad_after_no_sync_drops_a_batch(name: str, kind: str) -> None:
    ec.run(drops_a_few, 2, kind, args=(name,))


# What needs values ---------------------------------------------------------------------------


def kept(world: ec.World, name: str = "some small units") -> ec.FSDP:
    one = wrapped(world, name)
    with one.no_sync():
        one(torch.ones(2, 4)).sum().backward()
    return one


USES: dict[str, Callable[[ec.FSDP, Tensor], object]] = {
    "scale": lambda one, grad: grad.mul_(0.5),
    "scale data": lambda one, grad: grad.data.mul_(0.5),
    "scale in a list": lambda one, grad: torch._foreach_mul_([torch.ones(2), grad], 0.5),
    "add": lambda one, grad: torch.ones(4, 4).add_(grad),
    "add to a parameter": lambda one, grad: next(one.parameters()) + grad,
    "read": lambda one, grad: grad.sum(),
    "copy": lambda one, grad: grad.clone(),
    "deep copy": lambda one, grad: copy.deepcopy(grad),
    "shard": lambda one, grad: ec.local_shard(grad),
    "array": lambda one, grad: grad.numpy(),
    "clip": lambda one, grad: nn.utils.clip_grad_norm_(one.parameters(), 1.0),
    "clip all": lambda one, grad: ec.clip_grad_norm_(one, 1.0),
    "clip values": lambda one, grad: nn.utils.clip_grad_value_(one.parameters(), 1.0),
    "unwrap": lambda one, grad: one.unwrap(),
    "step": lambda one, grad: torch.optim.AdamW(one.parameters()).step(),
}


def refuses(world: ec.World) -> None:
    for name in ("some small units", "replicated"):
        one = kept(world, name)
        before = [value.clone() for value in one.state_dict().values()]
        for use, call in USES.items():
            for param in one.parameters():
                with pytest.raises(StateError, match="are not reduced yet"):
                    call(one, param.grad)
                    pytest.fail(use)
        assert [*map(torch.equal, before, one.state_dict().values())] == [True] * 4
        one.sync_gradients()
        plain = model()
        plain(torch.ones(2, 4)).sum().backward()
        for param, expected in zip(one.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(param.grad * torch.ones(()), expected.grad)


def test_a_use_of_the_values_of_kept_gradients_is_refused_and_harms_nothing() -> None:
    ec.run(refuses, 2)


def shows_facts(world: ec.World) -> None:
    for name in ("flat", "rows", "replicated"):
        one = kept(world, name)
        for param, plain in zip(one.parameters(), model().parameters(), strict=True):
            assert param.grad.shape == plain.shape
            assert (param.grad.dtype, param.grad.device) == (plain.dtype, plain.device)
            assert "not reduced yet" in repr(param.grad)
        assert tensor_bytes(one)["gradients"] == sum(p.nbytes for p in model().parameters())


def test_kept_gradients_have_the_facts_of_whole_ones() -> None:
    ec.run(shows_facts, 2)


def takes_back(world: ec.World) -> None:
    one = kept(world)
    first = next(one.parameters())
    spent = first.grad
    with one.no_sync():
        one(torch.ones(2, 4)).sum().backward()
    first.grad = spent
    with pytest.raises(StateError, match="again after a later backward"):
        one.sync_gradients()


def test_a_kept_gradient_to_which_others_were_added_cannot_be_set_again() -> None:
    ec.run(takes_back, 2)


def frees(world: ec.World) -> None:
    one = wrapped(world, "flat")
    with one.no_sync():
        one(torch.ones(2, 4)).sum().backward()
    references = [weakref.ref(kept) for p in one.parameters() for kept in p.grad.unsharded]
    one.zero_grad()
    assert [reference() for reference in references] == [None] * 4
    one.sync_gradients()
    assert [param.grad for param in one.parameters()] == [None] * 4


def test_a_drop_frees_what_was_kept_and_nothing_is_reduced_by_hand() -> None:
    ec.run(frees, 2)


def accumulates_in_stages(world: ec.World) -> list[Tensor]:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)]
    plan = ec.Plan(pp=2, shard=2, microbatches=2, fsdp={"min_num_params": 0})
    loss = nn.functional.mse_loss
    pipeline = ec.parallelize(stages, plan, world, loss_fn=loss)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    rank = plan.data_rank(world)
    x = torch.arange(32.0).view(8, 4).sin()[rank::2]
    for k in range(4):
        pipeline.step(x + k, target=x[:, :2], finalize=k % 2 == 1)
        if k % 2:
            optimizer.step()
        else:
            with pytest.raises(StateError, match="are not reduced yet"):
                next(pipeline.parameters()).grad.mul_(0.5)
        optimizer.zero_grad(set_to_none=k == 0)
    return [value.clone() for value in pipeline.whole_state_dict().values()]


def test_zero_grad_between_the_steps_of_a_sharded_pipeline_drops_what_was_kept() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.arange(32.0).view(8, 4).sin()
    for k in (1, 3):
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x + k), x[:, :2]).backward()
        optimizer.step()
    for state in ec.run(accumulates_in_stages, 4):
        torch.testing.assert_close(state, list(plain.state_dict().values()))


def steps_with_closures(world: ec.World, strategy: ec.Strategy | None) -> list[float]:
    """The weights after a step whose closure reduces, and one whose closure does not."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(4, 4).double()
    x = torch.arange(8, dtype=torch.float64).view(2, 4)
    if strategy is not None:
        model = ec.FSDP(model, world.group, strategy=strategy, min_num_params=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        loss: Tensor = model(x).square().sum()
        loss.backward()
        return loss

    def unreduced() -> Tensor:
        with model.no_sync():
            return closure()

    unreduced() if isinstance(model, ec.FSDP) else closure()
    optimizer.step(closure)
    optimizer.zero_grad()
    if not isinstance(model, ec.FSDP):
        return [param.sum().item() for param in model.parameters()]
    with pytest.raises(ec.StateError, match=r"a step of AdamW .* not reduced yet"):
        optimizer.step(unreduced)
    with model.full_parameters():
        return [param.sum().item() for param in model.parameters()]


@pytest.mark.parametrize(
    "strategy", [ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP, ec.Strategy.NO_SHARD]
)
def test_a_step_takes_what_its_closure_has_reduced_and_refuses_what_it_has_not(
    strategy: ec.Strategy,
) -> None:
    (expected,) = ec.run(steps_with_closures, 1, args=(None,))
    for found in ec.run(steps_with_closures, 2, args=(strategy,)):
        assert found == pytest.approx(expected, rel=1e-12)
