"""What makes ranks replicas: buffers are sent when one changed, and each rank holds all of it."""

import copy
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import echelon as ec
from echelon.comm.world import World
from echelon.ddp.replicas import TrackedBuffers
from echelon.errors import StateError
from echelon.state.tensor_shard import Replication
from tests import reference
from tests.ddp.models import TiedLanguageModel, rows, share, token_loss, tokens
from tests.holding import check_optimizer, filled, joined, write
from tests.reference import assert_states_equal
from tests.worlds import KINDS, run_world

# Buffers are sent when some rank changed one, and only then ------------------------------------


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
    buffers = TrackedBuffers(module)
    assert not buffers.changed()
    module.running_mean.add_(1)
    assert buffers.changed()
    buffers.remember()
    module.running_var = torch.zeros(2)
    assert buffers.changed()
    buffers.remember()
    module.running_var.data = torch.ones(2)  # the same tensor, with other memory
    assert buffers.changed()
    buffers.remember()
    assert not buffers.changed()
    module.running_var = None
    assert buffers.changed()


# What a rank holds -----------------------------------------------------------------------------


def normed() -> nn.Sequential:
    """Has buffers that change in forward."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def batch(world: World, step: int) -> torch.Tensor:
    return share(rows(step, world.size, per_rank=3), world.rank, world.size)


def train(world: World, model: nn.Module, steps: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    reference.train(optimizer, steps, lambda step: [model(batch(world, step)).square().mean()])
    return optimizer


def all_of_it_is_held_by_everyone(world: World) -> None:
    torch.manual_seed(world.rank)  # rank 0's weights go to all
    model = ec.DDP(TiedLanguageModel(), world.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(2):
        local_batch = [share(part, world.rank, world.size) for part in tokens(step, world.size)]
        token_loss(model, *local_batch).backward()
        optimizer.step()
    holdings = model.holdings()
    check_optimizer(holdings, optimizer)
    assert_states_equal(joined(holdings, world.group), model.state_dict())
    assert {shard.replication for shard in holdings.tensors} == {Replication.IDENTICAL}
    assert holdings.tensors[1].names == ("embedding.weight", "head.weight")
    assert holdings.axes == model.shared_over() == (world.group,)


def what_is_written_is_loaded(world: World) -> None:
    """No rank needs the buffers of another one afterwards, though theirs differed before."""
    for sends in (True, False):
        model = ec.DDP(normed(), world.group, broadcast_buffers=sends)
        train(world, model, 2)
        model(batch(world, 2))  # buffers differ now, and it is known that they do
        weights = filled(normed(), 7).state_dict()
        write(model.holdings(), weights)
        assert_states_equal(model.state_dict(), weights)
        plain = normed()
        plain.load_state_dict(weights)
        x = batch(world, 5)
        for ddp in (model, plain):
            ddp.eval()
        assert torch.equal(model(x), plain(x))
        expected = ec.DDP(plain, world.group, broadcast_buffers=sends)
        for ddp in (model, expected):
            ddp.train()
            train(world, ddp, 2)
        assert_states_equal(model.state_dict(), expected.state_dict())


def run_all(world: World) -> None:
    all_of_it_is_held_by_everyone(world)
    what_is_written_is_loaded(world)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_hold_all_of_the_model_and_what_is_written_is_loaded(kind: str) -> None:
    run_world(kind, run_all, 3)


def test_of_buffers_the_first_counts_if_they_are_sent_and_otherwise_each_its_own() -> None:
    def main(world: World) -> None:
        for sends, kept in ((True, Replication.PRIMARY), (False, Replication.PER_RANK)):
            model = ec.DDP(normed(), world.group, broadcast_buffers=sends)
            train(world, model, 2)
            model.module.register_buffer("late", torch.zeros(2))  # which is never sent
            by_name = {shard.name: shard for shard in model.holdings().tensors}
            assert by_name["1.running_mean"].replication is kept
            assert by_name["1.num_batches_tracked"].replication is kept
            assert by_name["late"].replication is Replication.PER_RANK
            mean = joined(model.holdings(), world.group)["1.running_mean"]
            first = model.module[1].running_mean.clone()
            world.group.broadcast(first, 0)
            assert torch.equal(mean, first)
            model(batch(world, 3))  # with the buffers of rank 0, if they are sent
            began = torch.equal(0.9 * first + 0.1 * mean_of(model, world), running(model))
            assert began == (sends or world.rank == 0)

    run_world("threads", main, 3)


def running(model: nn.Module) -> torch.Tensor:
    mean: torch.Tensor = model.module[1].running_mean
    return mean


@torch.no_grad()
def mean_of(model: nn.Module, world: World) -> torch.Tensor:
    """What the last batch adds to the running mean."""
    mean: torch.Tensor = model.module[0](batch(world, 3)).mean(0)
    return mean


def test_ignored_parameters_are_each_ranks_own() -> None:
    def main(world: World) -> None:
        plain = normed()
        model = ec.DDP(plain, world.group, ignored=[plain[2]])
        kept = {shard.name: shard.replication for shard in model.holdings().tensors}
        per_rank = {name for name, shard in kept.items() if shard is Replication.PER_RANK}
        assert per_rank == {"2.weight", "2.bias"}
        clone = copy.deepcopy(model)
        assert kept == {shard.name: shard.replication for shard in clone.holdings().tensors}

    run_world("threads", main, 2)


@pytest.mark.slow
def test_names_are_those_of_a_model_that_was_not_compiled() -> None:
    def main(world: World) -> None:
        plain = normed()
        plain[2] = torch.compile(plain[2], backend="eager")
        model = ec.DDP(torch.compile(plain, backend="eager"), world.group)
        assert joined(model.holdings(), world.group).keys() == normed().state_dict().keys()

    run_world("threads", main, 2)


def test_what_is_asked_for_at_the_wrong_time_is_refused() -> None:
    def main(world: World) -> None:
        model = ec.DDP(normed(), world.group)
        asked: list[str] = []

        def ask(_: Any) -> None:
            with pytest.raises(StateError, match="inside backward"):
                model.holdings()
            asked.append("once")

        hidden = model(batch(world, 0))
        model.module[0].weight.register_hook(ask)
        hidden.sum().backward()
        assert asked == ["once"]
        model.holdings()
        model.unwrap()
        with pytest.raises(StateError, match="taken off"):
            model.holdings()

    run_world("threads", main, 2)
