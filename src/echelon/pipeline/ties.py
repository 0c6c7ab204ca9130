"""Parameters that stages on different ranks share, such as an embedding and the output layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import nn

from echelon.errors import ArgumentError, UnsupportedError
from echelon.pipeline.shardable import Shardable
from echelon.world.group import Group

__all__ = ["Tie", "find_ties"]


@final
class Tie:
    """One parameter that several ranks have, seen from one of them.

    Law: after ``reduce``, ``.grad`` is that of the plain model on every owner, with the same bits.

    Args:
        param: this rank's own.
        owners: the ranks that have it.
    """

    def __init__(self, param: nn.Parameter, owners: Group) -> None:
        self.param, self.owners = param, owners
        self._before: torch.Tensor | None = None  # what was reduced already
        self._is_open = False
        with torch.no_grad():
            owners.broadcast(param.data, 0, label="a parameter that stages share")

    def begin(self) -> None:
        """A step begins: gradients that were reduced already are not reduced again."""
        if not self._is_open:
            # Memory of its own: ``.grad`` of a replicated parameter is where the next one travels.
            before = self.param.grad
            self._before, self.param.grad = None if before is None else before.clone(), None
            self._is_open = True

    def reduce(self) -> None:
        """Sum what all owners have added to ``.grad`` since ``begin``. All of them call it."""
        self._is_open = False
        before, self._before = self._before, None
        grad = self.param.grad
        is_used = torch.tensor([grad is not None], dtype=torch.uint8, device=self.owners.device)
        self.owners.all_reduce(is_used, "max", label="whether a shared parameter was used")
        if bool(is_used):
            total = torch.zeros_like(self.param) if grad is None else grad
            self.owners.all_reduce(total, "sum", label="gradient of a shared parameter")
            self.param.grad = total if before is None else before.add_(total)
        else:
            self.param.grad = before

    def forget(self) -> None:
        """A step failed: leave what there was before."""
        if self._is_open:
            self.param.grad, self._before, self._is_open = self._before, None, False


def find_ties(
    stages: Sequence[nn.Module | None], placement: Sequence[int], group: Group
) -> list[Tie]:
    """The shared parameters of this rank. All ranks of ``group`` call it.

    Raises:
        ArgumentError: a rank was not given the stages of others, and cannot know what they share.
        UnsupportedError: such a parameter is in a stage that is sharded.
    """
    owners: dict[nn.Parameter, set[int]] = {}
    sharded: set[nn.Parameter] = set()
    for stage, rank in zip(stages, placement, strict=True):
        for param in () if stage is None else _parameters(stage):
            owners.setdefault(param, set()).add(rank)
            if isinstance(stage, Shardable):
                sharded.add(param)
    shared = [(param, sorted(ranks)) for param, ranks in owners.items() if len(ranks) > 1]
    mine = [ranks for _, ranks in shared], any(param in sharded for param, _ in shared)
    told = group.all_gather_object(mine)
    everyone = [ranks for ranks, _ in told]
    if any(found != everyone[0] for found in everyone):
        raise ArgumentError(
            "the ranks see different parameters that stages share, on ranks "
            f"{dict(enumerate(everyone))}: give every rank the whole list of stages, without None"
        )
    if any(is_sharded for _, is_sharded in told):
        raise UnsupportedError(
            f"stages on ranks {everyone[0]} share parameters, and at least one of these stages is "
            "sharded, so that ranks have different parts of one parameter: replicate the stages, "
            "or give each of them a parameter of its own"
        )
    groups = [group.subgroup(ranks) for _, ranks in shared]
    return [
        Tie(param, owners)
        for (param, _), owners in zip(shared, groups, strict=True)
        if owners is not None
    ]


def _parameters(stage: nn.Module) -> Iterator[nn.Parameter]:
    """Those of the model, also where a wrapper shows others to optimizers."""
    for module in stage.modules():
        yield from (param for param in module._parameters.values() if param is not None)
