"""Parts end to end, and slices of them."""

import pytest
import torch
from torch import Tensor

from echelon.errors import StateError
from tests.parts import build, looks


def joined(param: Tensor) -> Tensor:
    return torch.cat([param.detach().view(-1), param.detach().view(-1) * 2])


def test_a_slice_of_whole_parameters_is_a_part_and_another_one_is_refused() -> None:
    assert looks(lambda p: torch.equal(joined(p)[15:30], p.detach().view(-1) * 2))
    torch.testing.assert_close(looks(lambda p: joined(p).sum()), build().weight.detach().sum() * 3)
    with pytest.raises(StateError, match="needs the whole tensor"):
        looks(lambda p: joined(p)[1:15])
