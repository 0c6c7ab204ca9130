"""Parity: training in DDP equals the plain model on all batches together, whatever the options."""

import pytest
import torch

import echelon as ec
from tests.ddp.models import TiedLanguageModel, assert_close, share, token_loss, tokens

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


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_training_equals_one_process_under_all_options(ranks):
    def main(world):
        for sync, buckets, reduction in CASES:
            train(world, sync, buckets, reduction)

    ec.run(main, ranks)
