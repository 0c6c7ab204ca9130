"""A sharded linear layer in each layout, for tests of what functions of torch do with its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import echelon as ec

Look = Callable[[Tensor], Any]


def build() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 5).double()


def looks(look: Look, layout: str = "flat") -> Any:
    """What ``look`` finds of a sharded weight, (5, 3), on rank 1 of two."""

    def main(world: ec.World) -> Any:
        model = ec.FSDP(build(), world.group, min_num_params=0, layout=layout)
        return look(model.module.weight)

    return ec.run(main, 2)[1]
