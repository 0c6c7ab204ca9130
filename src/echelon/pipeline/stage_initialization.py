"""Names in the model, and first values of stages on meta: each rank makes those of its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.errors import ArgumentError
from echelon.modules.compiled import compiled_inside, plain_name
from echelon.pipeline.splitting.submodule import Submodule
from echelon.state.initialization import Initializer, ParameterPlace, draw_seed, own_tensors


def name_in_model(stage: nn.Module, index: int, name: str) -> str:
    """The name in the model of what stage ``index`` calls ``name``.

    Example:
        >>> name_in_model(nn.Linear(1, 1), 3, "bias")
        '3.bias'
    """
    name = plain_name(name)
    return name if find_submodule(stage) is not None else f"{index}.{name}".rstrip(".")


def names_of_state(stage: nn.Module, index: int, names: Iterable[str]) -> dict[str, str]:
    """The ``names`` in the model that belong to stage ``index``, by the names of the stage.

    Example:
        >>> names_of_state(nn.Linear(1, 1), 3, ["3.bias", "4.bias"])
        {'bias': '3.bias'}
    """
    submodule = find_submodule(stage)
    if submodule is not None:
        return {plain_name(name): name for name in names if plain_name(name) in submodule.names}
    start = f"{index}."
    local = [name for name in names if name.startswith(start)]
    return {plain_name(name.removeprefix(start)): name for name in local}


def find_submodule(stage: nn.Module) -> Submodule | None:
    """The stage that ``split`` made, inside of ``torch.compile``, ``DDP`` and ``FSDP``."""
    found: nn.Module | None = stage
    while found is not None and not isinstance(found, Submodule):
        compiled = compiled_inside(found)
        found = found._modules.get("module") if compiled is None else compiled
    return found


def initialize(
    stages: Mapping[int, nn.Module],
    group: Group,
    materialize: Callable[[nn.Module], None] | None,
) -> None:
    """Give values to what is on meta in the stages of this rank. All ranks call it.

    Law: the values depend on the random stream of rank 0 and on names in the model; not on the
    number of ranks or stages, if ``split`` made the stages.

    Raises:
        ArgumentError: on every rank, if a module of one cannot make its values.
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
    problem = _problem(maker, [places[key] for key in on_meta])
    by_rank = group.all_gather_object((bool(on_meta), problem))
    for rank, (_, text) in enumerate(by_rank):
        if text is not None:
            raise ArgumentError(f"rank {rank} cannot make values of its stages: {text}")
    if not any(has_meta for has_meta, _ in by_rank):
        return
    # One draw on every rank, so that equal random streams stay equal.
    seed: int = group.broadcast_object(draw_seed(), 0)
    for key, tensor in on_meta.items():
        if tensor.is_meta:  # else its owner made it with another
            owner = places[key].owner
            mine = {
                id(one)
                for _, one in own_tensors(owner)
                if id(one) in on_meta and places[id(one)].owner is owner
            }
            maker.make(places[key].owner_name, owner, mine, seed)


def _problem(maker: Initializer, places: list[ParameterPlace]) -> str | None:
    try:
        for place in places:
            maker.check(place)
    except ArgumentError as error:
        return str(error)
    return None
