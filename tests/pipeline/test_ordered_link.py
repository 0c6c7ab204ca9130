"""Over messages without tags, pipelines do what they do with tags, in steps of every kind."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from tests.pipeline.sizes import TRAINING, VARIANTS, fewest, pipeline
from tests.worlds import NCCL_RULES, run_world

WIDTH = 3


class Stage(nn.Module):
    """Gives a tensor that the next stage uses, one that it does not, and a plain value."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, value: Any, scale: float = 1.0) -> Any:
        x = value if isinstance(value, Tensor) else value["x"]
        y = torch.tanh(self.linear(x)) * scale
        return {"x": y, "unused": y[:1] * 2, "rows": len(x)}


class LastStage(Stage):
    def forward(self, value: Any, scale: float = 1.0) -> Any:
        return super().forward(value, scale)["x"]


def mse(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def batches(microbatches: int) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """What a training with an evaluation has: full batches, a short one, other shapes, fewer rows.

    Each comes three times, so that its values are known at last, and again after the others.
    """
    rows = 2 * microbatches + 1
    chance = torch.Generator().manual_seed(5)

    def x(*shape: int) -> Tensor:
        return torch.randn(*shape, WIDTH, generator=chance, dtype=torch.float64)

    full: list[tuple[str, Tensor, dict[str, Any]]] = [
        *[("step", x(rows), {}) for _ in range(4)],
        ("step", x(microbatches), {}),  # the short last batch
        *[("evaluate", x(rows), {}) for _ in range(3)],
        ("evaluate", x(1), {}),
        ("step", x(rows, 2), {}),
        ("step", x(rows), {"scale": 2.0}),
        ("forward", x(rows), {}),
    ]
    return [*full, *full[3:6]]


def train(world: World, variant: str, microbatches: int) -> list[Any]:
    num_stages = world.size * VARIANTS[variant][1]
    stages = [Stage(index) for index in range(num_stages - 1)] + [LastStage(num_stages)]
    pipe = pipeline(variant, stages, world.group, microbatches, mse)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
    seen: list[Any] = []
    for what, x, named in batches(microbatches):
        if what == "forward":
            seen.append(pipe(x, **named))
        elif what == "evaluate":
            seen.append(pipe.eval_step(x, target=x, **named))
        else:
            seen.append(pipe.step(x, target=x, **named))
            optimizer.step()
            optimizer.zero_grad()
    return [*seen, *(param.detach() for param in pipe.parameters())]


def train_all(world: World, cases: list[tuple[str, int]]) -> list[list[Any]]:
    return [train(world, *case) for case in cases]


@pytest.mark.parametrize(
    ("ranks", "variants"),
    [
        (2, TRAINING),
        (3, TRAINING),
        *(
            pytest.param(ranks, TRAINING[first::7], marks=pytest.mark.slow)
            for ranks in range(4, 9)
            for first in range(7)
        ),
    ],
)
def test_every_schedule_has_the_same_bits_without_tags_in_steps_of_every_kind(
    ranks: int, variants: list[str]
) -> None:
    many = [1, 3] if ranks == 2 else [ranks + 1]
    cases = [(v, max(m, fewest(v, ranks))) for v in variants for m in many]
    with_tags = run_world("threads", train_all, ranks, (cases,))
    without = run_world(NCCL_RULES, train_all, ranks, (cases,))
    for expected, found in zip(with_tags, without, strict=True):
        for case, before, after in zip(cases, expected, found, strict=True):
            for one, other in zip(before, after, strict=True):
                same = one is other is None or torch.equal(one, other)
                assert same, case


def sent_in(pipe: ec.Pipeline, world: World, x: Tensor, **named: Any) -> int:
    """How many messages this rank sends in a step."""
    events: list[ec.events.Event] = []
    with ec.events.listen(events.append):
        pipe.step(x, target=x, **named)
    mine = [e for e in events if e.name == "collective.issue" and e.facts["rank"] == world.rank]
    return sum(event.facts["op"] == "send" for event in mine)


def test_a_step_whose_values_are_known_has_messages_with_tensors_only() -> None:
    def main(world: World) -> list[int]:
        stages = [Stage(0), LastStage(1)]
        pipe = ec.Pipeline(stages, world.group, microbatches=4, loss_fn=mse)
        x = torch.ones(8, WIDTH, dtype=torch.float64)
        counts = [sent_in(pipe, world, x) for _ in range(3)]
        wide = [sent_in(pipe, world, x.view(8, 1, WIDTH)) for _ in range(3)]
        return [*counts, sent_in(pipe, world, x), *wide]

    first, last = run_world(NCCL_RULES, main, 2)
    # By microbatch: length, spec and tensors; then length and tensors; then tensors.
    assert first == [12, 8, 4, 4, 12, 8, 4]
    assert last == [8, 8, 4, 4, 8, 8, 4]


class Grows(nn.Module):
    """Gives another value in its fourth step, which no argument tells."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return (x * self.w, self.calls > 6)


class First(nn.Module):
    def forward(self, value: Any, phase: int = 0) -> Tensor:
        first: Tensor = value[0]
        return first


def test_a_value_that_nobody_expects_is_refused_before_it_is_sent() -> None:
    def main(world: World) -> None:
        pipe = ec.Pipeline([Grows(), First()], world.group, microbatches=2, loss_fn=mse)
        for _ in range(4):
            pipe.step(torch.ones(4), target=torch.ones(4))

    run_world("threads", main, 2)
    with pytest.raises(ec.StageError, match="Messages of this group have no tags") as caught:
        run_world(NCCL_RULES, main, 2)
    assert "stage 0 gave (float32[2] with a gradient, True) for microbatch 0" in str(caught.value)
    assert "(float32[2] with a gradient, False)" in str(caught.value)


def test_what_no_argument_tells_may_change_when_stages_or_modes_of_torch_do() -> None:
    def main(world: World) -> list[float]:
        stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
        pipe = ec.Pipeline(stages, world.group, microbatches=2, loss_fn=mse)
        x, losses = torch.ones(4, 2), []
        for step in range(12):
            stages[0].requires_grad_(not 3 <= step < 7)
            with torch.autocast("cpu", torch.bfloat16, enabled=step >= 9):
                loss = pipe.step(x, target=x, loss_everywhere=True)
            assert loss is not None
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    assert run_world(NCCL_RULES, main, 2) == run_world("threads", main, 2)
