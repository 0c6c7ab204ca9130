"""A number of one gradient in a stage is plain in every use but a sum over gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.errors import UnsupportedError
from echelon.modules.sharded_norms import mark_stage_gradients


def gradients(count: int = 2) -> list[Tensor]:
    marked = [torch.arange(1.0, 4.0) * (i + 1) for i in range(count)]
    mark_stage_gradients(marked)
    return marked


SUMS: dict[str, Callable[[list[Tensor]], Any]] = {
    "sum": lambda g: sum(x.pow(2).sum() for x in g),
    "sum of one": lambda g: sum(x.pow(2).sum() for x in g[:1]).sqrt(),
    "added": lambda g: g[0].sum() + g[1].sum(),
    "added in place": lambda g: g[0].sum().add_(g[1].square().mean()),
    "stacked": lambda g: torch.stack([x.abs().max() for x in g]).max(),
    "norms": lambda g: sum(x.norm() ** 2 for x in g),
    "joined": lambda g: torch.cat([x.flatten() for x in g]).square().sum(),
    "dots": lambda g: torch.dot(g[0], g[0]) + torch.dot(g[1], g[1]),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_gradients_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"ec\.clip_grad_norm_"):
        SUMS[name](gradients())


USES: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda g: g.sum().item(),
    "text": lambda g: f"{g.mean():.3f} {g.sum()!r}",
    "threshold": lambda g: bool(g.norm() > 1) and g.sum() < 100,
    "clipped": lambda g: (g * (1.0 / (g.norm() + 1e-6)).clamp(max=1.0)).tolist(),
    "root mean square": lambda g: (g.pow(2).mean().sqrt() + 1e-8).item(),
    "both of one gradient": lambda g: (g.sum() + g.square().mean()).item(),
    "with a number of a parameter": lambda g: (g.sum() + torch.ones(3).sum()).item(),
    "copied": lambda g: copy.deepcopy(g.sum()).item(),
    "written": lambda g: torch.zeros(()).copy_(g.sum()).item(),
    "compared": lambda g: torch.equal(g.sum(), torch.tensor(6.0)),
}


@pytest.mark.parametrize("name", USES)
def test_a_use_of_one_gradient_is_that_of_a_plain_tensor(name: str) -> None:
    found, expected = USES[name](gradients(1)[0]), USES[name](torch.arange(1.0, 4.0))
    if name == "text":
        assert found.split()[0] == expected.split()[0]
    else:
        assert found == expected


def test_a_number_that_is_kept_beside_others_is_added_only_to_its_own() -> None:
    first, second = gradients()
    momentum = 0.9 * first.sum() + 0.1 * first.sum()
    assert momentum.item() == pytest.approx(6.0)
    with pytest.raises(UnsupportedError):
        momentum + second.sum()
