"""Parameters that are frozen between steps, as in GANs, and models that are wholly frozen."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from tests import reference
from tests.reference import assert_states_close, assert_states_equal, train_alone
from tests.worlds import KINDS, run_world

MICROBATCHES = 2


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]
    return nn.Sequential(*layers).double()


def freeze(model: nn.Module, step: int) -> None:
    """Another choice in each step: a layer, one weight, all but a bias, nothing, a layer twice."""
    choices = [{"0"}, {"2.weight"}, {"0", "2", "4.weight"}, set(), {"4"}, {"4"}, {"0", "4"}]
    frozen = choices[step % len(choices)]
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen and name.split(".")[0] not in frozen)


def rows(step: int, size: int) -> tuple[Tensor, ...]:
    """Inputs and targets of all ranks."""
    return reference.rows(step, 4 * size, 6).split([4, 2], dim=1)


def plain_weights(steps: int, size: int) -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def losses(step: int) -> Iterator[Tensor]:
        freeze(model, step)
        x, y = rows(step, size)
        yield nn.functional.mse_loss(model(x), y)

    return train_alone(model, optimizer, steps, losses)


Wrap = Callable[[nn.Module, ec.Group], nn.Module]
WRAPS: dict[str, Wrap] = {
    "overlap": lambda m, g: ec.DDP(m, g, bucket_bytes=200, first_bucket_bytes=100),
    "one bucket": ec.DDP,
    "manual": lambda m, g: ec.DDP(m, g, sync="manual", bucket_bytes=200),
    "FSDP": lambda m, g: ec.FSDP(m, g, units=ec.units.by_type(nn.Linear)),
    "FSDP by rows": lambda m, g: ec.FSDP(m, g, units=ec.units.whole(), layout="rows"),
}


def trains_as_one_process(world: ec.World, name: str, steps: int) -> None:
    module = net()
    model = WRAPS[name](module, world.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        freeze(module, step)
        x, y = (t.chunk(world.size)[world.rank] for t in rows(step, world.size))
        nn.functional.mse_loss(model(x), y).backward()
        if name == "manual":
            model.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()
    # Sums over ranks are taken in another order than over one batch.
    assert_states_close(model.state_dict(), plain_weights(steps, world.size), rtol=0, atol=1e-12)


def all_train_as_one_process(world: ec.World) -> None:
    for name in WRAPS:
        trains_as_one_process(world, name, 9)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", WRAPS)
def test_weights_are_those_of_one_process_with(name, ranks):
    run_world("threads", trains_as_one_process, ranks, (name, 16))


@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_weights_are_those_of_one_process_over(kind):
    run_world(kind, all_train_as_one_process, 2)


def freezes_flat_parameters(world: ec.World) -> None:
    states = []
    for size in (world.size, 1):  # the last one on this process, with the batches of all
        model = net()
        if size > 1:
            options = {"use_orig_params": False, "min_num_params": 0}
            model = ec.FSDP(model, world.group, units=ec.units.by_type(nn.Linear), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(6):
            model.requires_grad_(step != 2)
            frozen = [p for name, p in model.named_parameters() if name.startswith(f"{step % 3}.")]
            for param in frozen:
                param.requires_grad_(False)
            x, y = (t.chunk(size)[world.rank % size] for t in rows(step, world.size))
            loss = nn.functional.mse_loss(model(x.clone().requires_grad_()), y)
            loss.backward()
            assert all(param.grad is None for param in frozen)
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    assert_states_close(*states, rtol=0, atol=1e-12)
    model = ec.FSDP(net(), world.group, use_orig_params=False).requires_grad_(False)
    assert not any(param.requires_grad for param in model.unwrap().parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_flat_parameters_are_frozen_and_thawed_over(kind):
    run_world(kind, freezes_flat_parameters, 2)


def freezes_a_part_of_a_flat_parameter(world: ec.World) -> None:
    model = ec.FSDP(net(), world.group, use_orig_params=False)
    model.module[0].bias.requires_grad_(False)
    with pytest.raises(ec.StateError, match=r"parameter '0.bias' was frozen, and is in a flat"):
        model(rows(0, 1)[0])
    model.module.requires_grad_(False)
    x = rows(0, 1)[0].requires_grad_()
    model(x).sum().backward()
    assert all(param.grad is None for param in model.parameters())


def test_a_part_of_a_flat_parameter_is_not_frozen_alone():
    run_world("threads", freezes_a_part_of_a_flat_parameter, 2)


SHARED = ({"dp": 2}, {"shard": 2})
PLANS = [
    *(({"pp": 2, **more}, schedule, {}) for more in ({}, *SHARED) for schedule in ("1f1b", "zb")),
    *(({"pp": 2, **more}, "1f1b", {"reduce_every": "microbatch"}) for more in SHARED),
]


def pipeline_of(
    world: ec.World, module: nn.Module, plan: dict[str, int], schedule: str, options: dict[str, str]
) -> nn.Module:
    wanted = ec.Plan(microbatches=MICROBATCHES, schedule=schedule, pipeline=options, **plan)
    return ec.parallelize(module, wanted, world, loss_fn=nn.functional.mse_loss)


def pipeline_trains_as_one_process(
    world: ec.World, plan: dict[str, int], schedule: str, options: dict[str, str]
) -> None:
    module = net()
    pipe = pipeline_of(world, module, plan, schedule, options)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    replicas = world.size // plan["pp"]
    for step in range(9):
        freeze(module, step)  # also the stages of other ranks
        x, y = (t.chunk(replicas)[world.rank % replicas] for t in rows(step, replicas))
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
    assert_states_close(pipe.whole_state_dict(), plain_weights(9, replicas), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "schedule", "options"), PLANS)
def test_a_pipeline_has_the_weights_of_one_process(plan, schedule, options):
    ranks = plan["pp"] * plan.get("dp", 1) * plan.get("shard", 1)
    run_world("threads", pipeline_trains_as_one_process, ranks, (plan, schedule, options))


def one_replica_freezes_its_stage(world: ec.World) -> None:
    module = net()
    pipe = pipeline_of(world, module, {"pp": 2, "dp": 2}, "1f1b", {})
    for step in range(3):
        if step == 1 and world.rank == 1:
            module.requires_grad_(False)
        x, y = rows(step, 1)
        pipe.step(x, target=y)


def test_a_replica_that_freezes_a_whole_stage_is_named():
    with pytest.raises(ec.ModelMismatch) as caught:
        run_world("threads", one_replica_freezes_its_stage, 4)
    assert "parameter '0.weight':\n  rank 0: trained\n  rank 1: frozen" in str(caught.value)


def differs(world: ec.World, name: str) -> str:
    module = net()
    model = WRAPS[name](module, world.group)
    for step in range(3):
        if step == 1 and world.rank == 1:
            module[2].weight.requires_grad_(False)
        x, y = (t.chunk(world.size)[world.rank] for t in rows(step, world.size))
        try:
            nn.functional.mse_loss(model(x), y).backward()
            if name == "manual":
                model.sync_gradients()
        except ec.ModelMismatch as error:
            return f"step {step}: {error}"
        model.zero_grad()
    return "no error"


def all_differ(world: ec.World) -> list[str]:
    return [differs(world, name) for name in WRAPS]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_freeze_different_parameters_are_named_with_the_parameter_over(kind):
    for texts in run_world(kind, all_differ, 3):
        for text in texts:
            assert "step 1" in text
            assert "whether they train parameter '2.weight'" in text
            assert "rank 0: trained\n  rank 1: frozen   <-- differs\n  rank 2: trained" in text


def replicas_differ(world: ec.World) -> str:
    module = net()
    mesh = world.mesh(replicate=2, shard=2)
    rule = ec.units.by_type(nn.Linear)
    strategy = ec.Strategy.HYBRID_SHARD
    shard, replicate = mesh["shard"], mesh["replicate"]
    model = ec.FSDP(module, shard, strategy=strategy, replicate=replicate, units=rule)
    for step in range(3):
        module[4].requires_grad_(step == 0)  # on all ranks alike
        if step == 2:
            module[0].bias.requires_grad_(world.rank != 3)
        try:
            model(rows(step, 1)[0]).sum().backward()
        except ec.ModelMismatch as error:
            return f"step {step}: {error}"
        model.zero_grad()
    return "no error"


def test_a_replica_of_parts_that_freezes_another_parameter_is_named():
    for text in run_world("threads", replicas_differ, 4):
        assert "step 2" in text
        assert "whether they train parameter '0.bias'" in text
        assert "rank 2: trained\n  rank 3: frozen" in text


def thaw_one_that_was_wrapped_frozen(world: ec.World, name: str) -> None:
    module = net()
    module[0].requires_grad_(False)
    model = WRAPS[name](module, world.group)
    module[0].weight.requires_grad_(True)
    model(rows(0, 1)[0])


@pytest.mark.parametrize("name", WRAPS)
def test_what_was_frozen_when_it_was_wrapped_is_refused_before_the_step_when_thawed(name):
    with pytest.raises(ec.StateError, match=r"'0.weight' was frozen, and unfrozen .* freeze it"):
        run_world("threads", thaw_one_that_was_wrapped_frozen, 2, (name,))


def leaves_a_join_early(world: ec.World) -> list[bool]:
    module = net()
    model = ec.DDP(module, world.group)
    with model.join():
        for step in range(2 + 2 * world.rank):
            module[0].requires_grad_(step < 3)
            model(rows(step, 1)[0]).sum().backward()
            model.zero_grad()
    module[0].requires_grad_(False)
    model(rows(0, 1)[0]).sum().backward()
    return [p.grad is None for p in module.parameters()]


def test_a_rank_without_batches_takes_the_opinion_of_those_that_train():
    for frozen in run_world("threads", leaves_a_join_early, 2):
        assert frozen == [True, True, False, False, False, False]


def a_copy_freezes_alone(world: ec.World) -> None:
    model = ec.DDP(net(), world.group)
    clone = copy.deepcopy(model)
    clone.requires_grad_(False)
    model(rows(0, 1)[0]).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_frozen_copy_does_not_freeze_the_model():
    run_world("threads", a_copy_freezes_alone, 2)


# A model that is wholly frozen, such as a large teacher or a reference model ----------------------

STEPS = 3


def distilled(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4)).double()


def distillation_loss(student: nn.Module, teacher: nn.Module, x: Tensor) -> Tensor:
    """Gradients come to the student beside the teacher, and also through it."""
    with torch.no_grad():
        wanted = teacher(x)
    answer = student(x)
    return (answer - wanted).square().mean() + teacher(answer).square().mean()


def distil(world: ec.World, strategy: ec.Strategy) -> dict[str, Tensor]:
    units = ec.units.by_type(nn.Linear)
    frozen = distilled(1).requires_grad_(False)
    teacher = ec.FSDP(frozen, world.group, units=units, strategy=strategy, min_num_params=0)
    student = ec.FSDP(distilled(0), world.group, units=units, min_num_params=0)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.1)
    reference.train(
        optimizer,
        STEPS,
        lambda step: [
            distillation_loss(student, teacher, reference.rows(world.rank, 3, 4, step=step))
        ],
    )
    assert all(param.grad is None for param in teacher.parameters())
    assert_states_equal(teacher.state_dict(), distilled(1).state_dict())
    if strategy is ec.Strategy.FULL_SHARD and world.size > 1:
        whole = sum(param.nbytes for param in distilled(1).parameters())
        assert teacher.memory_stats().shards < whole
    return student.state_dict()


def distil_all(world: ec.World) -> list[dict[str, Tensor]]:
    strategies = (ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP, ec.Strategy.NO_SHARD)
    return [distil(world, one) for one in strategies]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"), [("threads", 1), ("threads", 3), ("processes", 2), ("gloo", 2)]
)
def test_a_teacher_is_sharded_over(kind: str, ranks: int) -> None:
    teacher, student = distilled(1).requires_grad_(False), distilled(0)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.1)

    def losses(step: int) -> Iterator[Tensor]:
        for rank in range(ranks):
            yield distillation_loss(student, teacher, reference.rows(rank, 3, 4, step=step)) / ranks

    expected = train_alone(student, optimizer, STEPS, losses)
    for states in run_world(kind, distil_all, ranks):
        for state in states:
            assert_states_close(state, expected, rtol=0, atol=1e-12)


def thaw_a_teacher(world: ec.World) -> None:
    model = ec.FSDP(distilled(1).requires_grad_(False), world.group)
    model.module.requires_grad_(True)
    model(reference.rows(0, 3, 4))


def test_a_teacher_that_is_thawed_is_refused_before_the_step() -> None:
    with pytest.raises(ec.StateError, match="was frozen, and unfrozen"):
        run_world("threads", thaw_a_teacher, 2)
