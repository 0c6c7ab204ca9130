"""Same bits: two runs are identical, and so are the replicas of all ranks in each of them."""

import pytest
import torch

import echelon as ec
from tests.ddp.checks import SMALL
from tests.ddp.models import TiedLanguageModel, share, token_loss, tokens


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


@pytest.mark.parametrize("gradient_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_two_runs_and_all_ranks_end_with_the_same_bits(ranks, gradient_dtype):
    runs = [ec.run(final_state, ranks, args=(gradient_dtype,)) for _ in range(2)]
    expected = runs[0][0]
    for state in runs[0] + runs[1]:
        assert all(torch.equal(a, b) for a, b in zip(state, expected, strict=True))
