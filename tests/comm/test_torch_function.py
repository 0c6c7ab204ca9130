"""Functions whose calls of torch no mode sees."""

import torch
from torch.overrides import BaseTorchFunctionMode

from echelon.comm.torch_function import without_torch_function


class _Seen(BaseTorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)


def test_a_decorated_function_runs_unseen_by_modes_and_is_still_itself() -> None:
    @without_torch_function
    def total(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return torch.sum(x) * scale

    with _Seen() as seen:
        result = total(torch.ones(3), scale=2.0)
        torch.sum(result)
    assert result == 6.0
    assert seen.names == ["ones", "sum"]
    assert total.__name__ == "total"
