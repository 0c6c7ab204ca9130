"""Copies and views of parts; what a user keeps of ``.data`` is his own."""

import torch
from torch import Tensor

import echelon as ec
from tests.parts import looks


def test_what_is_kept_of_data_is_not_overwritten() -> None:
    def exchange(param: Tensor) -> list[bool]:
        old, before = param.data, param.detach().clone()
        view = old.view(-1)
        param.data = torch.zeros_like(param)
        found = [torch.equal(old, before), torch.equal(view, before.view(-1))]
        found.append(not param.detach().any())
        param.data = old
        return [*found, torch.equal(param, before)]

    for layout in ("flat", "rows"):
        assert looks(exchange, layout) == [True] * 4


def test_a_view_of_another_shape_is_a_part_of_that_shape() -> None:
    def shapes(param: Tensor) -> list[tuple[int, ...]]:
        views = (
            param.view(-1),
            param.reshape(3, 5),
            param.flatten(),
            param.detach().view_as(param),
        )
        return [tuple(view.shape) for view in views]

    assert looks(shapes, "rows") == [(15,), (3, 5), (15,), (5, 3)]
    assert looks(lambda p: tuple(ec.local_shard(p.view(-1)).shape), "rows") == (6,)
