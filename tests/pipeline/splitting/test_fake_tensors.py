"""What is computed from a value that is not there is not there either."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import echelon as ec
from echelon.errors import UnsupportedError
from echelon.pipeline.splitting.fake_tensors import (
    FakeTensor,
    FakeTensorCache,
    fake_copy,
    fake_tensor,
    missing_names,
)
from echelon.pipeline.splitting.split import split
from tests.pipeline.split_models import LENGTH, VOCABULARY, Decoder
from tests.worlds import run_world

CPU = torch.device("cpu")
MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda real, absent: F.linear(real, absent),
    "matmul": lambda real, absent: real @ absent.T,
    "add": lambda real, absent: real + absent,
    "index": lambda real, absent: real[absent[0].long()],
    "embedding": lambda real, absent: F.embedding(absent.long(), real),
    "stack": lambda real, absent: torch.stack([real, absent]),
    "number": lambda real, absent: absent * torch.tensor(2.0),
    "beside": lambda real, absent: absent + torch.arange(3, device=absent.device),
    "like": lambda real, absent: real * torch.ones_like(absent),
    "moved": lambda real, absent: absent.to("cpu").to(real) + absent.cpu(),
    "second of a pair": lambda real, absent: absent.max(0)[1],
}


@pytest.mark.parametrize("name", MIXED)
def test_absence_spreads(name: str) -> None:
    # Several of these give numbers out of nothing for a plain meta tensor.
    real = torch.ones(3, 3)
    found = MIXED[name](real, fake_tensor((3, 3), torch.float32, CPU, "w", FakeTensorCache()))
    assert isinstance(found, FakeTensor)
    assert missing_names({"y": found}) == ["w"]
    same = MIXED[name](real, torch.ones(3, 3)) if name != "index" else found
    assert found.shape == same.shape
    assert found.device == CPU


@pytest.mark.parametrize(
    "write",
    [
        lambda real, absent: real.add_(absent),
        lambda real, absent: real.__setitem__(0, absent[0]),
        lambda real, absent: torch.add(real, absent, out=real),
        lambda real, absent: real.__iadd__(absent),
        lambda real, absent: F.relu_(real).masked_fill_(absent > 0, 0.0),
    ],
)
def test_a_real_tensor_cannot_be_written_from_an_absent_one(write) -> None:
    real = torch.ones(3, 3)
    with pytest.raises(UnsupportedError, match="only a stage before it has"):
        write(real, fake_tensor((3, 3), torch.float32, CPU, "w", FakeTensorCache()))
    assert torch.equal(real, torch.ones(3, 3))


def test_an_absent_module_has_no_parameters_and_tells_what_is_missing() -> None:
    layer = nn.Linear(3, 2)
    copied = fake_copy(layer, "head", FakeTensorCache())
    assert missing_names(copied(torch.ones(4, 3))) == ["head.bias", "head.weight"]
    assert not [p for p in copied.parameters() if isinstance(p, nn.Parameter)]
    assert not layer.weight.is_meta


# --- what is remembered ------------------------------------------------------------------------


class MetaOperations(TorchDispatchMode):
    """Counts what is computed on the meta device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]
        self.count += any(leaf.is_meta for leaf in leaves)
        return found


def test_a_steady_stage_computes_nothing_absent_and_a_new_shape_once() -> None:
    torch.manual_seed(0)
    model = Decoder().double()
    first, second, last = split(model, 3)
    counts = []
    for rows in (2, 2, 3, 3, 2):
        tokens = torch.randint(VOCABULARY, (rows, LENGTH))
        expected = model(tokens)
        value = first(tokens)
        with MetaOperations() as operations:
            found = last(second(value))
        counts.append(operations.count)
        assert torch.equal(found, expected)
    assert counts[0] > 0
    assert counts[2] > 0
    assert [counts[1], counts[3], counts[4]] == [0, 0, 0]


def test_equal_calls_with_other_real_values_are_not_taken_for_each_other() -> None:
    cache = FakeTensorCache()
    absent = fake_tensor((3,), torch.float32, CPU, "w", cache)

    def run() -> tuple[Tensor, Tensor]:
        cache.begin_forward()
        return absent * torch.ones(3), absent * torch.zeros(3)

    once, again = run(), run()
    assert once[0] is again[0]
    assert once[1] is again[1]
    assert once[0] is not once[1]


def test_an_absent_tensor_that_is_written_is_not_remembered() -> None:
    cache = FakeTensorCache()
    absent = fake_tensor((3,), torch.float32, CPU, "w", cache)

    def run() -> Tensor:
        cache.begin_forward()
        return (absent * 2).unsqueeze_(0)

    assert [tuple(run().shape) for _ in range(3)] == [(1, 3)] * 3


class Experts(nn.Module):
    """Looks into values, which the stages before do not have."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + torch.nonzero(scale).sum()


class ScaleAfterBlocks(nn.Module):
    """A model whose blocks need what only the last stage has, if the split is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(Experts() for _ in range(4))
        self.scale = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.first(x), self.scale.weight * 2
        for block in self.blocks:
            x = block(x, scale)
        return x


def step_of_experts(world: ec.World) -> None:
    stages = ec.pipeline.split(ScaleAfterBlocks(), 2, prefix=["first"], suffix=["scale"])
    pipe = ec.Pipeline(stages, world.group, microbatches=1, loss_fn=nn.functional.mse_loss)
    pipe.step(torch.ones(2, 2), target=torch.zeros(2, 2))


def test_an_operation_without_shapes_names_what_the_stage_lacks_and_what_to_do():
    with pytest.raises(ec.StageError) as caught:
        run_world("threads", step_of_experts, 2)
    assert "nonzero() depends on ['scale.weight'], which other stages have" in str(caught.value)
    assert "name them with prefix=[...] and suffix=[...]" in str(caught.value)
