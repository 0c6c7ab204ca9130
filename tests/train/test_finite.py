"""A loss or a gradient that is not finite on one rank, and what all ranks do about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon import events
from echelon.comm.world import World
from echelon.errors import ArgumentError, NonFiniteError, StartMismatch, StateError
from tests.guarded_models import INF, NAN, WAYS, blocks, data, fsdp, gradients, mse, poke
from tests.worlds import KINDS, run_world

SKIP, STOP = ec.NonFinite.SKIP, ec.NonFinite.STOP


# --- what is said --------------------------------------------------------------------------------


def plain_guard(world: World, **options: Any) -> tuple[nn.Module, ec.FiniteGuard]:
    model = nn.Sequential(*blocks())
    gradients(model, *data(0, world.rank))
    return model, ec.FiniteGuard(model, world.group, **options)


def raises(world: World) -> tuple[str, dict[str, Any]]:
    model, guard = plain_guard(world)
    assert guard.allows_step(1.0)
    weight, bias = model[0].layer.weight.grad, model[1].layer.bias.grad
    if world.rank == 1:
        weight[0, :3] = torch.tensor([NAN, -INF, NAN])
    bias[0] = INF if world.rank else 0.0
    with pytest.raises(NonFiniteError) as info:
        guard.allows_step(torch.tensor(NAN if world.rank == 2 else 1.0))
    assert weight.isnan().any() == (world.rank == 1)  # they stay, for whoever wants to look
    assert model[0].layer.weight.grad is weight
    return str(info.value), info.value.__dict__


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_raises_and_names_ranks_parameters_and_values(kind: str) -> None:
    results = run_world(kind, raises, 3)
    assert results[0] == results[1] == results[2]
    text, facts = results[0]
    assert facts == {
        "step": 2,
        "skipped": 0,
        "losses": {2: "nan"},
        "norms": {},
        "gradients": {
            "0.layer.weight": {1: "2 nan, 1 -inf of 16"},
            "1.layer.bias": {1: "1 inf of 4", 2: "1 inf of 4"},
        },
    }
    assert text.splitlines()[:4] == [
        "step 2 is not finite:",
        "  loss: nan on rank 2",
        "  gradient of '0.layer.weight': 2 nan, 1 -inf of 16 on rank 1",
        "  gradient of '1.layer.bias': 1 inf of 4 on ranks 1, 2",
    ]


def test_of_many_parameters_the_first_are_shown_and_the_others_counted() -> None:
    error = NonFiniteError(1, {}, {f"w{i}": {0: "nan"} for i in range(100)})
    assert len(str(error).splitlines()) == 15
    assert "and the gradients of 88 more parameters" in str(error)
    assert len(error.gradients) == 100


def in_a_subgroup(world: World) -> dict[int, str]:
    group = world.group.subgroup([1, 2])
    if group is None:
        return {}
    guard = ec.FiniteGuard(nn.Sequential(*blocks()), group, action=SKIP)
    assert not guard.allows_step(NAN if group.rank else 0.0)
    return guard.found.losses


def test_ranks_are_named_as_in_the_job() -> None:
    assert ec.run(in_a_subgroup, 3) == [{}, {2: "nan"}, {2: "nan"}]


# --- actions and options -------------------------------------------------------------------------


def stops(world: World) -> None:
    model, guard = plain_guard(world, action=STOP)
    assert guard.allows_step(0.0)
    assert not guard.stopped
    assert not guard.allows_step(INF if world.rank else 0.0)
    assert guard.stopped
    assert guard.found.losses == {1: "inf"}
    assert all(param.grad is None for param in model.parameters())
    assert guard.skipped == 0
    with pytest.raises(StateError, match=r"after step 2, .* leave the loop when guard\.stopped"):
        guard.allows_step(0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_stop_together(kind: str) -> None:
    run_world(kind, stops, 2)


@pytest.mark.parametrize(
    ("given", "most"), [({}, 10), ({"most_skips": 0}, 0), ({"most_skips": 2}, 2)]
)
def test_after_so_many_skips_in_a_row_every_rank_raises(given: dict[str, int], most: int) -> None:
    def main(world: World) -> None:
        _, guard = plain_guard(world, action=SKIP, **given)
        for _ in range(2):
            for _ in range(most):
                assert not guard.allows_step(NAN if world.rank else None)
            assert guard.allows_step(1.0)  # after which the count begins anew
        for _ in range(most):
            assert not guard.allows_step(NAN if world.rank else None)
        assert guard.skipped == 3 * most
        with pytest.raises(NonFiniteError) as info:
            guard.allows_step(NAN if world.rank else None)
        assert info.value.skipped == most
        words = f"after {most} steps in a row that were skipped" if most else "is not finite:"
        assert words in str(info.value)

    ec.run(main, 2)


def test_the_first_step_has_the_number_that_was_given() -> None:
    def main(world: World) -> None:
        _, guard = plain_guard(world, first_step=1001)
        guard.allows_step(0.0)
        with pytest.raises(NonFiniteError, match="step 1002 is not finite"):
            guard.allows_step(NAN)

    ec.run(main, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (({"action": SKIP}, {"action": STOP}), r'action of FiniteGuard.*\n.*"SKIP".*\n.*"STOP"'),
        (({"action": SKIP}, {"action": SKIP, "most_skips": 3}), "most_skips of FiniteGuard"),
        (({}, {"first_step": 2}), "first_step of FiniteGuard"),
    ],
)
def test_ranks_with_other_options_are_told(options: Any, words: str) -> None:
    def main(world: World) -> None:
        with pytest.raises(StartMismatch, match=words):
            plain_guard(world, **options[world.rank])

    ec.run(main, 2)


def test_what_cannot_be_guarded_is_refused() -> None:
    def main(world: World) -> None:
        model = nn.Linear(1, 1)
        for words, arguments, options in (
            ("model is", (model.weight, world.group), {}),
            ("group is", (model, world), {}),
            ("action is 'skip'", (model, world.group), {"action": "skip"}),
            ("most_skips is 3, and", (model, world.group), {"most_skips": 3}),
            ("most_skips is -1", (model, world.group), {"action": SKIP, "most_skips": -1}),
            ("first_step is 1.5", (model, world.group), {"first_step": 1.5}),
        ):
            with pytest.raises(ArgumentError, match=words):
                ec.FiniteGuard(*arguments, **options)
        guard = ec.FiniteGuard(model, world.group)
        for loss in ("1", True, torch.tensor(True)):
            with pytest.raises(ArgumentError, match="loss is"):
                guard.allows_step(loss)
        with pytest.raises(ArgumentError, match="norm is"):
            guard.allows_step(1.0, "2")

    ec.run(main, 1)


def tied(world: World) -> nn.Module:
    mesh = world.mesh(pp=2, replicas=2)
    stages = blocks()
    stages[1].layer.weight = stages[0].layer.weight
    for stage in stages:  # what one stage trains would need a wrapper
        stage.layer.bias.requires_grad_(False)
    return ec.Pipeline(stages, mesh["pp"], microbatches=1, loss_fn=mse, replicate=mesh["replicas"])


@pytest.mark.parametrize("way", [*WAYS, "stages replicated by hand"])
def test_a_group_without_all_ranks_that_share_the_model_is_refused(way: str) -> None:
    def main(world: World) -> None:
        model = tied(world) if way not in WAYS else WAYS[way](world)
        ec.FiniteGuard(model, world.group)
        for axes in ({"a": 2, "b": 2}, {"b": 2, "a": 2}):
            group = world.mesh(**axes)["a"]
            with pytest.raises(ArgumentError, match=r"is trained with ranks \[.*such as world"):
                ec.FiniteGuard(model, group)

    if way == "plain":
        ec.run(lambda world: ec.FiniteGuard(WAYS[way](world), world.mesh(a=2, b=2)["a"]), 4)
    else:
        ec.run(main, 4)


# --- what it costs, and false alarms -------------------------------------------------------------


def test_a_finite_step_takes_one_collective_of_one_number_and_a_wrong_one_tells_more() -> None:
    def main(world: World) -> list[int]:
        _, guard = plain_guard(world, action=SKIP)
        counts = []
        for loss in (1.0, NAN):
            seen: list[events.Event] = []
            with events.listen(seen.append):
                guard.allows_step(loss)
                world.group.barrier()
            issued = [
                e for e in seen if e.name == "collective.issue" and e.facts["rank"] == world.rank
            ]
            counts.append([(e.facts["op"], e.facts["nbytes"]) for e in issued if e.facts["nbytes"]])
        return counts

    (finite, wrong), _ = ec.run(main, 2)
    assert finite == [("all_reduce", 4)]
    assert len(wrong) == 3


@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float32, 1e30), (torch.float16, 6e4), (torch.float64, 1e200)]
)
def test_large_gradients_are_finite(dtype: torch.dtype, large: float) -> None:
    def main(world: World) -> None:
        model = nn.Linear(8, 8).to(dtype)
        for param in model.parameters():
            param.grad = torch.full_like(param, large)
        guard = ec.FiniteGuard(model, world.group)
        assert guard.allows_step(torch.full((3,), large, dtype=dtype))
        model.weight.grad[1, 1] = INF
        with pytest.raises(NonFiniteError, match="'weight': 1 inf of 64"):
            guard.allows_step(None)

    ec.run(main, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_gradients_of_every_dtype_are_looked_at(dtype: torch.dtype) -> None:
    def main(world: World) -> None:
        params = nn.ParameterList([torch.ones(3), torch.ones(3, dtype=dtype)])
        for param in params:
            param.grad = torch.ones_like(param)
        guard = ec.FiniteGuard(params, world.group)
        assert guard.allows_step(None)
        params[1].grad[1] = complex(0.0, NAN) if dtype.is_complex else NAN
        with pytest.raises(NonFiniteError, match=r"'1': 1 nan of \d"):
            guard.allows_step(None)

    ec.run(main, 1)


@pytest.mark.parametrize(
    ("loss", "losses"),
    [
        (10**400, {0: "inf"}),
        (-(10**400), {0: "-inf"}),
        (torch.tensor([NAN + 1j], dtype=torch.complex64).conj(), {0: "1 nan of 2"}),
        (torch.tensor(NAN).to(torch.float8_e4m3fn), {0: "nan"}),
    ],
)
def test_a_loss_of_any_kind_is_looked_at(loss: Any, losses: dict[int, str]) -> None:
    def main(world: World) -> dict[int, str]:
        _, guard = plain_guard(world)
        with pytest.raises(NonFiniteError) as caught:
            guard.allows_step(loss)
        return dict(caught.value.losses)

    assert ec.run(main, 1) == [losses]


def test_a_sparse_gradient_is_looked_at() -> None:
    def main(world: World) -> None:
        table = nn.Embedding(5, 2, sparse=True)
        guard = ec.FiniteGuard(table, world.group, action=SKIP)
        for scale in (1.0, NAN if world.rank else 1.0):
            loss = (table(torch.tensor([1, 1])) * scale).sum()
            loss.backward()
            allowed = guard.allows_step(None)
            table.zero_grad()
        assert not allowed
        assert guard.found.gradients == {"weight": {1: "2 nan of 2"}}

    ec.run(main, 2)


# --- with clipping and with a loss scale ---------------------------------------------------------


def test_with_a_norm_the_gradients_are_looked_at_only_if_it_is_not_finite() -> None:
    def main(world: World) -> None:
        model, guard = plain_guard(world)
        poke(model, NAN)
        assert guard.allows_step(None, torch.tensor(1.0))
        with pytest.raises(NonFiniteError, match=r"'0\.layer\.weight'"):
            guard.allows_step(None, torch.tensor(NAN))

    ec.run(main, 1)


def test_a_norm_that_overflows_is_named_because_nothing_was_clipped() -> None:
    def main(world: World) -> None:
        model = nn.Linear(8, 8)
        model.weight.grad = torch.full_like(model.weight, 1e30)
        guard = ec.FiniteGuard(model, world.group)
        norm = ec.clip_grad_norm_(model, 1.0)
        assert model.weight.grad[0, 0] == 1e30
        with pytest.raises(NonFiniteError, match="norm of the gradients: inf on rank 0") as info:
            guard.allows_step(None, norm)
        assert info.value.norms == {0: "inf"}

    ec.run(main, 1)


def scales(world: World) -> tuple[list[float], int]:
    model = fsdp(world, precision=ec.MixedPrecision(reduce=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ec.GradScaler(world.group, init_scale=8.0)
    guard = ec.FiniteGuard(model, world.group, action=SKIP)
    scales = []
    for step in range(3):
        x, y = data(step, world.rank)
        loss = mse(model(x), y)
        scaled = scaler.scale(loss)
        (scaled * INF if step == 1 and world.rank == 1 else scaled).backward()
        scaler.unscale_(optimizer)
        before = [param.detach().clone() for param in model.parameters()]
        if guard.allows_step(loss):
            scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same == (step == 1)
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, guard.skipped


def test_a_loss_scale_goes_down_when_the_guard_skips() -> None:
    assert ec.run(scales, 2) == [([8.0, 4.0, 4.0], 1)] * 2


def test_a_guard_counts_on_from_its_state() -> None:
    def main(world: World) -> str:
        first, second = (
            ec.FiniteGuard(nn.Linear(1, 1), world.group, action=SKIP, most_skips=2)
            for _ in range(2)
        )
        for loss in (1.0, NAN, NAN):
            first.allows_step(loss)
        second.load_state_dict(first.state_dict())
        assert (second.step, second.skipped) == (3, 2)
        with pytest.raises(ArgumentError, match="the state of a FiniteGuard has step, skipped"):
            second.load_state_dict({"step": 3})
        with pytest.raises(ArgumentError, match="step is -1"):
            second.load_state_dict({**first.state_dict(), "step": -1})
        with pytest.raises(NonFiniteError) as caught:
            second.allows_step(NAN)
        return str(caught.value).split("\n")[0]

    sentence = "step 4 is not finite, after 2 steps in a row that were skipped:"
    assert ec.run(main, 1) == [sentence]
