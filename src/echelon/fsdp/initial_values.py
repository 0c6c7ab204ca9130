"""Where initial values come from: rank 0, each rank itself, or the module's own initialisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import final

import torch
from torch import Tensor, nn

from echelon.errors import ModelMismatch
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.policy import Init
from echelon.state.initialization import Initializer, ParameterPlace, draw_seed, own_tensors


class Origin(Enum):
    """Who has the initial value of a parameter or a buffer."""

    RANK_0 = "rank 0 sends it"
    ITSELF = "each rank has it"
    MODULE = "its module makes it, alike on every rank"


@final
class InitialValues:
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
        ranks: HybridGroups,
        init: Init,
        on_meta: Sequence[AbstractSet[str]],
        materialize: Callable[[nn.Module], None] | None,
    ) -> None:
        self._ranks = ranks
        self._places: dict[int, ParameterPlace] = {}
        self._origins: dict[int, Origin] = {}
        for owner_name, owner in module.named_modules():
            for local, tensor in own_tensors(owner):
                name = f"{owner_name}.{local}".lstrip(".")
                if id(tensor) not in self._places:
                    self._origins[id(tensor)] = _origin(name, init, on_meta)
                    self._places[id(tensor)] = ParameterPlace(
                        name, owner_name, owner, tuple(tensor.shape)
                    )
        self._waiting = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
        self._maker = Initializer(self._places, ranks.shard.device, materialize)
        made = [key for key, origin in self._origins.items() if origin is Origin.MODULE]
        for key in made:
            self._maker.check(self._places[key])
        # One draw on every rank, so that equal random streams stay equal.
        self._seed: int = ranks.broadcast_object(draw_seed()) if made else 0

    def begin(self) -> None:
        """Make the buffers valid that no module makes: a module that makes others may read them."""
        for tensor in list(self._waiting.values()):
            is_parameter = isinstance(tensor, nn.Parameter)
            if not is_parameter and self._origins[id(tensor)] is not Origin.MODULE:
                self.arrive(tensor)

    def arrive(self, tensor: Tensor) -> None:
        """Make ``tensor`` valid on the group's device: whole, and the same object. Once for each.

        All ranks call it in the same order.
        """
        if self._waiting.pop(id(tensor), None) is None:
            return
        place = self._places[id(tensor)]
        origin = self._origins[id(tensor)]
        if origin is Origin.MODULE:
            if tensor.is_meta:
                self._make(place.owner_name, place.owner)
        elif origin is Origin.RANK_0:
            if tensor.is_meta:
                self._maker.allocate(tensor)
            with torch.no_grad():
                self._ranks.broadcast(tensor.data, f"initial {place.name}")

    def finish(self) -> None:
        """Make valid what is in no unit: ignored parameters, and buffers."""
        for tensor in list(self._waiting.values()):
            self.arrive(tensor)

    def _make(self, name: str, module: nn.Module) -> None:
        """Let a module initialise what it is the first owner of."""
        mine = {
            id(tensor)
            for _, tensor in own_tensors(module)
            if self._origins[id(tensor)] is Origin.MODULE
            and self._places[id(tensor)].owner is module
        }
        self._maker.make(name, module, mine, self._seed)


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
