"""What a wrapped model refuses to become, and what tools see that look at it."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import echelon as ec
from echelon.errors import UnsupportedError

WRAPPERS: dict[str, Callable[[nn.Module, ec.Group], nn.Module]] = {
    "DDP": ec.DDP,
    "FSDP": lambda module, group: ec.FSDP(module, group, units=ec.units.whole()),
}


def wrapped(wrapper: str, world: ec.World) -> nn.Module:
    return WRAPPERS[wrapper](nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), world.group)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("convert", "what"),
    [
        (lambda model: model.double(), "torch.float64 on cpu"),
        (lambda model: model.to(torch.bfloat16), "torch.bfloat16 on cpu"),
        (lambda model: model.to("meta"), "torch.float32 on meta"),
    ],
)
def test_it_is_not_converted(
    wrapper: str, convert: Callable[[nn.Module], object], what: str
) -> None:
    def main(world: ec.World) -> None:
        model = wrapped(wrapper, world)
        with pytest.raises(ec.StateError, match=f"'0.weight' cannot become {what}"):
            convert(model)
        model(torch.randn(4, 2)).sum().backward()  # and trains on

    ec.run(main, 2)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_conversion_that_changes_nothing_is_none(wrapper: str) -> None:
    def main(world: ec.World) -> bool:
        model = wrapped(wrapper, world)
        weight = next(model.parameters()).data_ptr()
        same = model.float().to("cpu").to(torch.float32) is model
        return same and next(model.parameters()).data_ptr() == weight

    assert ec.run(main, 2) == [True, True]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "keep",
    [pickle.dumps, copy.copy, lambda model: torch.save(model, io.BytesIO())],
    ids=["pickle", "copy", "save"],
)
def test_it_is_not_pickled(wrapper: str, keep: Callable[[nn.Module], object]) -> None:
    def main(world: ec.World) -> None:
        with pytest.raises(ec.StateError, match=r"save its state_dict\(\)"):
            keep(wrapped(wrapper, world))

    ec.run(main, 2)


# What trainers and other tools see ----------------------------------------------------------------


class Named(nn.Module):
    """A forward with names that a trainer looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        loss = self.layer(input_ids).square().mean()
        return loss if labels is None else {"loss": loss - labels.mean()}


@pytest.mark.parametrize("wrapper", [ec.DDP, ec.FSDP])
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


@pytest.mark.parametrize("wrapper", [ec.DDP, ec.FSDP])
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
    for wrapper in (ec.DDP, ec.FSDP):
        trainer = object.__new__(transformers.Trainer)
        trainer.model = wrapper(Named(), world.group)
        trainer.label_names, trainer._signature_columns = ["labels"], None
        trainer._set_signature_columns_if_needed()
        assert {"input_ids", "labels"} <= {*trainer._signature_columns}


@pytest.mark.slow
def test_the_trainer_of_transformers_drops_no_column_of_a_wrapped_model() -> None:
    ec.run(columns_of_trainer, 1)


def check_other_ddp(world: ec.World) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for wrapper in (ec.DDP, ec.FSDP):
        options = {} if wrapper is ec.DDP else {"min_num_params": 0}
        model = wrapper(Named(), world.group, **options)
        with pytest.raises(UnsupportedError, match=r"Trainer of transformers and prepare\(\)"):
            nn.parallel.DistributedDataParallel(model)
        model(torch.ones(2, 3)).backward()
    dist.destroy_process_group()


def test_pytorchs_ddp_does_not_wrap_ours() -> None:
    ec.run(check_other_ddp, 2, "processes")


def check_attributes(world: ec.World, wrapper: str) -> None:
    model = wrapped(wrapper, world)
    inner = type(model.module).__name__
    text = f"'{wrapper}' object has no attribute 'joined', and neither has the '{inner}'"
    with pytest.raises(AttributeError, match=text):
        model.joined  # noqa: B018
    assert "training" in dict(inspect.getmembers(model))


class Shifted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale, self._group = 1.0, "of the module"
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.shift


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_attribute_of_the_module_is_set_and_deleted_in_the_module(wrapper: str) -> None:
    def main(world: ec.World) -> None:
        model = WRAPPERS[wrapper](Shifted(), world.group)
        model.scale *= 0
        model.shift = model.shift + 3
        assert model(torch.ones(1, 2)).tolist() == [[3, 3]]
        assert model.state_dict()["shift"].tolist() == [3, 3]
        assert (model._group, model.module._group) == (world.group, "of the module")
        del model.scale
        assert not hasattr(model.module, "scale")
        model.bias = nn.Parameter(torch.ones(2))
        with pytest.raises(ec.StateError, match="bias"):
            model(torch.ones(1, 2))

    ec.run(main, 2)


REGISTRATIONS: list[tuple[Callable[[Any], object], str]] = [
    (lambda model: model.register_buffer("seen", torch.ones(1)), "seen"),
    (lambda model: model.register_buffer("shift", torch.ones(2)), "shift"),
    (lambda model: setattr(model, "seen", nn.Buffer(torch.ones(1))), "seen"),
    (lambda model: model.register_parameter("w", nn.Parameter(torch.ones(1))), "w"),
    (lambda model: setattr(model, "w", nn.Parameter(torch.ones(1))), "w"),
    (lambda model: model.register_module("head", nn.Linear(1, 1)), "head.weight"),
    (lambda model: setattr(model, "head", nn.Linear(1, 1)), "head.weight"),
]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("register", "key"), REGISTRATIONS)
def test_what_is_registered_in_a_wrapper_is_state_of_the_module(
    wrapper: str, register: Callable[[Any], object], key: str
) -> None:
    def main(world: ec.World) -> None:
        model, plain = WRAPPERS[wrapper](Shifted(), world.group), Shifted()
        for one in (model, plain):
            torch.manual_seed(0)
            register(one)
        assert list(model.state_dict()) == list(plain.state_dict())
        assert torch.equal(model.state_dict()[key], plain.state_dict()[key])
        name = key.split(".")[0]
        assert getattr(model, name) is getattr(model.module, name)
        if isinstance(plain.state_dict(keep_vars=True)[key], nn.Parameter):
            with pytest.raises(ec.StateError, match=f"'{key}' was added"):
                model(torch.ones(1, 2))
        delattr(model, name)
        assert not hasattr(model.module, name)

    ec.run(main, 2)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_plain_value_that_the_module_has_not_is_of_the_wrapper_until_a_module_replaces_it(
    wrapper: str,
) -> None:
    def main(world: ec.World) -> None:
        model = WRAPPERS[wrapper](Shifted(), world.group)
        model.head = None
        assert not hasattr(model.module, "head")
        model.head = nn.Tanh()
        assert model.head is model.module.head

    ec.run(main, 1)


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP"])
def test_attributes_can_all_be_read_and_one_that_is_missing_names_the_wrapper(wrapper: str) -> None:
    ec.run(check_attributes, 2, args=(wrapper,))
