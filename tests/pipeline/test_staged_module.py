"""The stages of a rank are a module with names of the whole model."""

import copy
import pickle

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import StateError
from tests.pipeline.models import build, each, pipeline
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


CHECKS = (
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
