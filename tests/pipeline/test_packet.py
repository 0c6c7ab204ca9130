"""What goes between stages: few messages, and the values that were sent."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError
from echelon.pipeline.boundary import BoundarySpec, TensorSpec, flatten
from echelon.pipeline.message import MAX_PACKED_NBYTES, StageMessage
from tests.worlds import run_world

CPU = torch.device("cpu")


def test_small_tensors_of_every_dtype_share_a_packet_and_large_ones_do_not() -> None:
    tensors = [
        torch.tensor(True),
        torch.randn(3, 2, dtype=torch.complex128),
        torch.empty(0, 4),
        torch.arange(MAX_PACKED_NBYTES + 1, dtype=torch.uint8),
        torch.randn(5).bfloat16(),
        torch.arange(MAX_PACKED_NBYTES // 8),
    ]
    forms = tuple(TensorSpec(tuple(t.shape), t.dtype, False) for t in tensors)
    packet = StageMessage(3, forms, CPU)
    assert packet.large_specs == [forms[3]]
    for room, tensor in zip(packet.views, tensors, strict=True):
        if room is not None:
            room.copy_(tensor)
    for room, tensor in zip(packet.views, tensors, strict=True):  # none lies on another
        assert room is None or torch.equal(room, tensor)
    assert packet.header.tolist() == [0, 0, 0]


@pytest.mark.parametrize("pair", [(1, True), (1, 1.0), (0.0, -0.0), ((1,), [1]), ("a", b"a")])
def test_values_that_are_equal_and_not_the_same_are_sent_again(pair: tuple[Any, Any]) -> None:
    x = torch.ones(2)
    one, other = (flatten({"x": x, "value": value}, "here")[0] for value in pair)
    assert not one.is_identical(other)
    assert one.is_identical(flatten({"x": x, "value": pair[0]}, "here")[0])
    grows = x.clone().requires_grad_()
    assert not one.is_identical(flatten({"x": grows, "value": pair[0]}, "here")[0])


class Changes(nn.Module):
    """Gives something else in each step: a large tensor, small ones, another nesting."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))
        self.step = 0

    def forward(self, x: Tensor) -> Any:
        x = x * self.w
        wide = x.expand(-1, MAX_PACKED_NBYTES // 4)  # large with one more row
        values = ([x, wide], [x, 1], [x, True], [wide, x, x], [wide, x, x], [x, wide])
        return {"all": values[self.step]}


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[str]] = []

    def forward(self, value: Any) -> Tensor:
        self.seen.append([type(one).__name__ for one in value["all"]])
        first, *rest = (one for one in value["all"] if isinstance(one, Tensor))
        total: Tensor = first.sum(-1) + sum(one.sum(-1) for one in rest)
        return total


def changes(world: World) -> tuple[int, list[float], list[list[str]]]:
    first, last = Changes(), Sums()
    pipe = ec.Pipeline([first, last], world.group, microbatches=2, loss_fn=lambda y, _: y.mean())
    sent = []
    grads = []
    for first.step in range(6):
        with ec.events.listen(sent.append):
            pipe.step(torch.ones(8, 1), target=torch.ones(8))
        grads.append(0.0 if first.w.grad is None else first.w.grad.item())
        first.w.grad = None
    mine = [e for e in sent if e.name == "collective.issue" and e.facts["rank"] == world.rank]
    return sum(e.facts["op"] == "send" for e in mine), grads, last.seen


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_what_stages_send_may_change_from_step_to_step(kind: str) -> None:
    (num_sent, grads, _), (_, _, seen) = run_world(kind, changes, 2)
    n = MAX_PACKED_NBYTES // 4
    assert grads == [1.0 + n, 1.0, 1.0, n + 2.0, n + 2.0, n + 1.0]
    assert [seen[2 * i] for i in range(4)] == [
        ["Tensor", "Tensor"],
        ["Tensor", "int"],
        ["Tensor", "bool"],
        ["Tensor"] * 3,
    ]
    # By microbatch: head, form, packet where it is new; what was announced before; large ones.
    new, large = 3, 1
    assert num_sent == 2 * (
        (new + large) + (new + large) + new + (new + large) + (1 + large) + (new + 2 * large)
    )


class Halves(NamedTuple):
    left: Tensor
    factor: float


def test_values_of_classes_that_both_sides_can_find_are_sent() -> None:
    value = Halves(torch.ones(2), 0.5), [None, {"largest": torch.randn(3, 2).max(1)}]
    form, tensors = flatten(value, "stage 0")
    found = BoundarySpec.from_bytes(form.to_bytes(), 0)
    assert found.is_identical(form)
    (halves, rest) = found.unflatten(tensors)
    assert (type(halves), halves.factor) == (Halves, 0.5)
    assert torch.equal(rest[1]["largest"].indices, value[1][1]["largest"].indices)


def test_values_that_cannot_be_sent_are_named_with_what_to_do() -> None:
    local = NamedTuple("Local", [("x", Tensor)])  # noqa: UP014
    form, _ = flatten(local(torch.ones(1)), "stage 0")
    with pytest.raises(ArgumentError, match=r"Local.*define the class at the top of a module"):
        form.to_bytes()
    with pytest.raises(ArgumentError, match=r"stage 0 gave a tensor of layout torch.sparse_coo"):
        flatten(torch.eye(2).to_sparse(), "stage 0")
