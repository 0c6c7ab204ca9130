"""A parameter that several stages have is one, also where stages are replicated or sharded."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from tests.pipeline.models import each, rows_of, train_beside
from tests.pipeline.split_models import loss_fn
from tests.pipeline.tied_stages import CLOSE, ROWS, plan, tied_stages, tokens_of
from tests.worlds import run_world

OFTEN = {"reduce_every": "microbatch"}


def trains(world: World, plan: ec.Plan) -> None:
    plain, pipe = tied_stages(plan, world)
    batches = [tokens_of(step, ROWS * plan.data_size) for step in range(4)]
    train_beside(world, plan, pipe, plain, batches, loss_fn)


PLANS: dict[str, list[ec.Plan]] = {
    "threads": [
        plan("zb-v", dp=2),  # embedding and head on one rank
        plan("zb-v", shard=2, fsdp={"min_num_params": 0}),
        plan("zb-h1", shard=2, pipeline={"recompute": True, **OFTEN}),
        plan("1f1b", shard=2, fsdp={"use_orig_params": False, "min_num_params": 0}),
    ],
    "processes": [plan("zb-v", shard=2), plan("1f1b", shard=2)],
    "gloo": [plan("1f1b", shard=2, pipeline=OFTEN), plan("zb-v", shard=2), plan("zb-h1", dp=2)],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", PLANS)
def test_stages_that_share_a_parameter_train_as_one_process_does(world: str) -> None:
    run_world(world, each, 4, ([partial(trains, plan=one) for one in PLANS[world]],))


@pytest.mark.slow
def test_a_shared_parameter_on_a_mesh_of_three_axes_trains_as_in_one_process() -> None:
    run_world("threads", trains, 8, (plan("zb-v", dp=2, shard=2),))


def test_gradients_that_are_given_up_before_they_are_complete_are_gone() -> None:
    def main(world: World) -> None:
        plain, pipe = tied_stages(plan("1f1b"), world)
        (x, y), (other, target) = tokens_of(0, ROWS), tokens_of(1, ROWS)
        for by, of in ((x, y), (other, target)):
            pipe.step(by, target=of)
            pipe.step(other, target=target, finalize=False)
            pipe.zero_grad(set_to_none=by is x)
            plain.zero_grad()
            pipe.step(by, target=of)
            loss_fn(plain(by), of).backward()
            check_gradients(pipe, plain)

    ec.run(main, 2)


def check_gradients(pipe: ec.Pipeline, plain: nn.Module) -> None:
    """Compare those of this rank's stages with those of the plain model."""
    named = dict(plain.named_parameters(remove_duplicate=False))
    for name, param in pipe.named_parameters():
        torch.testing.assert_close(param.grad, named[name].grad, **CLOSE, msg=name)


def add_penalty(module: nn.Module) -> None:
    torch.stack([param.square().sum() for param in module.parameters()]).sum().backward()


def scale(module: nn.Module) -> None:
    for param in module.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


def decay(module: nn.Module) -> None:
    for param in module.parameters():
        if param.grad is not None:
            param.grad.add_(param.detach(), alpha=0.1)


def clamp(module: nn.Module) -> None:
    for param in module.parameters():
        if param.grad is not None:
            param.grad.clamp_(-1e-2, 1e-2)


def clear(module: nn.Module) -> None:
    module.zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    ("plan", "edits"),
    [
        (plan("1f1b"), [add_penalty, scale, decay, clamp, clear]),
        (plan("zb-v"), [add_penalty, scale, decay, clamp, clear]),
        (plan("zb-h1", dp=2), [add_penalty, scale, decay]),
        (plan("1f1b", dp=2, pipeline=OFTEN), [add_penalty, scale, decay, clamp, clear]),
    ],
    ids=["1f1b", "zb-v", "zb-h1, dp=2", "1f1b, dp=2, often"],
)
def test_what_users_do_to_gradients_between_steps_counts_once_for_a_shared_parameter(
    plan: ec.Plan, edits: list[Callable[[nn.Module], None]]
) -> None:
    def main(world: World) -> None:
        for edit in edits:
            plain, pipe = tied_stages(plan, world)
            for step, finalize in enumerate((False, False, True)):
                x, y = tokens_of(step, ROWS * plan.data_size)
                rows = rows_of(world, plan, len(x))
                for module in (plain, pipe):
                    edit(module)
                pipe.step(x[rows], target=y[rows], finalize=finalize)
                loss_fn(plain(x), y).backward()
            for module in (plain, pipe):
                edit(module)
            check_gradients(pipe, plain)

    ec.run(main, plan.pp * plan.dp)


def train_in_hooks(module: nn.Module, calls: dict[nn.Parameter, int]) -> None:
    """Clamp each gradient, have an optimizer step, and drop the gradient; count the calls."""
    for param in module.parameters():
        optimizer = torch.optim.Adam([param], 0.05, foreach=False)

        def hook(param: nn.Parameter, optimizer: torch.optim.Optimizer = optimizer) -> None:
            assert param.grad is not None
            calls[param] += 1
            param.grad.clamp_(-1e-2, 1e-2)
            optimizer.step()
            param.grad = None

        calls[param] = 0
        param.register_post_accumulate_grad_hook(hook)


FLAT = {"use_orig_params": False, "min_num_params": 0}


@pytest.mark.parametrize(
    "plan",
    [
        plan("1f1b"),
        plan("zb-v"),
        plan("1f1b", dp=2),
        plan("zb-h1", dp=2),
        plan("zb-v", dp=2, pipeline=OFTEN),
        plan("1f1b", dp=2, pipeline=OFTEN),
        plan("1f1b", shard=2, fsdp={"min_num_params": 0}),
        plan("1f1b", shard=2, fsdp=FLAT),
        plan("zb-h1", shard=2, pipeline={"recompute": True, **OFTEN}),
    ],
    ids=str,
)
def test_hooks_run_once_for_a_complete_gradient_of_a_shared_or_another_parameter(
    plan: ec.Plan,
) -> None:
    def main(world: World) -> None:
        plain, pipe = tied_stages(plan, world)
        calls: dict[nn.Parameter, int] = {}
        train_in_hooks(pipe, calls)
        train_in_hooks(plain, {})
        batches = [tokens_of(step, ROWS * plan.data_size) for step in range(3)]
        for (x, y), finalize in zip(batches, (False, True, True), strict=True):
            rows = rows_of(world, plan, len(x))
            pipe.step(x[rows], target=y[rows], finalize=finalize)
        assert set(calls.values()) == {2}
        torch.stack([loss_fn(plain(x), y) for x, y in batches[:2]]).sum().backward()
        loss_fn(plain(batches[2][0]), batches[2][1]).backward()
        whole = plain.state_dict()
        for name, value in pipe.whole_state_dict().items():
            torch.testing.assert_close(value, whole[name], **CLOSE, msg=name)

    ec.run(main, plan.pp * plan.data_size)


def halve(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


@pytest.mark.parametrize(
    "plan", [plan("1f1b"), plan("zb-v", dp=2), plan("1f1b", dp=2, pipeline=OFTEN)], ids=str
)
def test_hooks_run_for_a_penalty_between_steps_and_not_for_a_frozen_parameter(
    plan: ec.Plan,
) -> None:
    def main(world: World) -> None:
        plain, pipe = tied_stages(plan, world)
        for param in (*plain.parameters(), *pipe.parameters()):
            param.register_post_accumulate_grad_hook(halve)
        for step in range(3):
            x, y = tokens_of(step, ROWS * plan.data_size)
            rows = rows_of(world, plan, len(x))
            for param in (*plain.parameters(), *pipe.parameters()):
                param.requires_grad_(param.dim() < 2 or step != 1)
            pipe.step(x[rows], target=y[rows])
            loss_fn(plain(x), y).backward()
            check_gradients(pipe, plain)
            for module in (plain, pipe):
                add_penalty(module)
            check_gradients(pipe, plain)

    ec.run(main, plan.pp * plan.dp)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("wrap", [ec.DDP, partial(ec.FSDP, min_num_params=0)], ids=["DDP", "FSDP"])
def test_hooks_of_a_parameter_that_a_wrapper_ignores_run_once(
    wrap: Callable[..., nn.Module], schedule: str
) -> None:
    def main(world: World) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(3, 3, bias=False).double() for _ in range(2)]
        plain = copy.deepcopy(nn.Sequential(*layers))
        mesh = world.mesh(pp=2, dp=2)
        own, seen = layers[mesh["pp"].rank].weight, list[Tensor]()
        own.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        stages = [wrap(nn.Sequential(m), mesh["dp"], ignored=[m.weight]) for m in layers]
        pipe = ec.Pipeline(
            stages, mesh["pp"], microbatches=2, loss_fn=nn.MSELoss(), schedule=schedule
        )
        x = torch.arange(12.0, dtype=torch.float64).view(4, 3)
        pipe.step(x, target=x.flip(0))
        nn.MSELoss()(plain(x), x.flip(0)).backward()
        (gradient,) = seen
        torch.testing.assert_close(gradient, plain[mesh["pp"].rank].weight.grad, **CLOSE)

    ec.run(main, 4)


@pytest.mark.parametrize(
    ("plan", "where"), [(plan("1f1b"), "pp"), (plan("zb-v", dp=2), "dp")], ids=["owner", "replica"]
)
def test_a_shared_parameter_that_is_frozen_on_some_ranks_only_is_refused(
    plan: ec.Plan, where: str
) -> None:
    def main(world: World) -> None:
        _, pipe = tied_stages(plan, world)
        rank = world.rank if where == "pp" else plan.data_rank(world)
        for name, param in pipe.named_parameters():
            if name.endswith(("embed.weight", "head.weight")):
                param.requires_grad_(rank == 0)
        x, y = tokens_of(0, ROWS)
        pipe.step(x, target=y)

    with pytest.raises(ec.ModelMismatch, match=r"stages share:\n.*0: trained\n.*1: frozen"):
        ec.run(main, plan.pp * plan.dp)


@pytest.mark.parametrize("plan", [plan("1f1b", dp=2), plan("1f1b", shard=2)], ids=str)
def test_the_norm_of_gradients_that_replicas_have_not_averaged_is_refused(plan: ec.Plan) -> None:
    def main(world: World) -> None:
        _, pipe = tied_stages(plan, world)
        x, y = tokens_of(plan.data_rank(world), ROWS)
        pipe.step(x, target=y, finalize=False)
        with pytest.raises(ec.StateError, match="after the step that completes them"):
            ec.clip_grad_norm_(pipe, 0.1)
        pipe.step(x, target=y)
        norms = world.group.all_gather_object(ec.clip_grad_norm_(pipe, 0.1).item())
        assert len(set(norms)) == 1

    ec.run(main, 4)
