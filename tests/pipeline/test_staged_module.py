"""The stages of a rank are a module with names of the whole model."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import StateError, UnsupportedError
from tests.pipeline.models import build, each, pipeline
from tests.reference import mse
from tests.worlds import run_world


def states_have_the_keys_of_the_whole_model_and_a_whole_one_is_loaded(world: World) -> None:
    stages = build("plain", world.size)
    model = nn.Sequential(*build("nested", world.size))
    pipe = pipeline(world, stages)
    keys = [key for key in model.state_dict() if key.startswith(f"{world.rank}.")]
    assert list(pipe.state_dict()) == keys
    pipe.load_state_dict(model.state_dict())
    for key, value in pipe.state_dict().items():
        assert torch.equal(value, model.state_dict()[key])


def a_pipeline_shows_its_schedule_its_microbatches_and_its_stages(world: World) -> None:
    stages = build("plain", world.size)
    pipe = pipeline(world, stages, schedule="gpipe")
    assert (pipe.schedule.name, pipe.schedule.num_microbatches) == ("gpipe", 4)
    assert list(pipe.stages.values()) == [stages[world.rank]]
    assert f"schedule='gpipe', stages={world.size}, microbatches=4" in repr(pipe)
    assert type(stages[world.rank]).__name__ in repr(pipe)
    modes = [stages[world.rank].training]
    for mode in (pipe.eval, pipe.train):
        mode()
        modes.append(stages[world.rank].norm.training)
    assert modes == [True, False, True]


class _Lora(nn.Module):
    """A frozen layer with an adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2, "dualpipe-v": 2}


def stages_with_nothing_to_train_train_as_in_one_process(world: World) -> None:
    """All stages of a rank, the first, the middle or the last, or none with an adapter."""
    for schedule, chunks in SCHEDULES.items():
        for frozen in range(world.size):
            for flatten in (False,) if frozen else (False, True):
                torch.manual_seed(0)
                stages: list[nn.Module] = [_Lora() for _ in range(world.size * chunks)]
                plan = ec.pipeline.schedule(schedule, len(stages), 6, world.size)
                for index in plan.stages_of(frozen):
                    plain = nn.Flatten() if flatten else nn.Linear(6, 6).requires_grad_(False)
                    stages[index] = plain
                stages = [stage.double() for stage in stages]
                model = nn.Sequential(*copy.deepcopy(stages))
                pipe = pipeline(world, stages, microbatches=6, schedule=plan)
                mine = [param for param in pipe.parameters() if param.requires_grad]
                assert (mine[0].numel() == 0) == (world.rank == frozen)
                both = [param for param in model.parameters() if param.requires_grad]
                x, y = torch.randn(12, 6).double(), torch.randn(12, 6).double()
                for params, is_pipe in ((mine, True), (both, False)):
                    optimizer = torch.optim.AdamW(params, lr=0.1)
                    for _ in range(2):
                        if is_pipe:
                            pipe.step(x, target=y)
                            ec.clip_grad_norm_(pipe, 0.1)
                        else:
                            mse(model(x), y).backward()
                            nn.utils.clip_grad_norm_(both, 0.1)
                        optimizer.step()
                        optimizer.zero_grad()
                    if is_pipe:
                        saved = pipe.optimizer_state_dict(optimizer)
                        pipe.load_optimizer_state_dict(optimizer, saved)
                whole = model.state_dict()
                for name, value in pipe.whole_state_dict().items():
                    torch.testing.assert_close(value, whole[name], rtol=1e-12, atol=1e-13)
                assert len(saved["state"]) == len(both), (schedule, frozen)


CHECKS = (
    stages_with_nothing_to_train_train_as_in_one_process,
    states_have_the_keys_of_the_whole_model_and_a_whole_one_is_loaded,
    a_pipeline_shows_its_schedule_its_microbatches_and_its_stages,
)


@pytest.mark.parametrize(("kind", "ranks"), [("threads", 2), ("threads", 3), ("gloo", 2)])
def test_stages_of_a_rank_are_a_module(kind: str, ranks: int) -> None:
    run_world(kind, each, ranks, (CHECKS,))


def test_a_pipeline_is_not_copied_or_pickled() -> None:
    def main(world: World) -> None:
        pipe = pipeline(world, build("plain", 2))
        with pytest.raises(StateError, match="copy the stages before you make the Pipeline"):
            copy.deepcopy(pipe)
        with pytest.raises(StateError, match="so it cannot be pickled"):
            pickle.dumps(pipe)

    ec.run(main, 2)


@pytest.mark.parametrize(
    "value",
    [nn.Linear(1, 1), nn.BatchNorm1d(2, affine=False), nn.Parameter(torch.ones(1)), nn.Buffer()],
)
def test_what_would_be_in_no_state_of_a_pipeline_is_refused(value: Any) -> None:
    def main(world: World) -> None:
        pipe = pipeline(world, build("plain", world.size))
        with pytest.raises(UnsupportedError, match="'head' would be in no state of the Pipeline"):
            pipe.head = value
        pipe.metric = nn.Tanh()  # it has none
        pipe.load_state_dict(pipe.state_dict())

    ec.run(main, 2)


def test_the_state_of_a_loss_is_not_that_of_a_pipeline() -> None:
    def main(world: World) -> None:
        stages = build("plain", world.size)
        loss_fn = nn.CrossEntropyLoss(weight=torch.ones(6))
        pipe = pipeline(world, stages, loss_fn=loss_fn)
        assert [*pipe.state_dict()] == [*pipeline(world, stages).state_dict()]
        pipe.load_state_dict(pipe.state_dict())

    ec.run(main, 2)
