"""Tools that look at a wrapped model see the plain one, and do not wrap it a second time."""

import copy
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import echelon as ec
from echelon.errors import UnsupportedError
from tests.worlds import run_world

WRAPPERS = (ec.DDP, ec.FSDP)


class Named(nn.Module):
    """A forward with names that a trainer looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        loss = self.layer(input_ids).square().mean()
        return loss if labels is None else {"loss": loss - labels.mean()}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_keeps_the_signature_of_its_forward(wrapper: Any) -> None:
    def main(world: ec.World) -> None:
        plain = Named()
        model = wrapper(plain, world.group)
        for one in (model, copy.deepcopy(model)):
            assert inspect.signature(one.forward) == inspect.signature(plain.forward)
            assert list(inspect.signature(one.forward).parameters) == ["input_ids", "labels"]
            one(torch.ones(2, 3), labels=torch.ones(2))["loss"].backward()
            assert one.get_parameter("layer.weight").grad is not None
        assert wrapper.forward.__doc__ == model.forward.__doc__

    ec.run(main, 2)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_that_is_dropped_is_freed(wrapper: Any) -> None:
    def main(world: ec.World) -> None:
        model = wrapper(Named(), world.group)
        model(torch.ones(2, 3)).backward()
        found = weakref.ref(model)
        del model
        gc.collect()
        assert found() is None

    ec.run(main, 1)


def columns_of_trainer(world: ec.World) -> None:
    transformers = pytest.importorskip("transformers")
    for wrapper in WRAPPERS:
        trainer = object.__new__(transformers.Trainer)
        trainer.model = wrapper(Named(), world.group)
        trainer.label_names, trainer._signature_columns = ["labels"], None
        trainer._set_signature_columns_if_needed()
        assert {"input_ids", "labels"} <= {*trainer._signature_columns}


def test_the_trainer_of_transformers_drops_no_column_of_a_wrapped_model() -> None:
    ec.run(columns_of_trainer, 1)


def check_other_ddp(world: ec.World) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for wrapper in WRAPPERS:
        model = wrapper(
            Named(), world.group, **({} if wrapper is ec.DDP else {"min_num_params": 0})
        )
        with pytest.raises(UnsupportedError, match=r"Trainer of transformers and prepare\(\)"):
            nn.parallel.DistributedDataParallel(model)
        model(torch.ones(2, 3)).backward()
    dist.destroy_process_group()


def test_pytorchs_ddp_does_not_wrap_ours() -> None:
    run_world("processes", check_other_ddp, 2)
