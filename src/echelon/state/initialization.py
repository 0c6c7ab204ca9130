"""Gives tensors on the meta device their first values, the same however the model is cut.

[Note: from nothing to a value]
A tensor on the meta device has a shape and no values. Its *first owner* is the first module of the
model that has it. When the value is needed, all of that module's tensors get memory, and the module
initialises them, seeded by its name. Nothing else that it writes counts: meanwhile it finds
stand-ins on meta for other parameters, and copies of other buffers. So it cannot matter whether a
parent comes before its child, or whether a tied weight was cut already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.comm import streams
from echelon.errors import ArgumentError, StateError


@final
@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """Where a tensor belongs: its name in the model, its first owner, its whole shape."""

    name: str
    owner_name: str
    owner: nn.Module
    shape: tuple[int, ...]


@final
class Initializer:
    """Lets modules initialise tensors that are on the meta device.

    Law: what a module makes depends on the base seed and on its name; neither on the number of
    ranks nor on how the model is cut.

    Args:
        places: of all tensors of the model, by identity.
        device: where values are to be.
        materialize: makes values in the place of ``reset_parameters``.
    """

    def __init__(
        self,
        places: Mapping[int, ParameterPlace],
        device: torch.device,
        materialize: Callable[[nn.Module], None] | None,
    ) -> None:
        self._places, self._device, self._materialize = places, device, materialize

    def check(self, place: ParameterPlace) -> None:
        """Refuse a tensor that nothing makes.

        Raises:
            ArgumentError: its module has no ``reset_parameters``, and there is no ``materialize``.
        """
        if self._maker_of(place.owner) is None:
            raise ArgumentError(
                f"{place.name!r} is on meta, and its module {place.owner_name!r} "
                f"({type(place.owner).__name__}) has no reset_parameters(): give it one, or "
                "say with materialize=... what its values are"
            )

    def _maker_of(self, module: nn.Module) -> Callable[[], Any] | None:
        """What makes the values of a module; None: nothing does."""
        if self._materialize is not None:
            return partial(self._materialize, module)
        reset = getattr(module, "reset_parameters", None)
        return reset if callable(reset) else None

    def make(self, name: str, module: nn.Module, mine: AbstractSet[int], seed: int) -> None:
        """Let ``module`` initialise those of its tensors that ``mine`` identifies. See the note.

        Args:
            name: of the module in the model.
            seed: the base seed.
        """
        own = dict(own_tensors(module))
        for tensor in own.values():
            if id(tensor) in mine:
                self.allocate(tensor)
        make = self._maker_of(module)
        assert make is not None, "checked at the start"
        seed = _seed_of(seed, name)
        with self._alone(module, mine), streams.seeded(self._device, seed), torch.no_grad():
            make()
            for local, tensor in own_tensors(module):
                if id(own.get(local)) in mine and tensor is not own[local]:
                    raise ArgumentError(
                        f"the initialisation of module {name!r} put another tensor in the place of "
                        f"{local!r}: write the values into the one that is there"
                    )

    @contextmanager
    def _alone(self, module: nn.Module, mine: AbstractSet[int]) -> Iterator[None]:
        """Put stand-ins where ``module`` could reach what is not among ``mine``."""
        hidden: list[tuple[dict[str, Any], str, Tensor]] = []
        for submodule in module.modules():
            homes: list[dict[str, Any]] = [submodule._parameters, submodule._buffers]
            for home in homes:
                for local, tensor in home.items():
                    if tensor is not None and id(tensor) not in mine and not tensor.is_meta:
                        hidden.append((home, local, tensor))
        for home, local, tensor in hidden:
            home[local] = self._stand_in(tensor)
        try:
            yield
        finally:
            for home, local, tensor in hidden:
                home[local] = tensor

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor.clone()
        # Of the whole shape: the parameter itself may be cut already.
        shape = self._places[id(tensor)].shape
        return nn.Parameter(
            torch.empty(shape, dtype=tensor.dtype, device="meta"),
            requires_grad=tensor.requires_grad,
        )

    def allocate(self, tensor: Tensor) -> None:
        """Give a meta tensor memory, and leave it the object that modules and optimizers hold."""
        with torch.no_grad():
            plain = torch.empty_like(tensor, device=self._device)
        # Not as_subclass: that makes a view, whose base would keep this memory when it is cut.
        empty = torch.Tensor._make_subclass(type(tensor), plain, tensor.requires_grad)
        vars(empty).update(vars(tensor))
        try:
            torch.utils.swap_tensors(tensor, empty)
        except RuntimeError as error:
            raise StateError(
                f"{self._places[id(tensor)].name!r} is on meta and cannot be given memory in "
                f"place ({error}): build the model without the meta device, or drop what refers "
                "to it"
            ) from error


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that a module has itself, with their local names."""
    for home in (module._parameters, module._buffers):
        for local, tensor in home.items():
            if tensor is not None:
                yield local, tensor


def draw_seed() -> int:
    """A seed, from this rank's random stream."""
    return int(torch.randint(2**62, (), device="cpu"))


def _seed_of(base: int, name: str) -> int:
    """The seed of one module: another for each name and each base seed."""
    digest = hashlib.blake2b(f"{base} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # generators take 63 bits
