"""Where initial values come from: rank 0, each rank itself, or the module's own initialisation.

[Note: from nothing to a value]
A tensor on the meta device has a shape and no values. Its *first owner* is the first module of the
model that has it. When the value is needed, all of that module's tensors get memory, and the module
initialises them, seeded by its name. Nothing else that it writes counts: meanwhile it finds
stand-ins on meta for other parameters, and copies of other buffers. So it cannot matter whether a
parent comes before its child, or whether a tied weight was cut already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon import streams
from echelon.errors import ArgumentError, ModelMismatch, StateError
from echelon.fsdp.policy import Init
from echelon.fsdp.ranks import Ranks

__all__ = ["Origin", "Start"]


class Origin(Enum):
    """Who has the initial value of a parameter or a buffer."""

    RANK_0 = "rank 0 sends it"
    ITSELF = "each rank has it"
    MODULE = "its module makes it, alike on every rank"


@final
@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor belongs: its name in the model, its first owner, its whole shape."""

    name: str
    owner_name: str
    owner: nn.Module
    shape: tuple[int, ...]
    origin: Origin


@final
class Start:
    """Gives parameters and buffers their initial values, one at a time.

    Law: what a module makes depends on the base seed and on its name; neither on the number of
    ranks nor on how the model is cut.

    Args:
        module: the same on all ranks, but for values.
        ranks: that share it.
        init: what ``FSDP`` was told.
        on_meta: by rank, the names of what it has on the meta device.
        materialize: makes values in the place of ``reset_parameters``.

    Raises:
        ModelMismatch: a value is needed of a rank that does not have it.
        ArgumentError: a module cannot make its values.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks,
        init: Init,
        on_meta: Sequence[AbstractSet[str]],
        materialize: Callable[[nn.Module], None] | None,
    ) -> None:
        self._ranks, self._materialize = ranks, materialize
        self._device = ranks.shard.device
        self._places: dict[int, _Place] = {}
        for owner_name, owner in module.named_modules():
            for local, tensor in _own(owner):
                name = f"{owner_name}.{local}".lstrip(".")
                if id(tensor) not in self._places:
                    origin = _origin(name, init, on_meta)
                    place = _Place(name, owner_name, owner, tuple(tensor.shape), origin)
                    self._places[id(tensor)] = place
        self._waiting = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
        made = [place for place in self._places.values() if place.origin is Origin.MODULE]
        for place in made:
            if self._maker_of(place.owner) is None:
                raise ArgumentError(
                    f"{place.name!r} is on meta, and its module {place.owner_name!r} "
                    f"({type(place.owner).__name__}) has no reset_parameters(): give it one, or "
                    "say with materialize=... what its values are"
                )
        # One draw on every rank, so that equal random streams stay equal.
        self._seed: int = ranks.broadcast_object(_draw()) if made else 0

    def _maker_of(self, module: nn.Module) -> Callable[[], Any] | None:
        """What makes the values of a module; None: nothing does."""
        if self._materialize is not None:
            return partial(self._materialize, module)
        reset = getattr(module, "reset_parameters", None)
        return reset if callable(reset) else None

    def begin(self) -> None:
        """Make the buffers valid that no module makes: a module that makes others may read them."""
        for tensor in list(self._waiting.values()):
            is_parameter = isinstance(tensor, nn.Parameter)
            if not is_parameter and self._places[id(tensor)].origin is not Origin.MODULE:
                self.arrive(tensor)

    def arrive(self, tensor: Tensor) -> None:
        """Make ``tensor`` valid on the group's device: whole, and the same object. Once for each.

        All ranks call it in the same order.
        """
        if self._waiting.pop(id(tensor), None) is None:
            return
        place = self._places[id(tensor)]
        if place.origin is Origin.MODULE:
            if tensor.is_meta:
                self._make(place.owner_name, place.owner)
        elif place.origin is Origin.RANK_0:
            if tensor.is_meta:
                self._allocate(tensor)
            with torch.no_grad():
                self._ranks.broadcast(tensor.data, f"initial {place.name}")

    def finish(self) -> None:
        """Make valid what is in no unit: ignored parameters, and buffers."""
        for tensor in list(self._waiting.values()):
            self.arrive(tensor)

    def _make(self, name: str, module: nn.Module) -> None:
        """Let a module initialise what it is the first owner of. See the note above."""
        own = dict(_own(module))
        mine = {
            id(tensor)
            for tensor in own.values()
            if self._places[id(tensor)].origin is Origin.MODULE
            and self._places[id(tensor)].owner is module
        }
        for tensor in own.values():
            if id(tensor) in mine:
                self._allocate(tensor)
        make = self._maker_of(module)
        assert make is not None, "checked at the start"
        seed = _seed_of(self._seed, name)
        with self._alone(module, mine), streams.seeded(self._device, seed), torch.no_grad():
            make()
            for local, tensor in _own(module):
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

    def _allocate(self, tensor: Tensor) -> None:
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


def _origin(name: str, init: Init, on_meta: Sequence[AbstractSet[str]]) -> Origin:
    without = [name in names for names in on_meta]
    if all(without):
        return Origin.MODULE
    if any(without) and (init != "broadcast" or without[0]):
        needs = "rank 0's values" if init == "broadcast" else "the values of every rank"
        raise ModelMismatch(
            f"the device of {name!r}, and init={init!r} takes {needs}",
            {rank: "meta" if one else "real" for rank, one in enumerate(without)},
        )
    return Origin.RANK_0 if init == "broadcast" and len(on_meta) > 1 else Origin.ITSELF


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that a module has itself, with their local names."""
    for home in (module._parameters, module._buffers):
        for local, tensor in home.items():
            if tensor is not None:
                yield local, tensor


def _draw() -> int:
    """A seed, from this rank's random stream."""
    return int(torch.randint(2**62, (), device="cpu"))


def _seed_of(base: int, name: str) -> int:
    """The seed of one module: another for each name and each base seed."""
    digest = hashlib.blake2b(f"{base} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # generators take 63 bits
