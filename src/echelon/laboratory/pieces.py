"""Ranges of tensors of the plain model: what the tensors of a rank are, whatever wrapped the model.

A rank has a tensor whole, or a range of it (``ec.FSDP``), or a block of it (a ``DTensor``), or
several tensors end to end in one (flat parameters).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.errors import ArgumentError
from echelon.modules.sharded_tensor import is_part, local_shard
from echelon.state.sharded_state import HasShards, ModelParts, parameter_shards_in
from echelon.state.tensor_shard import Replication, Shape, TensorShard


@final
@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A range of a tensor of the plain model, or of a state of its optimizer.

    Attributes:
        name: of the tensor; of a state, with its key: ``"exp_avg of 0.weight"``.
        shape: of the full tensor.
        where: the first element of the range in the flattened tensor, or the slices of a block.
        numel: how many elements it has.
        values: None for a gradient that is not there.
    """

    name: str
    shape: Shape
    where: int | tuple[slice, ...]
    numel: int
    values: Tensor | None

    def of(self, full: Tensor) -> Tensor:
        """The same range of a full tensor; 1D."""
        if isinstance(self.where, tuple):
            return full[self.where].reshape(-1)
        return full.reshape(-1)[self.where : self.where + self.numel]

    @property
    def flat(self) -> Tensor:
        """The values; 1D, and zeros for a gradient that is not there."""
        if self.values is None:
            return torch.zeros(self.numel, dtype=torch.float64, device="cpu")
        return self.values.reshape(-1)


@final
class PieceFinder:
    """Which ranges of the plain model the tensors of a rank are.

    Args:
        shapes: of the parameters of the plain model, by name.
        model: the plain model, as it was given to the function that trained it.
        trained: the wrapped model that this function returned; None if it returned none.

    Raises:
        ArgumentError: ``trained`` is no module.
    """

    def __init__(self, shapes: Mapping[str, Shape], model: nn.Module, trained: object) -> None:
        if trained is not None and not isinstance(trained, nn.Module):
            raise ArgumentError(
                f"the function returned {trained!r:.80}: return the model that it trained, as it "
                "was wrapped, or nothing"
            )
        self._shapes = shapes
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._trained = trained
        self._ranges: dict[int, tuple[TensorShard, ...]] = {}
        if trained is not None:
            for shards in parameter_shards_in(trained, self._plain_name):
                self._ranges |= {id(param): ranges for param, ranges in shards.by_param.items()}
        self._buffers = self._compared_buffers()

    def _plain_name(self, name: str) -> str:
        """Names without the prefix that torch's ``DistributedDataParallel`` adds."""
        return name if name in self._shapes else name.removeprefix("module.")

    def _compared_buffers(self) -> set[str] | None:
        """The buffers of which this rank has the values that count; None if all."""
        trained = self._trained
        if trained is None or not any(isinstance(m, HasShards) for m in trained.modules()):
            return None
        state = ModelParts([(self._plain_name, trained)]).state(0, 1)
        return {
            name
            for shard in state.tensors
            for name in shard.names
            if not (shard.replication is Replication.PRIMARY and shard.copy)
        }

    def of_parameters(self, values: Mapping[Tensor, Tensor | None]) -> list[Piece]:
        """Pieces of parameters, or of their gradients, by parameter object.

        Raises:
            ArgumentError: a tensor is neither whole nor in the model that was returned.
        """
        return [
            piece
            for param, tensor in values.items()
            for piece in self._pieces(param, tensor, "{name}")
        ]

    def of_buffers(self, values: Mapping[str, Tensor]) -> list[Piece]:
        """Pieces of buffers, by name."""
        return [
            Piece(name, tuple(tensor.shape), 0, tensor.numel(), tensor)
            for name, tensor in values.items()
            if self._buffers is None or name in self._buffers
        ]

    def of_states(self, values: Mapping[Tensor, Mapping[str, Any]]) -> list[Piece]:
        """Pieces of the states of an optimizer, by parameter object and key."""
        pieces: list[Piece] = []
        for param, state in values.items():
            for key, value in state.items():
                text = f"{key} of {{name}}"
                if is_part(value):
                    value = local_shard(value)
                local = local_shard(param).shape
                if isinstance(value, Tensor) and value.dim() and value.shape == local:
                    pieces += self._pieces(param, value, text)
                elif isinstance(value, Tensor | int | float) and not isinstance(value, bool):
                    number = torch.as_tensor(value, dtype=torch.float64, device="cpu")
                    shape = tuple(number.shape)
                    if not shape or self._is_whole(param):
                        name = text.format(name=self._name(param))
                        pieces.append(Piece(name, shape, 0, number.numel(), number))
        return pieces

    def _name(self, param: Tensor) -> str:
        ranges = self._ranges.get(id(param), ())
        return ranges[0].name if ranges else self._names.get(id(param), "?")

    def _is_whole(self, param: Tensor) -> bool:
        return tuple(local_shard(param).shape) == self._shapes.get(self._name(param))

    def _pieces(self, param: Tensor, values: Tensor | None, text: str) -> Iterator[Piece]:
        ranges = self._ranges.get(id(param), ())
        name = self._names.get(id(param))
        if type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            if name is not None:
                yield _block(param, values, text.format(name=name))
        elif ranges:
            yield from _split(ranges, values, text)
        elif name is not None and self._trained is None:
            shape = tuple(local_shard(param).shape)
            if shape != self._shapes[name]:
                raise ArgumentError(
                    f"the function left {name!r} with shape {shape} instead of "
                    f"{self._shapes[name]}, and did not return the model: return it as it was "
                    "wrapped, which knows the ranges of this rank"
                )
            yield Piece(text.format(name=name), shape, 0, param.numel(), values)


def _split(ranges: Sequence[TensorShard], values: Tensor | None, text: str) -> Iterator[Piece]:
    """The ranges of a parameter, which lie end to end in ``values``."""
    lengths = [shard.numel for shard in ranges]
    if values is not None and is_part(values):
        values = local_shard(values)
    flat = [None] * len(ranges) if values is None else values.reshape(-1).split(lengths)
    for shard, part in zip(ranges, flat, strict=True):
        yield Piece(text.format(name=shard.name), shard.shape, shard.start, shard.numel, part)


def _block(param: Tensor, values: Tensor | None, name: str) -> Piece:
    from echelon.c10d.dtensor_blocks import block_of, local_tensor

    where = block_of(param)
    local = None if values is None else local_tensor(values)
    numel = prod(extent.stop - extent.start for extent in where)
    return Piece(name, tuple(param.shape), where, numel, local)
