"""Numbers of parts are those of the whole, whatever the dtype and where a rank has no element."""

import pytest
import torch

from echelon.errors import StateError
from tests.parts import build, looks

WHOLE = build().weight.detach()


@pytest.mark.parametrize("name", ["sum", "mean", "prod", "max", "min", "amax", "std", "var"])
def test_a_number_is_that_of_the_whole(name: str) -> None:
    def look(param: torch.Tensor) -> torch.Tensor:
        return getattr(param.detach(), name)()

    torch.testing.assert_close(looks(look), getattr(WHOLE, name)())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32, torch.bool])
def test_the_dtype_is_that_of_torch(dtype: torch.dtype) -> None:
    found = looks(lambda p: ((p.detach() * 9).to(dtype).sum(), (p.detach() * 9).to(dtype).max()))
    whole = (WHOLE * 9).to(dtype)
    for value, wanted in zip(found, (whole.sum(), whole.max()), strict=True):
        torch.testing.assert_close(value, wanted)


def test_a_number_along_rows_is_a_part_and_along_columns_is_refused() -> None:
    torch.testing.assert_close(
        looks(lambda p: p.detach().sum(1).norm(), "rows"), WHOLE.sum(1).norm()
    )
    for layout, dim in (("rows", 0), ("flat", 1), ("flat", 0)):
        with pytest.raises(StateError, match="elements of other ranks"):
            looks(lambda p, dim=dim: p.detach().sum(dim), layout)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("name", ["max", "min"])
def test_values_with_indices_are_refused_for_a_vector_too(name: str, dim: int) -> None:
    with pytest.raises(StateError, match=f"{name}\\(\\) along a dim"):
        looks(lambda p: getattr(p.detach().view(-1), name)(dim))


def test_a_rank_without_elements_takes_part() -> None:
    for row in (0, 4):
        assert looks(lambda p, row=row: (p.detach().view(-1) * 0 + row).max().item()) == row
