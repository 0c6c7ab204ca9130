"""The exponential moving average of a model that is trained by any technique."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from echelon import checks
from echelon.errors import StateError
from echelon.state.sharded_state import ModelParts, ShardedState, ValuesOfModel
from echelon.state.tensor_shard import TensorShard


@final
class EMA(ValuesOfModel):
    """The exponential moving average of the parameters of a model, plain or shared in any way.

    Each rank averages what it holds of the model, so nothing is communicated, and no rank has more
    than its share. Averages of ``float16`` and ``bfloat16`` parameters are ``float32``, because a
    small step is lost when it is rounded to so few bits. Buffers are not averaged: they are copied.

    ``ec.save`` and ``ec.load`` take it under any name; its tensors have the names of the plain
    model, so it is loaded under any technique and number of ranks, and also into a plain module.
    What ``get_extra_state()`` returns is that of the model.

    Law: after each ``update()`` an average is ``decay * average + (1 - decay) * parameter``, with
    the bits that ``torch.optim.swa_utils.get_ema_multi_avg_fn`` gives for a plain model.

    Args:
        model: plain, or shared by ``DDP``, ``FSDP``, ``Pipeline`` or any of them inside another.
            Its values of now are the first averages.
        decay: the weight of the average in an update, from 0 to 1.

    Attributes:
        decay: may be changed between updates, for example while training warms up.

    Raises:
        ArgumentError: ``model`` is no module, ``decay`` is no such number, or a tensor of the model
            is none of plain numbers.
        StateError: in the middle of a step.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(layer.weight, 0.0)
        >>> ema = EMA(layer, decay=0.75)
        >>> _ = nn.init.constant_(layer.weight, 4.0)
        >>> ema.update()
        >>> with ema.average_parameters():
        ...     layer.weight.item()
        1.0
        >>> layer.weight.item()
        4.0
    """

    @torch.inference_mode(mode=False)  # the averages outlive the caller's mode
    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        checks.instance("model", model, nn.Module)
        self.decay = checks.number("decay", decay, 0.0, 1.0)
        self._model = model
        self._is_in_model = False
        self._averages = [_first_average(shard.values) for shard in self._state().tensors]

    @property
    def model(self) -> nn.Module:
        """The model that is averaged."""
        return self._model

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages to the parameters; called after each step of the optimizer.

        Raises:
            StateError: in the middle of a step, inside ``average_parameters()``, or the model has
                other tensors than when the averages began.
            ArgumentError: ``decay`` was set to what is no number from 0 to 1.
        """
        self._check_not_in_model("update()")
        decay = checks.number("decay", self.decay, 0.0, 1.0)
        shards = self._fitting(self._state())
        moved: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]]
        moved = defaultdict(list)
        for average, shard in zip(self._averages, shards, strict=True):
            values = shard.values.to(average.dtype)
            if _is_averaged(shard):
                moved[values.dtype, values.device].append((average, values))
            else:
                average.copy_(values)
        for pairs in moved.values():
            averages, values_of = zip(*pairs, strict=True)
            torch._foreach_lerp_(averages, values_of, 1 - decay)

    @contextmanager
    def average_parameters(self) -> Iterator[None]:
        """Inside the block the model has the averages, for an evaluation or an export.

        All ranks that share the model enter it. Nothing is communicated. The block takes the memory
        of one more copy of what this rank holds of the model.

        Raises:
            StateError: in the middle of a step, inside another such block, or the model has other
                tensors than before; at the end: a parameter was written in the block, such as by a
                step of the optimizer. The parameters are then as they were before the block.
        """
        self._check_not_in_model("average_parameters()")
        state = self._state()
        shards = self._fitting(state)
        kept = [shard.values.clone() for shard in shards]
        state.before_write()
        _write(shards, self._averages)
        self._is_in_model = True
        try:
            yield
            written = [
                shard.name
                for shard, average in zip(shards, self._averages, strict=True)
                if _is_averaged(shard) and not _same(shard.values, average.to(shard.values.dtype))
            ]
        finally:
            self._is_in_model = False
            state.before_write()
            _write(shards, kept)
        if written:
            raise StateError(
                f"{len(written)} parameters, such as {written[0]!r}, were written inside "
                "average_parameters(), where the model has its averages. That is lost, and the "
                "model has its own values again: step and load outside the block"
            )

    def values_in(self, state: ShardedState) -> ShardedState:
        """The averages, under the names of ``state``, which describes the model."""
        self._check_not_in_model("a save or load of averages")
        shards = self._fitting(state)
        averages = tuple(
            replace(shard, values=average, tensor=average)
            for shard, average in zip(shards, self._averages, strict=True)
        )
        return replace(state, tensors=averages, params={}, before_write=lambda: None)

    def _state(self) -> ShardedState:
        return ModelParts([(str, self._model)]).state(0, 1)

    def _fitting(self, state: ShardedState) -> Sequence[TensorShard]:
        """What this rank holds of the model, in the order of the averages."""
        here = [tuple(shard.values.shape) for shard in state.tensors]
        there = [tuple(average.shape) for average in self._averages]
        if here != there:
            raise StateError(
                f"the model holds {len(here)} tensors of {sum(map(_numel, here))} elements on this "
                f"rank, and held {len(there)} of {sum(map(_numel, there))} when its averages "
                "began: make the EMA when the model has its last form"
            )
        return state.tensors

    def _check_not_in_model(self, what: str) -> None:
        if self._is_in_model:
            raise StateError(
                f"{what} inside average_parameters(), where the model has the averages instead of "
                "its parameters: call it outside the block"
            )


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _is_averaged(shard: TensorShard) -> bool:
    numbers = shard.values
    return isinstance(shard.tensor, nn.Parameter) and (
        numbers.is_floating_point() or numbers.is_complex()
    )


def _first_average(values: Tensor) -> Tensor:
    """A copy, in a dtype that does not lose small steps."""
    is_half = values.dtype in (torch.float16, torch.bfloat16)
    return values.detach().to(torch.float32 if is_half else values.dtype, copy=True)


def _same(values: Tensor, others: Tensor) -> bool:
    """Whether the numbers are equal, or neither is one."""
    return bool(((values == others) | ((values != values) & (others != others))).all())


@torch.no_grad()
def _write(shards: Sequence[TensorShard], sources: Sequence[Tensor]) -> None:
    for shard, source in zip(shards, sources, strict=True):
        shard.values.copy_(source)
