"""Counts of references show each way to hold memory, and its end."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.modules.held_memory import count_references


@pytest.mark.parametrize(
    "hold",
    [lambda view: view, lambda view: view[:1], Tensor.detach, Tensor.numpy],
    ids=["itself", "a view", "detached", "an array"],
)
def test_who_holds_a_view_is_counted_until_it_is_dropped(hold: Callable[[Tensor], Any]) -> None:
    flat = torch.zeros(8)
    views = list(flat.split(4))
    ours = count_references(flat, views)
    held = [hold(views[1])]
    assert count_references(flat, views) != ours
    held.clear()
    assert count_references(flat, views) == ours


def test_a_graph_that_saved_a_view_holds_it() -> None:
    flat = torch.zeros(8)
    views = list(flat.split(4))
    ours = count_references(flat, views)
    graph = torch.ones(4, requires_grad=True) * views[0]
    assert count_references(flat, views) != ours
    del graph
    assert count_references(flat, views) == ours
