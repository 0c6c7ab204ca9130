"""What a wrapped model refuses to become."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import echelon as ec

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
