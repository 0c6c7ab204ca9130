"""The states of a DDP are copies under plain names, and its bytes are counted."""

import torch

import echelon as ec
from tests.ddp.models import mlp, rows


def test_a_whole_state_is_a_copy_and_a_state_of_the_optimizer_loads_again():
    def main(world):
        ddp = ec.DDP(mlp(seed=world.rank), world.group, gradient_dtype=torch.float32)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
        ddp(rows(0, 1)).sum().backward()
        optimizer.step()
        state, of_optimizer = ddp.whole_state_dict(), ddp.optimizer_state_dict(optimizer)
        assert list(state) == list(ddp.state_dict())
        assert all(torch.equal(value, ddp.state_dict()[name]) for name, value in state.items())
        assert state["0.weight"].data_ptr() != ddp.module[0].weight.data_ptr()
        other = torch.optim.AdamW(ddp.parameters(), lr=0.2)
        ddp.load_optimizer_state_dict(other, of_optimizer)
        assert other.param_groups[0]["lr"] == 0.1
        stats = ddp.memory_stats(other)
        assert stats.optimizer == sum(2 * p.nbytes + 4 for p in ddp.parameters())
        # Gradients travel in float32, and ``.grad`` are views of a second buffer, in float64.
        assert stats.buckets == sum(b.nbytes for b in ddp.buckets) + sum(
            2 * (b.nbytes - 4 * (len(b.names) + 6)) for b in ddp.buckets
        )
        return stats.gradients

    assert ec.run(main, 2) == [0, 0]
