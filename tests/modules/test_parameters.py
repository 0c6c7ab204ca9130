"""Who reduces a parameter, and what a wrapped model may change: one owner, the same parameters."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm import streams
from echelon.modules.parameters import LateAnswer, ModuleSnapshot, ParameterGuard

WRAPPERS: dict[str, Callable[[nn.Module, ec.Group], nn.Module]] = {
    "DDP": ec.DDP,
    "FSDP": lambda module, group: ec.FSDP(module, group, units=ec.units.by_type(nn.Linear)),
}


OWNERS = {
    "DDP": ec.DDP,
    "manual DDP": lambda module, group: ec.DDP(module, group, sync="manual"),
    "FSDP": ec.FSDP,
}


def model() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].bias.requires_grad_(False)
    return net


def replace(net: nn.Sequential) -> None:
    net[0].weight = nn.Parameter(torch.ones(2, 2))


def add(net: nn.Sequential) -> None:
    net[0].extra = nn.Parameter(torch.ones(2))


def add_module(net: nn.Sequential) -> None:
    net.append(nn.Linear(2, 2))


def swap_module(net: nn.Sequential) -> None:
    net[0] = nn.Linear(2, 2)


def convert(net: nn.Sequential) -> None:
    net.double()


def unfreeze(net: nn.Sequential) -> None:
    net[1].bias.requires_grad_(True)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (replace, "parameter '0.weight' was added or replaced"),
        (add, "parameter '0.extra' was added or replaced"),
        (add_module, "parameter '2.weight' was added or replaced"),
        (swap_module, "parameter '0.weight' was added or replaced"),
        (convert, "parameter '0.weight' was converted from torch.float32 to torch.float64"),
        (unfreeze, "parameter '1.bias' was frozen, and unfrozen"),
    ],
)
def test_other_parameters_are_refused(
    wrapper: str, change: Callable[[nn.Sequential], None], sentence: str
) -> None:
    def main(world: ec.World) -> None:
        net = model()
        wrapped = WRAPPERS[wrapper](net, world.group)
        wrapped(torch.ones(1, 2)).sum().backward()
        wrapped.zero_grad()
        change(net)
        with pytest.raises(ec.StateError, match=f"^{sentence}.* after {wrapper} wrapped"):
            wrapped(torch.ones(1, 2))

    ec.run(main, 2)


def test_what_needs_no_reduction_may_change() -> None:
    net = model()
    census = ParameterGuard(net, "a test")
    net.append(nn.Tanh())
    net[0].register_parameter("constant", nn.Parameter(torch.ones(1), requires_grad=False))
    net[0].weight.requires_grad_(False)
    census.check()
    net[0].weight.requires_grad_(True)  # it was trainable when it was counted
    census.check()
    del net[1]
    census.check()
    net[0].constant.requires_grad_(True)
    with pytest.raises(ec.StateError, match=r"'0.constant' was added"):
        census.check()


# Who reduces a parameter -----------------------------------------------------------------------


@pytest.mark.parametrize("outer", OWNERS)
@pytest.mark.parametrize("inner", OWNERS)
def test_neither_a_part_nor_the_whole_is_wrapped_again(outer: str, inner: str) -> None:
    def main(world: ec.World) -> None:
        for first, second in (
            (lambda net: net, lambda net: net),
            (lambda net: net, lambda net: net[0]),
            (lambda net: net[0], lambda net: net),
        ):
            net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            kept = OWNERS[inner](first(net), world.group)
            name = inner.split()[-1]
            text = f"weight' belongs to {name} already: wrap the plain module once"
            for again in (second(net), kept, nn.Sequential(kept)):
                with pytest.raises(ec.ArgumentError, match=text):
                    OWNERS[outer](again, world.group)

    ec.run(main, 2)


def test_what_a_ddp_has_left_can_be_wrapped_again() -> None:
    def main(world: ec.World) -> None:
        net = nn.Linear(2, 2)
        ec.DDP(net, world.group).unwrap()
        wrapped = ec.DDP(net, world.group)
        ec.DDP(copy.deepcopy(net), world.group)
        del wrapped
        gc.collect()
        ec.FSDP(net, world.group)

    ec.run(main, 1)


def test_copies_and_ignored_parameters_belong_to_nobody_else() -> None:
    def main(world: ec.World) -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        wrapped = ec.FSDP(net, world.group, ignored=[net[1]])
        ec.DDP(net[1], world.group)
        clone = copy.deepcopy(wrapped)
        with pytest.raises(ec.ArgumentError, match="belongs to FSDP already"):
            ec.DDP(clone.module, world.group)

    ec.run(main, 2)


def put_in_place_of_none(layer: nn.Linear) -> None:
    """As many entries as before, of which one has another name."""
    del layer.off
    layer.register_parameter("gain", nn.Parameter(torch.ones(1)))


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "another parameter": lambda net: setattr(net[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "one parameter more": lambda net: net.register_parameter("scale", nn.Parameter(torch.ones(1))),
    "no bias": lambda net: setattr(net[0], "bias", None),
    "a parameter instead of none": lambda net: put_in_place_of_none(net[0]),
    "another layer": lambda net: net.__setitem__(1, nn.Linear(2, 2)),
    "one layer more": lambda net: net.append(nn.Linear(2, 2)),
    "no last layer": lambda net: net.__delitem__(1),
    "other dtypes": lambda net: net.double(),
    "a frozen parameter": lambda net: net[1].requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_snapshot_is_current_until_the_module_changes(change: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].register_parameter("off", None)
    snapshot = ModuleSnapshot(net)
    net(torch.ones(1, 2)).sum().backward()
    assert snapshot.is_current()
    CHANGES[change](net)
    assert not snapshot.is_current()
    snapshot.take(net)
    assert snapshot.is_current()
    assert list(map(id, snapshot.params)) == list(map(id, net.parameters()))


class ReadingWaits(streams.PlainDevice):
    """A device on which reading a value waits."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.reading_waits = True


def test_no_rank_decides_by_its_device_when_it_reads_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where reading waits, all ranks read one reduction later, whether their devices are ready."""

    def ready(self: object) -> bool:
        raise AssertionError("asked whether the device is ready")

    monkeypatch.setattr(streams.StreamEvent, "query", ready)
    for waits in (False, True):
        kind = ReadingWaits if waits else streams.PlainDevice
        monkeypatch.setitem(streams.kinds, "cpu", kind)
        answer = LateAnswer()
        answer.take(torch.tensor([1.0]))
        assert answer.is_yes(at_once=False) is not waits
        assert answer.is_yes() is waits
        assert not answer.is_yes()
