"""Buffers are sent when some rank changed one, and only then."""

import torch
from torch import nn

import echelon as ec
from echelon.ddp.buffers import Buffers
from tests.ddp.models import rows, share


class Counting(nn.Module):
    """Counts its forwards in an integer buffer, where told to, and replaces a float one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor, counts: bool) -> torch.Tensor:
        if counts:
            self.calls += 1
            self.last = x.detach().mean(0)
        return self.linear(x)


def counting_broadcasts(world, log):
    """A listener that counts the broadcasts of this rank."""
    return ec.events.listen(
        lambda event: (
            log.append(event.facts["label"])
            if event.name == "collective.issue"
            and event.facts["rank"] == world.rank
            and event.facts["op"] == "broadcast"
            else None
        )
    )


def test_buffers_are_sent_after_a_change_on_any_rank_and_only_then():
    def main(world):
        ddp = ec.DDP(Counting(), world.group)
        sent, seen = [], []
        for step in range(6):
            log = []
            with counting_broadcasts(world, log):
                # Only rank 1 changes its buffers, in steps 1 and 4; rank 0 cannot know by itself.
                out = ddp(torch.full((1, 1), float(step)), world.rank == 1 and step in (1, 4))
            sent.append(len(log))
            seen.append(ddp.calls.item())
            out.sum().backward()
        return sent, seen

    results = ec.run(main, 2)
    # Two dtypes are two broadcasts, before the forward that follows the change.
    assert results[0] == ([0, 0, 2, 0, 0, 2], [0] * 6)
    assert results[1] == ([0, 0, 2, 0, 0, 2], [0, 1, 0, 0, 1, 0])


def test_eval_and_no_sync_send_nothing():
    def main(world):
        ddp = ec.DDP(Counting(), world.group)
        x, log = torch.ones(1, 1), []
        with counting_broadcasts(world, log):
            with ddp.no_sync():
                ddp(x, True).sum().backward()
            ddp(x, True).sum().backward()  # notices, for the next forward in training mode
            ddp.eval()
            if world.rank == 0:
                ddp(x, True)
            ddp.train()
            with torch.no_grad():
                ddp(x, True)
        assert log == []

    ec.run(main, 2)


def test_without_broadcast_buffers_they_stay_local():
    def main(world):
        ddp = ec.DDP(Counting(), world.group, broadcast_buffers=False)
        for _ in range(3):
            ddp(torch.ones(1, 1), world.rank == 1).sum().backward()
        return ddp.calls.item()

    assert ec.run(main, 2) == [0, 3]


def test_batch_norm_statistics_are_those_of_rank_0_before_each_forward():
    def main(world):
        ddp = ec.DDP(nn.BatchNorm1d(6), world.group)
        plain = nn.BatchNorm1d(6)
        for step in range(4):
            x = rows(step, 2, per_rank=4, dtype=torch.float32)
            ddp(share(x, world.rank, 2)).pow(2).sum().backward()
            plain(share(x, 0, 2))
        if world.rank == 0:
            assert torch.equal(ddp.running_mean, plain.running_mean)
        ddp.broadcast_parameters(0)
        return ddp.running_mean, ddp.num_batches_tracked

    first, second = ec.run(main, 2)
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1] == 4


def test_a_written_a_replaced_and_a_removed_buffer_are_changes():
    module = nn.BatchNorm1d(2)
    buffers = Buffers(module)
    assert not buffers.changed()
    module.running_mean.add_(1)
    assert buffers.changed()
    buffers.remember()
    module.running_var = torch.zeros(2)
    assert buffers.changed()
    buffers.remember()
    module.running_var = None
    assert buffers.changed()
