"""Each gradient of a backward is counted once."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import echelon as ec
from tests.ddp.models import assert_close, rows, share


class Shared(nn.Module):
    """One layer twice, each time in a reentrant checkpoint: two gradients in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.shared = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return self.first(x)


def test_a_second_gradient_after_its_bucket_left_is_an_error_with_a_way_out():
    def main(world):
        ddp = ec.DDP(Shared().double(), world.group, bucket_bytes=0, first_bucket_bytes=0)
        x = rows(0, 1).requires_grad_()
        for _ in range(2):  # at first the bucket of "shared" waits for that of "first"
            ddp(x).sum().backward()

    with pytest.raises(
        ec.StateError, match=r"'shared.\w+' got a second gradient.*use_reentrant=Fal"
    ):
        ec.run(main, 2)


def test_a_second_gradient_before_its_bucket_left_is_counted():
    def main(world):
        torch.manual_seed(0)
        ddp = ec.DDP(Shared().double(), world.group)  # one bucket, in which "first" comes last
        torch.manual_seed(0)
        plain = Shared().double()
        x = rows(0, 2).requires_grad_()
        plain(x).mean().backward()
        with ddp.no_sync():
            ddp(share(x, world.rank, 2)).mean().backward()
        ddp.sync_gradients()
        assert_close(ddp, plain)

    ec.run(main, 2)


class Earlier(Shared):
    """The shared layer has both gradients before another layer has its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x


@pytest.mark.parametrize(("gradient_dtype", "rtol"), [(None, 1e-12), (torch.float32, 1e-6)])
def test_a_second_gradient_while_its_bucket_waits_for_another_parameter_is_added(
    gradient_dtype, rtol
):
    def main(world):
        torch.manual_seed(0)
        plain = Earlier().double()
        ddp = ec.DDP(copy.deepcopy(plain), world.group, gradient_dtype=gradient_dtype)
        for step in range(2):
            x = rows(step, 2)
            for model, part in ((plain, x), (ddp, share(x, world.rank, 2))):
                model.zero_grad()
                model(part).pow(2).mean().backward()
            assert_close(ddp, plain, rtol=rtol)

    ec.run(main, 2)
