"""A parameter that several stages have is one, also where stages are replicated or sharded."""

from functools import partial

import pytest
import torch

import echelon as ec
from echelon.comm.world import World
from tests.pipeline.models import each, train_beside
from tests.pipeline.split_models import loss_fn
from tests.pipeline.tied_stages import CLOSE, ROWS, plan, tied_stages, tokens_of
from tests.worlds import run_world

OFTEN = {"reduce_every": "microbatch"}


def trains(world: World, plan: ec.Plan) -> None:
    plain, pipe = tied_stages(plan, world)
    batches = [tokens_of(step, ROWS * plan.data_size) for step in range(4)]
    train_beside(world, plan, pipe, plain, batches, loss_fn)


PLANS: dict[str, list[ec.Plan]] = {
    "threads": [
        plan("zb-v", dp=2),  # embedding and head on one rank
        plan("zb-v", shard=2, fsdp={"min_num_params": 0}),
        plan("zb-h1", shard=2, pipeline={"recompute": True, **OFTEN}),
        plan("1f1b", shard=2, fsdp={"use_orig_params": False, "min_num_params": 0}),
    ],
    "processes": [plan("zb-v", shard=2), plan("1f1b", shard=2)],
    "gloo": [plan("1f1b", shard=2, pipeline=OFTEN), plan("zb-v", shard=2), plan("zb-h1", dp=2)],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", PLANS)
def test_stages_that_share_a_parameter_train_as_one_process_does(world: str) -> None:
    run_world(world, each, 4, ([partial(trains, plan=one) for one in PLANS[world]],))


@pytest.mark.slow
def test_a_shared_parameter_on_a_mesh_of_three_axes_trains_as_in_one_process() -> None:
    run_world("threads", trains, 8, (plan("zb-v", dp=2, shard=2),))


def test_gradients_that_are_given_up_before_they_are_complete_are_gone() -> None:
    def main(world: World) -> None:
        plain, pipe = tied_stages(plan("1f1b"), world)
        (x, y), (other, target) = tokens_of(0, ROWS), tokens_of(1, ROWS)
        for by, of in ((x, y), (other, target)):
            pipe.step(by, target=of)
            pipe.step(other, target=target, finalize=False)
            pipe.zero_grad(set_to_none=by is x)
            plain.zero_grad()
            pipe.step(by, target=of)
            loss_fn(plain(by), of).backward()
            own = dict(pipe.named_parameters())
            for name, param in plain.named_parameters():
                if name in own:
                    torch.testing.assert_close(own[name].grad, param.grad, **CLOSE)

    ec.run(main, 2)
