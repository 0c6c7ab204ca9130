"""Models in stages, with what makes the cuts between them hard."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import echelon as ec
from echelon.comm.world import World
from tests.reference import mse, train

WIDTH = 6
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


class Plain(nn.Module):
    """A block: tensor in, tensor out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH + 1)
        self.down = nn.Linear(WIDTH + 1, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Nested(Plain):
    """Between blocks goes a dict: a tensor, one that needs no gradient, a flag, a number, a skip.

    The ``skip`` of the first block is used by every other; ``unused`` has no effect.
    """

    def forward(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Tensor):
            value = {"x": value, "skip": 2 * value, "depth": 0, "pair": (None, "text")}
        x = super().forward(value["x"]) + 0.1 * value["skip"] * (value["depth"] + 1)
        return {
            "x": x,
            "mask": (x > 0).detach(),
            "unused": x.sum() * 2,
            "empty": x[:0],
            "skip": value["skip"],
            "depth": value["depth"] + 1,
            "pair": value["pair"],
        }


class Last(Plain):
    """Takes either kind, gives a tensor."""

    def forward(self, value: Any) -> Tensor:
        if isinstance(value, dict):
            value = value["x"] + value["skip"] * value["mask"]
        return super().forward(value)


class Recomputed(Plain):
    """A block whose activations are not kept."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class _Marks(torch.autograd.Function):
    """Nothing, with something in the graph that lives as long as the graph does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Any) -> Tensor:
        ctx.mark = mark
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Alive:
    """How many things are: ``now``, and ``most`` at one time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self) -> None:
        """One more."""
        self.now += 1
        self.most = max(self.most, self.now)

    def remove(self) -> None:
        """One less."""
        self.now -= 1


class _Mark:
    """An object whose end can be noticed."""


class Counted(nn.Module):
    """A block whose graphs are counted for as long as autograd keeps them."""

    def __init__(self, block: nn.Module, graphs: Alive) -> None:
        super().__init__()
        self.block, self.graphs = block, graphs

    def forward(self, x: Any) -> Any:
        self.graphs.add()
        mark = _Mark()
        weakref.finalize(mark, self.graphs.remove)
        return _Marks.apply(self.block(x), mark)  # type: ignore[no-untyped-call]


KINDS: dict[str, type[Plain]] = {"plain": Plain, "nested": Nested, "recomputed": Recomputed}


def build(kind: str, num_stages: int, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """Stages with the same weights each time."""
    torch.manual_seed(num_stages)
    blocks: list[nn.Module] = [KINDS[kind]() for _ in range(num_stages - 1)]
    return [block.to(dtype) for block in [*blocks, Last()]]


def batch(rows: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def train_plain(stages: list[nn.Module], rows: int, steps: int) -> tuple[list[float], list[Tensor]]:
    """The losses and parameters of one process; ``stages`` are left as they were."""
    model = nn.Sequential(*copy.deepcopy(stages))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def losses(step: int) -> list[Tensor]:
        x, y = batch(rows, step)
        return [mse(model(x), y)]

    return train(optimizer, steps, losses), [param.detach() for param in model.parameters()]


def pipeline(world: World, stages: list[nn.Module], **options: Any) -> ec.Pipeline:
    """A pipeline of four microbatches, unless ``options`` say something else."""
    return ec.Pipeline(stages, world.group, **{"microbatches": 4, "loss_fn": mse, **options})


def filled(stages: Iterable[nn.Module], world: World) -> list[nn.Module]:
    """A stage for each rank: these, and then some that do nothing."""
    stages = list(stages)
    return [*stages, *(nn.Identity() for _ in range(world.size - len(stages)))]


def each(world: World, checks: Iterable[Callable[[World], None]]) -> None:
    """Call several rank functions in one world; an error says in which it was."""
    for check in checks:
        try:
            check(world)
        except BaseException as error:
            error.add_note(f"in {check}")
            raise


def rows_of(world: World, plan: ec.Plan, num_rows: int) -> slice:
    """A rank's part of the rows of all ranks; ranks that differ on ``pp`` have the same."""
    length, line = num_rows // plan.data_size, plan.data_rank(world)
    return slice(length * line, length * (line + 1))


def train_beside(
    world: World,
    plan: ec.Plan,
    pipe: ec.Pipeline,
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Train a pipeline, and the plain model on the batches of all ranks, and compare them.

    Gradients of two batches are accumulated and clipped before each step of AdamW.
    """
    close = {"rtol": 1e-11, "atol": 1e-12}
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.05) for module in (pipe, model)]
    for n, (x, y) in enumerate(batches):
        rows, is_second = rows_of(world, plan, len(x)), n % 2 == 1
        expected = loss_fn(model(x), y)
        expected.backward()
        loss = pipe.step(x[rows], target=y[rows], finalize=is_second, loss_everywhere=True)
        world.group.all_reduce(loss, "mean")
        torch.testing.assert_close(loss, expected.detach(), **close)
        if is_second:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            torch.testing.assert_close(ec.clip_grad_norm_(pipe, 0.1), norm, **close)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    whole = model.state_dict()
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, whole[name], **close, msg=name)


class Times(nn.Module):
    """``y = w * x``, or their inner product."""

    def __init__(self, *w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x if len(self.w) == 1 else (self.w * x).sum(-1, keepdim=True)


class Records(nn.Module):
    """Passes on what it is given, and writes it down."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, value: Any) -> Any:
        self.seen.append(value)
        return value
