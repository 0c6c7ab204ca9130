"""Laws of DDP: *Parity* under all options, *Same bits*, and every check in every world."""

import pytest
import torch

import echelon as ec
import tests.ddp.replica_checks  # noqa: F401  # has more checks
from tests.ddp.checks import CHECKS, SMALL, run_all
from tests.ddp.models import TiedLanguageModel, assert_close, share, token_loss, tokens
from tests.worlds import run_world

ALONE = {"bucket_bytes": 0, "first_bucket_bytes": 0}  # each gradient in a bucket of its own
CASES = (
    ("overlap", {}, "mean"),
    ("overlap", ALONE, "mean"),
    ("overlap", {"bucket_bytes": 500}, "sum"),
    ("overlap", ALONE, 2.0),
    ("manual", {"bucket_bytes": 500}, "mean"),
    ("manual", ALONE, "sum"),
)


def train(world, sync, buckets, reduction):
    """Train both for some steps, with a step of accumulation, and compare losses as they come."""
    size = world.size
    torch.manual_seed(0)
    plain = TiedLanguageModel().double()
    torch.manual_seed(0)
    ddp = ec.DDP(
        TiedLanguageModel().double(), world.group, sync=sync, reduction=reduction, **buckets
    )
    # What the loss of a rank is multiplied by, so that the reduction gives the mean over ranks.
    scale = {"mean": 1.0, "sum": 1 / size, 2.0: 2.0 / size}[reduction]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, ddp)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        for i in range(2 if step == 2 else 1):
            inputs, targets = tokens(10 * step + i, size)
            loss = token_loss(plain, inputs, targets)
            mine = token_loss(
                ddp, share(inputs, world.rank, size), share(targets, world.rank, size)
            )
            loss.backward()
            (mine * scale).backward()
            mean = mine.detach().clone()
            world.group.all_reduce(mean, "mean")
            assert abs(mean - loss) <= 1e-12 * abs(loss)
            if sync == "manual" and not (step == 2 and i == 0):
                ddp.sync_gradients()
        for optimizer in optimizers:
            optimizer.step()
    # A few roundings apart: relative to the largest element of each tensor, after four steps.
    assert_close(ddp, plain, rtol=1e-12)


@pytest.mark.slow_for("4", "8")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_training_equals_one_process_under_all_options(ranks):
    def main(world):
        for sync, buckets, reduction in CASES:
            train(world, sync, buckets, reduction)

    ec.run(main, ranks)


def final_state(world, gradient_dtype):
    """All parameters, gradients and optimizer state after some steps."""
    torch.manual_seed(0)
    ddp = ec.DDP(TiedLanguageModel(), world.group, gradient_dtype=gradient_dtype, **SMALL)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    for step in range(5):
        optimizer.zero_grad()
        batch = (share(t, world.rank, world.size) for t in tokens(step, world.size))
        token_loss(ddp, *batch).backward()
        optimizer.step()
    state = []
    for param in ddp.parameters():
        state += [param.detach(), param.grad, *optimizer.state[param].values()]
    return state


@pytest.mark.slow
@pytest.mark.parametrize("gradient_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_two_runs_and_all_ranks_end_with_the_same_bits(ranks, gradient_dtype):
    runs = [ec.run(final_state, ranks, args=(gradient_dtype,)) for _ in range(2)]
    expected = runs[0][0]
    for state in runs[0] + runs[1]:
        assert all(torch.equal(a, b) for a, b in zip(state, expected, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CHECKS)
def test_it_holds_that(name, ranks):
    run_world("threads", CHECKS[name], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_every_check_holds_over(kind):
    assert run_world(kind, run_all, 2) == [len(CHECKS)] * 2


@pytest.mark.slow_for("8")
@pytest.mark.parametrize("ranks", [8])
def test_every_check_holds_on_many_simulated_ranks(ranks):
    assert run_world("threads", run_all, ranks) == [len(CHECKS)] * ranks
