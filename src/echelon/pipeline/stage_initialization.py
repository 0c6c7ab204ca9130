"""Initialises stages on the meta device: each rank makes the values of its own stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.errors import ArgumentError
from echelon.pipeline.stage_state import name_in_model
from echelon.state.initialization import (
    Initializer,
    ParameterPlace,
    draw_seed,
    nothing_to_materialize,
    own_tensors,
)


def initialize(
    stages: Mapping[int, nn.Module],
    group: Group,
    materialize: Callable[[nn.Module], None] | None,
) -> None:
    """Give values to the tensors on meta in the stages of this rank. All ranks call it.

    Law: the values depend on the random stream of rank 0 and on names in the model; not on the
    number of ranks or stages, if ``split`` made the stages. If a module of one rank cannot make its
    values, all ranks raise.
    """
    places: dict[int, ParameterPlace] = {}
    on_meta: dict[int, Tensor] = {}
    for index, stage in sorted(stages.items()):
        for local_owner, owner in stage.named_modules():
            owner_name = name_in_model(stage, index, local_owner)
            for local, tensor in own_tensors(owner):
                name = f"{owner_name}.{local}".lstrip(".")
                places.setdefault(
                    id(tensor), ParameterPlace(name, owner_name, owner, tuple(tensor.shape))
                )
                if tensor.is_meta:
                    on_meta[id(tensor)] = tensor
    maker = Initializer(places, group.device, materialize)

    def check() -> None:
        for key in on_meta:
            maker.check(places[key])

    if not any(_together(group, check, has_meta=bool(on_meta))):
        if materialize is not None:
            raise nothing_to_materialize("on meta on any rank")
        return
    # One draw on every rank, so that equal random streams stay equal.
    seed: int = group.broadcast_object(draw_seed(), 0)

    def make() -> None:
        for key, tensor in on_meta.items():
            if tensor.is_meta:  # otherwise its owner made it together with another one
                owner = places[key].owner
                keys = (id(tensor) for _, tensor in own_tensors(owner))
                owned = {key for key in keys if key in on_meta and places[key].owner is owner}
                maker.make(places[key].owner_name, owner, owned, seed)

    _together(group, make, has_meta=True)


def _together(group: Group, act: Callable[[], None], *, has_meta: bool) -> list[bool]:
    """Do ``act``, and return ``has_meta`` of all ranks; all raise if it is refused on one."""
    problem = None
    try:
        act()
    except ArgumentError as error:
        problem = str(error)
    by_rank = group.all_gather_object((has_meta, problem))
    for rank, (_, text) in enumerate(by_rank):
        if text is not None:
            raise ArgumentError(f"rank {rank} cannot make values of its stages: {text}")
    return [has_meta for has_meta, _ in by_rank]
