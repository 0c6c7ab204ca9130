"""Initialises tensors on the meta device, with the same values however the model is sharded.

[Note: initialisation from meta]
A tensor on the meta device has a shape and no values. Its *first owner* is the first module of the
model that has it. When the value is needed, all of that module's tensors get memory, and the module
initialises them, seeded by its name. It cannot write to anything else: meanwhile other parameters
are replaced by stand-ins on meta, and other buffers by copies. So neither the order of parents and
children matters, nor whether a tied weight is sharded already.
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

from echelon.comm.streams import device_of
from echelon.errors import ArgumentError, StateError


def nothing_to_materialize(what: str) -> ArgumentError:
    """The error for ``materialize`` where it would not be called; ``what`` is not there."""
    return ArgumentError(
        f"materialize is given, and no parameter or buffer is {what}, so it would not be called: "
        'build the model under `with torch.device("meta"):`, or leave materialize out'
    )


@final
@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """A tensor's name in the model, its first owner, and its full shape."""

    name: str
    owner_name: str
    owner: nn.Module
    shape: tuple[int, ...]


@final
class Initializer:
    """Lets modules initialise tensors that are on the meta device.

    Law: the values depend on the base seed and the name of the module; neither on the number of
    ranks nor on how the model is sharded.

    Args:
        places: of all tensors of the model, by ``id``.
        device: on which the values are made.
        materialize: initialises a module, in the place of its ``reset_parameters``.
    """

    def __init__(
        self,
        places: Mapping[int, ParameterPlace],
        device: torch.device,
        materialize: Callable[[nn.Module], None] | None,
    ) -> None:
        self._places, self._device, self._materialize = places, device, materialize

    def check(self, place: ParameterPlace) -> None:
        """Raise ``ArgumentError`` for a tensor that nothing can initialise."""
        if self._initializer_of(place.owner) is None:
            raise ArgumentError(
                f"{place.name!r} is on meta, and its module {place.owner_name!r} "
                f"({type(place.owner).__name__}) has no reset_parameters(): give it one, or "
                "say with materialize=... what its values are"
            )

    def _initializer_of(self, module: nn.Module) -> Callable[[], Any] | None:
        """The function that initialises a module; None if it has none."""
        if self._materialize is not None:
            return partial(self._materialize, module)
        reset = getattr(module, "reset_parameters", None)
        return reset if callable(reset) else None

    def make(self, name: str, module: nn.Module, selected: AbstractSet[int], seed: int) -> None:
        """Let ``module`` initialise those of its tensors whose ids are ``selected``. See the note.

        Args:
            name: of the module in the model.
            seed: the base seed.
        """
        made = {name: own for name, own in own_tensors(module) if id(own) in selected}
        for tensor in made.values():
            self.allocate(tensor)
            _memory_of(tensor).fill_(_fill_of(tensor))
        versions = {local: tensor._version for local, tensor in made.items()}
        initialize = self._initializer_of(module)
        assert initialize is not None, "checked at the start"
        seed = _seed_of(seed, name)
        seeded = device_of(self._device).seeded(seed)
        with self._isolated(module, selected), seeded, torch.no_grad():
            initialize()
            for local, tensor in own_tensors(module):
                if tensor is not made.get(local, tensor):
                    raise ArgumentError(
                        f"the initialisation of module {name!r} put another tensor in the place of "
                        f"{local!r}: write the values into the one that is there"
                    )
        unwritten = [
            repr(self._places[id(tensor)].name)
            for local, tensor in made.items()
            if tensor._version == versions[local] and _has_its_fill(tensor)
        ]
        if unwritten:
            by = "reset_parameters()" if self._materialize is None else "materialize"
            raise ArgumentError(
                f"{by} of module {name!r} ({type(module).__name__}) wrote no values into "
                f"{', '.join(unwritten)}: it initialises all parameters and buffers of its module "
                "that are on meta"
            )

    @contextmanager
    def _isolated(self, module: nn.Module, selected: AbstractSet[int]) -> Iterator[None]:
        """Put stand-ins in the place of all tensors in ``module`` that are not ``selected``."""
        hidden: list[tuple[dict[str, Any], str, Tensor]] = []
        for submodule in module.modules():
            homes: list[dict[str, Any]] = [submodule._parameters, submodule._buffers]
            for home in homes:
                for local, tensor in home.items():
                    if tensor is not None and id(tensor) not in selected and not tensor.is_meta:
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
        # The stand-in has the full shape; the parameter itself may be sharded already.
        shape = self._places[id(tensor)].shape
        return nn.Parameter(
            torch.empty(shape, dtype=tensor.dtype, device="meta"),
            requires_grad=tensor.requires_grad,
        )

    def allocate(self, tensor: Tensor) -> None:
        """Give a meta tensor memory in place: modules and optimizers keep the same object."""
        with torch.no_grad():
            plain = torch.empty_like(tensor, device=self._device)
        # as_subclass would make a view, whose base keeps this memory when the tensor is sharded.
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


# Writes through ``.data`` or NumPy do not count in the version of a tensor, so memory that nobody
# has written is known by its bytes, too.


def _fill_of(tensor: Tensor) -> int:
    """The byte in all memory of a tensor that is not initialised yet.

    In floats all bits are set, which is a NaN that no operation makes, so that a tensor that was
    written in part shows. In integers that would be -1.
    """
    return 0xFF if tensor.is_floating_point() or tensor.is_complex() else 0xA5


def _has_its_fill(tensor: Tensor) -> bool:
    memory = _memory_of(tensor)
    return bool(memory.numel()) and {int(end) for end in memory.aminmax()} == {_fill_of(tensor)}


def _memory_of(tensor: Tensor) -> Tensor:
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage())


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module without those of its submodules, by local name."""
    for home in (module._parameters, module._buffers):
        for local, tensor in home.items():
            if tensor is not None:
                yield local, tensor


def draw_seed() -> int:
    """Draw a seed from this rank's random stream."""
    return int(torch.randint(2**62, (), device="cpu"))


def _seed_of(base: int, name: str) -> int:
    """The seed of one module, which depends on its name and the base seed."""
    digest = hashlib.blake2b(f"{base} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # generators take 63 bits
