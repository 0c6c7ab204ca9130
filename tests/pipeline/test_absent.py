"""What is computed from a value that is not there is not there either."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.errors import UnsupportedError
from echelon.pipeline.absent import Absent, absent_copy, absent_like, missing_in
from echelon.pipeline.recall import Recall

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
    found = MIXED[name](real, absent_like((3, 3), torch.float32, CPU, "w", Recall()))
    assert isinstance(found, Absent)
    assert missing_in({"y": found}) == ["w"]
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
        write(real, absent_like((3, 3), torch.float32, CPU, "w", Recall()))
    assert torch.equal(real, torch.ones(3, 3))


def test_an_absent_module_has_no_parameters_and_tells_what_is_missing() -> None:
    layer = nn.Linear(3, 2)
    copied = absent_copy(layer, "head", Recall())
    assert missing_in(copied(torch.ones(4, 3))) == ["head.bias", "head.weight"]
    assert not [p for p in copied.parameters() if isinstance(p, nn.Parameter)]
    assert not layer.weight.is_meta
