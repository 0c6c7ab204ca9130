"""Simulated ranks draw what a process of their own would draw, whatever the other ranks do."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import echelon as ec

RANKS = 4
ROUNDS = 12


def numbers() -> list[Tensor]:
    return [
        torch.rand(5),
        torch.randn(3, 2),
        torch.randint(0, 100, (4,)),
        torch.randperm(9),
        torch.empty(4).uniform_(),
        torch.empty(4).normal_().exponential_(),
        torch.zeros(4).bernoulli_(0.5),
        torch.bernoulli(torch.full((6,), 0.5)),
        torch.multinomial(torch.ones(9), 4),
        torch.rand_like(torch.ones(3)),
        torch.normal(0.0, torch.ones(3)),
        torch.poisson(torch.ones(5)),
        torch.distributions.Gamma(2.0, 1.0).sample((3,)),
        F.gumbel_softmax(torch.zeros(6)),
    ]


def weights() -> list[Tensor]:
    model = nn.Sequential(
        nn.Linear(5, 7), nn.Conv1d(1, 2, 3), nn.Embedding(4, 3), nn.LSTM(3, 2), nn.LayerNorm(3)
    )
    nn.init.orthogonal_(model[0].weight)
    nn.init.trunc_normal_(model[2].weight)
    nn.init.sparse_(model[1].weight[0], 0.5)
    return list(model.parameters())


def training() -> list[Tensor]:
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.5), nn.RReLU(), nn.AlphaDropout(0.1), nn.Linear(8, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    return list(model.parameters())


def attention() -> list[Tensor]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    output = layer(torch.randn(2, 3, 8))
    query = torch.randn(1, 2, 3, 4)
    return [output, F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)]


def recomputation() -> list[Tensor]:
    layer = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    x = torch.randn(4, 6, requires_grad=True)
    # Recomputed in backward: with other random numbers the gradients would be wrong.
    output = checkpoint(layer, x, use_reentrant=False)
    output.square().sum().backward()
    plain = torch.randn(())  # and backward has put the stream back
    return [output, x.grad, plain]


def regradient() -> list[Tensor]:
    layer, dropout = nn.Linear(6, 6), nn.Dropout(0.5)
    x = torch.randn(4, 6, requires_grad=True)
    checkpoint(lambda x: dropout(layer(x)), x, use_reentrant=True).sum().backward()
    again = checkpoint(lambda x: dropout(layer(x)), x, use_reentrant=False)
    [gradient] = torch.autograd.grad(again.sum(), x)
    return [x.grad, gradient, torch.randn(())]


def states() -> list[Tensor]:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    again = torch.rand(3)
    assert torch.equal(first, again)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.rand(5)
    assert torch.initial_seed() == 7
    own = torch.Generator().manual_seed(3)
    return [first, torch.rand(2), torch.rand(2, generator=own), state]


def shuffling() -> list[Tensor]:
    data = TensorDataset(torch.arange(20))
    loader = DataLoader(data, batch_size=3, shuffle=True)
    return [batch for _ in range(2) for [batch] in loader]


SCRIPTS = (numbers, weights, training, attention, recomputation, regradient, states, shuffling)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_each_rank_draws_what_one_process_with_its_seed_draws(
    script: Callable[[], list[Tensor]],
) -> None:
    def alone(seed: int) -> list[Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return script()

    expected = [alone(seed) for seed in range(RANKS)]

    def main(world: ec.World) -> list[Tensor]:
        torch.manual_seed(world.rank)
        world.group.barrier()  # others seed, and draw, meanwhile
        return script()

    for found, wanted in zip(ec.run(main, RANKS), expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)


def test_ranks_that_take_turns_at_every_draw_do_not_disturb_each_other() -> None:
    def main(world: ec.World) -> Tensor:
        torch.manual_seed(world.rank)
        drawn = []
        for _ in range(ROUNDS):
            world.group.barrier()  # let another rank draw in between
            drawn.append(torch.rand(2))
        return torch.cat(drawn)

    for rank, found in enumerate(ec.run(main, RANKS)):
        generator = torch.Generator().manual_seed(rank)
        expected = [torch.rand(2, generator=generator) for _ in range(ROUNDS)]
        assert torch.equal(found, torch.cat(expected))


def test_one_seed_gives_one_model_on_all_ranks() -> None:
    def main(world: ec.World) -> float:
        torch.manual_seed(0)
        weight = nn.Linear(50, 50).weight.detach().clone()
        least, largest = weight.clone(), weight.clone()
        world.group.all_reduce(least, "min")
        world.group.all_reduce(largest, "max")
        assert torch.equal(least, largest)
        return weight.sum().item()

    assert len(set(ec.run(main, 16))) == 1


def test_a_world_starts_from_the_callers_stream_and_leaves_it_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    inside = ec.run(lambda world: torch.rand(3), 3)
    assert all(torch.equal(found, expected) for found in inside)
    assert torch.equal(torch.rand(3), expected)  # the caller has not drawn yet


def test_the_callers_generator_is_back_afterwards_also_after_a_failure() -> None:
    before = torch.random.default_generator

    def fail(world: ec.World) -> None:
        torch.manual_seed(3)
        raise KeyError

    torch.manual_seed(11)
    with pytest.raises(KeyError):
        ec.run(fail, 3)
    assert torch.random.default_generator is before
    assert torch.initial_seed() == 11
