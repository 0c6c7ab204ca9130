"""Whatever a model does with its blocks, its stages give its results or name what they lack."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.pipeline.splitting.split import split
from tests.reference import assert_states_close, mse, rows, train_alone

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.penalty: Any = 0.0
        self.kind = "block"

    def forward(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        y = x + torch.tanh(self.linear(x) * self.scale)
        self.penalty = self.later = y.square().mean()
        return y if beside is None else y + 0.5 * beside


class Pair(Block):
    """Returns a tuple, and takes what is beside the hidden state first."""

    def forward(self, beside: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x, beside)
        return y, y.mean()


class Shorter(Block):
    def forward(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        return super().forward(x)[:, ::2]


Way = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """Calls its blocks in some way."""

    def __init__(self, way: Way, block: type[Block] = Block) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.way(self, self.embed(x)))


def in_order(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def each_twice(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(block(x))
    return x


def first_beside_last(model: Model, x: Tensor) -> Tensor:
    first, means = x, torch.zeros(())
    for block in model.blocks:
        x, means = block(first, x)
    return x * means


def counts_positions(model: Model, x: Tensor) -> Tensor:
    x, length = x[:, None].expand(-1, 16, -1), 0
    for block in model.blocks:
        length += x.shape[1]
        x = block(x)
    return x.mean(1) * length


def one_mask_for_all(model: Model, x: Tensor) -> Tensor:
    mask = torch.rand(x.shape[0], 1, dtype=x.dtype)
    for block in model.blocks:
        x = block(x, mask)
    return x


def reads_plain_attributes(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x) if block.kind == "block" and block.linear.in_features == WIDTH else x * 0
    return x


def in_a_loop(model: Model, x: Tensor) -> Tensor:
    return in_order(model, in_order(model, x))


def last_first(model: Model, x: Tensor) -> Tensor:
    return in_order(model, model.blocks[-1](x))


def first_last(model: Model, x: Tensor) -> Tensor:
    return model.blocks[0](in_order(model, x))


def adds_penalties(model: Model, x: Tensor) -> Tensor:
    return in_order(model, x) + sum(block.penalty for block in model.blocks)


def adds_penalties_of_modules(model: Model, x: Tensor) -> Tensor:
    x = in_order(model, x)
    return x + sum(module.penalty for module in model.modules() if isinstance(module, Block))


def reads_ahead(model: Model, x: Tensor) -> Tensor:
    return in_order(model, x * (1 + torch.as_tensor(model.blocks[3].penalty).detach()))


def reads_what_is_not_there_yet(model: Model, x: Tensor) -> Tensor:
    return in_order(model, x) * getattr(model.blocks[0], "later", 1.0)


def hooks_the_inside_of_blocks(model: Model, x: Tensor) -> Tensor:
    kept: list[Tensor] = []
    hooks = [
        block.linear.register_forward_hook(lambda module, args, output: kept.append(output))
        for block in model.blocks
    ]
    x = in_order(model, x)
    for hook in hooks:
        hook.remove()
    return x + sum(output.square().mean() for output in kept)


def reads_with_a_default(model: Model, x: Tensor) -> Tensor:
    x = in_order(model, x)
    try:
        return x * model.blocks[0].scale
    except Exception:  # as models do that look for what some blocks have
        return x


def goes_on_without_a_value(model: Model, x: Tensor) -> Tensor:
    try:
        largest = float(x.detach().abs().max())
    except Exception:
        largest = 1.0
    return in_order(model, x) * largest


def build(way: Way, block: type[Block]) -> Model:
    torch.manual_seed(0)
    return Model(way, block).double()


def losses(model: Callable[..., Any], size: int) -> Callable[[int], Iterator[Tensor]]:
    def of(step: int) -> Iterator[Tensor]:
        torch.manual_seed(step)
        batch = rows(0, 8, WIDTH, step=step), rows(1, 8, WIDTH, step=step)
        for x, y in zip(*(part.chunk(size) for part in batch), strict=True):
            yield mse(model(x), y) / size

    return of


def trains_in_stages(world: ec.World, way: Way, block: type[Block], recompute: bool) -> None:
    plain = build(way, block)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = train_alone(plain, optimizer, 3, losses(plain, 2))
    stages = split(build(way, block), world.size)
    options: dict[str, Any] = {"microbatches": 2, "loss_fn": mse, "recompute": recompute}
    pipe = ec.Pipeline(stages, world.group, **options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        pipe.step(rows(0, 8, WIDTH, step=step), target=rows(1, 8, WIDTH, step=step))
        optimizer.step()
        optimizer.zero_grad()
    assert_states_close(pipe.whole_state_dict(), expected, rtol=1e-12, atol=1e-12)


RIGHT = [
    (in_order, Block),
    (each_twice, Block),
    (first_beside_last, Pair),
    (counts_positions, Shorter),
    (reads_plain_attributes, Block),
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("way", "block"), RIGHT, ids=lambda value: value.__name__)
def test_stages_have_the_weights_of_one_process(way, block, recompute, ranks) -> None:
    ec.run(trains_in_stages, ranks, args=(way, block, recompute))


def test_what_is_drawn_at_random_for_all_blocks_is_that_of_the_first_stage() -> None:
    with pytest.warns(UserWarning, match="draws random numbers before block 2"):
        ec.run(trains_in_stages, 2, args=(one_mask_for_all, Block, False))


WRONG = [
    (in_a_loop, "calls block 0, which a stage before this one has"),
    (last_first, "calls block 3, which a stage after this one has"),
    (first_last, "calls block 0, which a stage before this one has"),
    (adds_penalties, "reads blocks.0.penalty, which another stage has"),
    (adds_penalties_of_modules, "reads blocks.0.penalty, which another stage has"),
    (reads_ahead, "reads blocks.3.penalty, which another stage has"),
    (reads_what_is_not_there_yet, "reads blocks.0.later, which another stage has"),
    (hooks_the_inside_of_blocks, "hooks blocks.[02].linear, which another stage has"),
    (reads_with_a_default, "reads blocks.0.scale, which another stage has"),
    (goes_on_without_a_value, r"__float__\(\) depends on"),
]


@pytest.mark.parametrize(
    ("way", "sentence"), WRONG, ids=lambda value: getattr(value, "__name__", "")
)
def test_what_no_stage_could_compute_is_named(way, sentence) -> None:
    with pytest.raises(ec.StageError, match=sentence):
        ec.run(trains_in_stages, 2, args=(way, Block, False))


class Counts(Block):
    """Stores a number in the forwards that ``when`` has."""

    when: frozenset[int] = frozenset()
    number = 1.0

    def forward(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        self.calls = getattr(self, "calls", -1) + 1
        if self.calls in self.when:
            self.number = self.calls + 2.0
        return x + torch.tanh(self.linear(x) * self.scale)


def reads_numbers(places: list[tuple[int, int]]) -> Way:
    """Multiplies by the number of a block before another one; 4 is behind all."""

    def way(model: Model, x: Tensor) -> Tensor:
        for i in range(5):
            for place, index in places:
                if place == i:
                    x = x * model.blocks[index].number
            x = model.blocks[i](x) if i < 4 else x
        return x

    return way


def drawn_numbers(world: ec.World, seed: int) -> None:
    """Train drawn stages, which compute what one process does or refuse to."""
    draw = random.Random(seed)
    places = [(draw.randrange(5), draw.randrange(4)) for _ in range(draw.randint(1, 2))]
    stores = {i: draw.choice([(), (), (), (0,), (1,), (3,)]) for i in range(4)}

    def numbered() -> Model:
        model = build(reads_numbers(places), Counts)
        for i, block in enumerate(model.blocks):
            block.when = frozenset(stores[i])
        return model

    plain = numbered()
    pipe = ec.Pipeline(split(numbered(), world.size), world.group, microbatches=2, loss_fn=mse)
    for step in range(3):
        x, y = rows(0, 8, WIDTH, step=step), rows(1, 8, WIDTH, step=step)
        parts = zip(x.chunk(2), y.chunk(2), strict=True)
        expected = sum(mse(plain(part), z) / 2 for part, z in parts)
        loss = pipe.step(x, target=y, loss_everywhere=True)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_blocks_store_and_models_read_is_right_or_refused(ranks: int) -> None:
    sentences = []
    for seed in range(40):
        try:
            ec.run(drawn_numbers, ranks, args=(seed,))
        except ec.StageError as error:
            sentences.append(str(error))
    assert 5 < len(sentences) < 35
    assert all(".number, which another stage has" in sentence for sentence in sentences)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    "direction", ["forward_pre", "forward", "full_backward_pre", "full_backward"]
)
def test_a_hook_that_nobody_would_call_is_refused(direction: str, inside: bool) -> None:
    def way(model: Model, x: Tensor) -> Tensor:
        module = model.blocks[3].linear if inside else model.blocks[3]
        getattr(module, f"register_{direction}_hook")(lambda *args: None).remove()
        return in_order(model, x)

    stages = split(build(way, Block), 2)
    if not inside and direction.startswith("forward"):
        assert set(stages[0](rows(0, 3, WIDTH))) >= {"block", "outputs"}
        return
    with pytest.raises(
        ec.UnsupportedError, match=r"hooks blocks\.3(\.linear)?, which another stage"
    ):
        stages[0](rows(0, 3, WIDTH))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda stage: pickle.loads(pickle.dumps(stage))])
def test_stages_that_were_copied_compute_the_same(how) -> None:
    model, x = build(first_beside_last, Pair), rows(0, 3, WIDTH)
    stages = [how(stage) for stage in split(model, 3)]
    value: Any = x
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for stage in stages:
            value = stage(value)
    assert torch.equal(value, model(x))
