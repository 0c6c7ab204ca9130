"""Law *No hang* for pipelines: what stops one rank ends all of them, with its place, in time."""

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import (
    ArgumentError,
    DeadlockError,
    EchelonError,
    ModelMismatch,
    RankFailed,
    StageError,
)
from tests.comm.gloo_ranks import Died
from tests.pipeline.models import batch, build, mse
from tests.worlds import KINDS, run_world

RANKS, FAULTY = 3, 1  # the stage in the middle, so that both its neighbours hear of it
MOST_S = 20.0  # of a whole run; a hang would take 60 s, and the machine may be busy


class TooWarm(Exception):
    """What is wrong with a stage here."""


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, after: list[int]) -> Tensor:
        ctx.after = after
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        strike(ctx.after)
        return grad, None


def strike(after: list[int]) -> None:
    """Raise where the count comes to its end."""
    after[0] -= 1
    if after[0] < 0:
        raise TooWarm("too warm")


class Raises(nn.Module):
    """Raises in the third forward, or in the third backward."""

    def __init__(self, *, backward: bool = False) -> None:
        super().__init__()
        self.after, self.backward = [2], backward

    def forward(self, x: Tensor) -> Tensor:
        if not self.backward:
            strike(self.after)
            return x
        return _Raises.apply(x, self.after)  # type: ignore[no-untyped-call]


class Dies(nn.Module):
    """Is killed in the third forward."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def warm_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cannot be computed from the third microbatch on, which alone has large targets."""
    if target.max() > 100:
        raise TooWarm("too warm")
    return mse(output, target)


def text_loss(output: Tensor, target: Tensor) -> Any:
    return "text"


# --- faults --------------------------------------------------------------------------------------

Build = Callable[[World], tuple[list[nn.Module], dict[str, Any]]]


def with_stage(add: nn.Module, schedule: str = "1f1b") -> Build:
    def make(world: World) -> tuple[list[nn.Module], dict[str, Any]]:
        stages = build("plain", RANKS)
        stages[FAULTY] = nn.Sequential(stages[FAULTY], add)
        return stages, {"schedule": schedule}

    return make


def with_loss(loss: Callable[[Tensor, Tensor], Any]) -> Build:
    return lambda world: (build("plain", RANKS), {"loss_fn": loss})


def with_gradient_of_inference(world: World) -> tuple[list[nn.Module], dict[str, Any]]:
    """Such memory cannot be added to, which is what a W does."""
    stages = build("plain", RANKS)
    weight = stages[FAULTY].up.weight
    with torch.inference_mode():
        weight.grad = torch.zeros_like(weight)
    return stages, {"schedule": "zb-h1"}


# By name: how it is built, on which rank it falls, and how the sentence of its error goes.
FAULTS: dict[str, tuple[Callable[[], Build], int, str]] = {
    "F": (
        lambda: with_stage(Raises()),
        1,
        r"stage 1 raised TooWarm for microbatch 2, in action 1F2: too warm. "
        r"Its last actions: .*1F1",
    ),
    "B": (
        lambda: with_stage(Raises(backward=True)),
        1,
        r"stage 1 raised TooWarm for microbatch 2, in action 1B2: too warm. "
        r"Its last actions: .*1B1 .*1F3",
    ),
    "I": (
        lambda: with_stage(Raises(backward=True), "zb-h1"),
        1,
        r"stage 1 raised TooWarm for microbatch 2, in action 1I2: too warm. "
        r"Its last actions: .*1I1 .*1W0",
    ),
    "W": (
        lambda: with_gradient_of_inference,
        1,
        r"stage 1 raised RuntimeError for microbatch 0, in action 1W0: .*"
        r"Its last actions: .*1I0",
    ),
    "loss": (
        lambda: with_loss(warm_loss),
        2,
        r"stage 2 raised TooWarm for microbatch 2, in action 2F2: too warm. "
        r"Its last actions: .*2B1",
    ),
    "no loss": (
        lambda: with_loss(text_loss),
        2,
        r"stage 2 raised ArgumentError for microbatch 0, in action 2F0: loss_fn gave 'text'; it "
        r"must give a tensor with one number",
    ),
}
CASES = {
    "threads": list(FAULTS),
    "processes": ["B", "W"],
    "gloo": ["F", "loss"],
}


def noted(world: World, folder: str, body: Callable[[], None]) -> None:
    """Run ``body``, and leave a note of how it ended."""
    try:
        body()
    except EchelonError as error:
        text = "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
        (Path(folder) / str(world.rank)).write_text(text)
        raise


def meets(world: World, name: str, folder: str) -> None:
    def body() -> None:
        stages, options = FAULTS[name][0]()(world)
        pipe = ec.Pipeline(stages, world.group, **{"microbatches": 4, "loss_fn": mse, **options})
        x, y = batch(8)
        y[4:] += 1000 * (name == "loss")
        pipe.step(x, target=y)
        # A rank that needed nothing more of the others hears of it as soon as it does.
        pipe.step(x, target=y)

    noted(world, folder, body)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in CASES[kind]])
def test_what_a_stage_raises_ends_every_rank_with_its_place(kind, name, tmp_path) -> None:
    _, faulty, sentence = FAULTS[name]
    start_s = time.monotonic()
    with pytest.raises(StageError, match=sentence):
        run_world(kind, meets, RANKS, (name, str(tmp_path)))
    assert time.monotonic() - start_s < MOST_S
    for rank in range(RANKS):
        name_of_error, text = (tmp_path / str(rank)).read_text().split("\n", 1)
        assert name_of_error == ("StageError" if rank == faulty else "RankFailed")
        assert re.search(sentence, text)
        assert rank == faulty or where_it_was(rank, text)


def where_it_was(rank: int, text: str) -> bool:
    """Whether a rank that was not at fault says what it was doing."""
    in_a_step = re.search(rf"in action {rank}\w+, after (none|{rank}\w+)", text)
    return in_a_step is not None or "'rows of the batch'" in text


# --- ranks that are gone -------------------------------------------------------------------------


def loses(world: World, how: str, folder: str) -> None:
    def body() -> None:
        stages = build("plain", RANKS)
        if how == "killed":
            stages[FAULTY] = nn.Sequential(stages[FAULTY], Dies())
        pipe = ec.Pipeline(stages, world.group, microbatches=4, loss_fn=mse)
        x, y = batch(8)
        for step in range(2):
            if how == "leaves" and step and world.rank == FAULTY:
                return
            pipe.step(x, target=y)

    noted(world, folder, body)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("threads", "leaves"),
        ("processes", "killed"),
        ("processes", "leaves"),
        ("gloo", "killed"),
        ("gloo", "leaves"),
    ],
)
def test_a_rank_that_is_gone_ends_the_others_with_what_they_were_doing(kind, how, tmp_path) -> None:
    start_s = time.monotonic()
    with pytest.raises((RankFailed, DeadlockError, Died)):
        run_world(kind, loses, RANKS, (how, str(tmp_path)))
    assert time.monotonic() - start_s < MOST_S
    words = "died" if how == "killed" else "(returned|closed its world)"
    for rank in {*range(RANKS)} - {FAULTY}:
        name_of_error, text = (tmp_path / str(rank)).read_text().split("\n", 1)
        assert name_of_error in ("RankFailed", "DeadlockError")
        assert re.search(f"rank {FAULTY} {words}", text)
        assert where_it_was(rank, text)


# --- ranks that do not agree ---------------------------------------------------------------------


def disagrees(world: World) -> None:
    """Each is an error on every rank, after which the world can be used."""
    stages = build("plain", world.size)
    own_order = ec.pipeline.schedule("gpipe", 3, 4, 3)
    if world.rank == 1:
        own_order = replace(ec.pipeline.schedule("1f1b", 3, 4, 3), name=own_order.name)
    for what, options in (
        ("option 'schedule'", {"schedule": ["gpipe", "1f1b", "1f1b"][world.rank]}),
        ("the schedule", {"schedule": own_order}),
        ("option 'microbatches'", {"microbatches": [4, 4, 5][world.rank]}),
        ("option 'loss_reduction'", {"loss_reduction": ["mean", "mean", "sum"][world.rank]}),
        ("option 'reduce_every'", {"reduce_every": ["step", "microbatch", "step"][world.rank]}),
        ("option 'window_nbytes'", {"window_nbytes": [0, 0, 1][world.rank]}),
        ("option 'stages'", {"stages": [*stages, *([stages[0]] if world.rank == 1 else [])]}),
    ):
        with pytest.raises(ModelMismatch, match=rf"(?s){what}.*rank \d: .*differs"):
            ec.Pipeline(
                group=world.group,
                **{"stages": stages, "microbatches": 4, "loss_fn": mse, **options},
            )
    pipe = ec.Pipeline(stages, world.group, microbatches=4, loss_fn=mse)
    x, y = batch(8)
    for given, target, words in (
        ([x[: 8 - world.rank]], y[: 8 - world.rank], r"length, by rank: \{0: 8, 2: 6\}"),
        ([] if world.rank == 0 else [x], y, "rank 0 must provide input"),
        ([x], None if world.rank == 2 else y, "rank 2 must provide a target"),
        ([torch.tensor(1.0) if world.rank == 0 else x], y, "at least 1 dimension"),
        ([x[:3]], y[:3], "3 rows for 4 microbatches"),
    ):
        with pytest.raises(ArgumentError, match=words):
            pipe.step(*given, target=target)
    loss = pipe.step(x, target=y, loss_everywhere=True)
    assert loss is not None
    torch.testing.assert_close(loss, mse(nn.Sequential(*stages)(x), y).detach())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_do_not_agree_are_told_and_can_go_on(kind) -> None:
    run_world(kind, disagrees, RANKS)


def lacks_its_stage(world: World, folder: str) -> None:
    def body() -> None:
        stages: list[nn.Module | None] = [*build("plain", world.size)]
        if world.rank == FAULTY:
            stages[FAULTY] = None
        ec.Pipeline(stages, world.group, microbatches=4, loss_fn=mse)

    noted(world, folder, body)


def test_a_rank_without_its_stage_ends_every_rank(tmp_path) -> None:
    words = f"stage {FAULTY} is None on rank {FAULTY}"
    with pytest.raises(ArgumentError, match=words):
        run_world("threads", lacks_its_stage, RANKS, (str(tmp_path),))
    for rank in {*range(RANKS)} - {FAULTY}:
        assert (
            (tmp_path / str(rank))
            .read_text()
            .startswith(f"RankFailed\nrank {FAULTY} raised ArgumentError: {words}")
        )
