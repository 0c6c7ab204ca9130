"""The state of a sharded model: whole, copied unit by unit, or this rank's parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.errors import ArgumentError, StateError
from echelon.fsdp.hooks import Hooks
from echelon.fsdp.storage import Storage, await_readers
from echelon.modules.compiled import plain_keys, plain_name

_EXTRA = "_extra_state"  # where nn.Module keeps what get_extra_state() returns


class LoadReport(NamedTuple):
    """Keys of a state dict that do not fit; as ``nn.Module.load_state_dict`` returns."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Home(NamedTuple):
    """Where a parameter lives: its storage, and its place there."""

    storage: Storage
    i: int


def homes_of(storages: Sequence[Storage]) -> dict[int, Home]:
    """Where every parameter of a unit lives, by the ``id`` of the parameter."""
    return {
        id(param): Home(storage, i)
        for storage in storages
        for i, param in enumerate(storage.params)
    }


# Saving --------------------------------------------------------------------------------------


def copy_parameters(
    hooks: Hooks, *, keep: bool = True, device: torch.device | None = None
) -> dict[int, Tensor]:
    """Whole copies of all parameters, by their ``id``; one unit is whole at a time.

    All ranks call it.

    Args:
        keep: whether this rank wants them; if not, it helps the others and returns nothing.
        device: where the copies go; None: where the parts are.

    Raises:
        StateError: inside a forward or a backward.
    """
    if hooks.busy and not hooks.pinned:
        raise StateError("the whole state inside a forward or a backward: ask for it outside")
    if not hooks.pinned:  # inside full_parameters() all units are whole, and stay so
        hooks.prepare()
    copies: dict[int, Tensor] = {}
    for unit in hooks.units:
        was_gathered = unit.gathered
        if any(map(_shows_its_values, unit.storages)):
            unit.gather()
        for storage in unit.storages:
            for i, param in enumerate(storage.params):
                value = _whole_value(storage, i)
                if keep:
                    copies[id(param)] = _copied(value, device or storage.locals[i].device)
        if not was_gathered:
            unit.release()
    hooks.rest("the state was copied")
    return copies


def _shows_its_values(storage: Storage) -> bool:
    """Whether whole parameters are the parts put together, not rounded to a dtype of compute."""
    return storage.sharded and storage.compute_dtype == storage.dtype


def _whole_value(storage: Storage, i: int) -> Tensor:
    """A whole parameter in its own dtype."""
    if not storage.sharded:
        return storage.locals[i]
    if _shows_its_values(storage):
        return storage.wholes[i]
    label = f"state of {storage.members[i].name}"
    return storage.assembled(i, storage.locals[i], label=label)


def copy_parts(storages: Sequence[Storage]) -> dict[int, Tensor]:
    """Copies of this rank's parts, by the ``id`` of their parameter."""
    return {
        id(param): part.detach().clone()
        for storage in storages
        for param, part in zip(storage.params, storage.locals, strict=True)
    }


def state_of_copies(
    module: nn.Module,
    copies: Mapping[int, Tensor],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """The state dict of ``module`` with ``copies`` of its parameters, and copies of the rest."""
    state: dict[str, Any] = module.state_dict(*args, **{**(kwargs or {}), "keep_vars": True})
    for key, value in state.items():
        if isinstance(value, Tensor):
            found = copies.get(id(value))
            state[key] = _copied(value, device) if found is None else found
    return state


def _copied(value: Tensor, device: torch.device | None) -> Tensor:
    return value.detach().to(device or value.device, copy=True)


# Loading -------------------------------------------------------------------------------------


def load_state(
    module: nn.Module,
    storages: Sequence[Storage],
    given: Mapping[str, Any],
    *,
    strict: bool,
    parts: bool = False,
) -> LoadReport:
    """Take this rank's parts of a state, in place.

    Args:
        parts: what is given are this rank's parts, not whole parameters.

    Raises:
        ArgumentError: shapes, dtypes or, if ``strict``, keys do not fit; nothing was loaded.
    """
    if not isinstance(given, Mapping):
        raise ArgumentError(f"the state is {given!r:.80}; give a dict of tensors by name")
    homes = homes_of(storages)
    own = module.state_dict(keep_vars=True)
    given = plain_keys(given)
    report = LoadReport(
        [key for key in own if key not in given], [key for key in given if key not in own]
    )
    shared = [key for key, value in own.items() if key in given and isinstance(value, Tensor)]
    wrong = []
    for key in shared:
        home = homes.get(id(own[key]))
        value = own[key] if home is None else home.storage.locals[home.i]
        shape = tuple(value.shape)
        if home is not None and not parts:
            shape = home.storage.cut.shapes[home.i]
        wrong += [f"{key}: {what}" for what in _misfit(given[key], shape, value.dtype)]
    if strict:
        wrong += [f"{key}: missing" for key in report.missing_keys]
        wrong += [f"{key}: unexpected" for key in report.unexpected_keys]
    if wrong:
        what = (
            "sharded state does not fit this rank's parts" if parts else "state dict does not fit"
        )
        raise ArgumentError(f"the {what}: {'; '.join(sorted(wrong))}")
    await_readers(storages)
    with torch.no_grad():
        for key in shared:
            home = homes.get(id(own[key]))
            if home is None:
                own[key].copy_(given[key])
            elif parts:
                home.storage.locals[home.i].copy_(given[key])
            else:
                home.storage.adopt_one(home.i, given[key])
    _load_extra(module, own, given)
    return report


def _misfit(found: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """What is wrong with a value for a tensor of this shape and dtype; nothing if it fits."""
    if not isinstance(found, Tensor):
        return [f"a {type(found).__name__} instead of a tensor"]
    if tuple(found.shape) != shape:
        return [f"{tuple(found.shape)} instead of {shape}"]
    if not torch.can_cast(found.dtype, dtype):
        return [f"{found.dtype} would lose what {dtype} does not have"]
    return []


def _load_extra(module: nn.Module, own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Give modules what their ``get_extra_state`` had returned."""
    for name, submodule in module.named_modules():
        key = plain_name(f"{name}.{_EXTRA}".lstrip("."))
        if key in own and key in given:
            submodule.set_extra_state(given[key])


def part_loader(storages: Sequence[Storage], module: nn.Module) -> Callable[..., None]:
    """A hook that leads whole values to the parts where a larger module loads its state.

    There PyTorch itself copies, and looks for the wrapped module under the name ``module``. What
    does not fit is left as it is, for PyTorch to name.
    """

    def hook(
        _: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: object
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise no_assign()
        await_readers(storages)
        homes = homes_of(storages)
        own = module.state_dict(keep_vars=True)
        for key in [key for key in state if key.startswith(prefix)]:
            value, plain = state.pop(key), plain_name(key.removeprefix(prefix))
            home = homes.get(id(own.get(plain)))
            if home is not None and isinstance(value, Tensor):
                shape = home.storage.cut.shapes[home.i]
                if tuple(value.shape) == shape:
                    value = home.storage.part_of(home.i, value)
            state[f"{prefix}module.{plain}"] = value

    return hook


def no_assign() -> ArgumentError:
    """What ``assign=True`` gets."""
    return ArgumentError(
        "load_state_dict(assign=True) would replace the parameters that FSDP shards: "
        "use assign=False"
    )
