"""Keeps what is saved, copied or loaded module by module from being this rank's parts.

The wrapper knows that parameters are parts, and gathers them. The modules inside of it do not:
torch asks each for its state, pickles it or copies it as it stands. So each module that has a
sharded parameter of its own has a hook here, which refuses what would be truncated, and takes the
parts of what is loaded whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, final

from torch import Tensor, nn

from echelon.errors import StateError
from echelon.fsdp.state_dict import no_assign
from echelon.fsdp.storage import Storage, await_readers


@final
class WholeOnly:
    """The hooks on one module: before its state is taken, and before a state is loaded.

    Args:
        homes: by its own name of a parameter: the name in the model, the storage, the place there.
        check_call: called before each forward of the module.
    """

    def __init__(
        self,
        homes: dict[str, tuple[str, Storage, int]],
        check_call: Callable[[], None] | None = None,
    ) -> None:
        self._homes, self._check_call = homes, check_call

    def before_call(self, module: nn.Module, inputs: object) -> None:
        """Refuse a forward that would use parts."""
        if self._check_call is not None:
            self._check_call()

    def before_state(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Refuse the values of parts; with ``keep_vars`` the parameters themselves are asked for.

        Raises:
            StateError: a parameter of the module is a part now.
        """
        for local, (name, storage, i) in self._homes.items():
            param, shape = module._parameters.get(local), storage.cut.shapes[i]
            if not keep_vars and param is not None and tuple(param.shape) != shape:
                raise StateError(
                    f"state_dict() of a module inside of FSDP, where {name!r} is this rank's part, "
                    f"{list(param.shape)} of {list(shape)}: nobody could load it. Take "
                    "model.state_dict() of the FSDP itself on all ranks and save that, such as "
                    "with save_pretrained(folder, state_dict=...), or call ec.save; or do it "
                    "inside `with model.full_parameters():`, which all ranks enter"
                )

    def before_load(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: object
    ) -> None:
        """Put this rank's parts in the place of whole values, as far as those fit.

        Raises:
            ArgumentError: with ``assign=True``, which would replace parameters.
        """
        if metadata.get("assign_to_params_buffers"):
            raise no_assign()
        await_readers({home[1] for home in self._homes.values()})
        for local, (_name, storage, i) in self._homes.items():
            param, shape = module._parameters.get(local), storage.cut.shapes[i]
            value = state.get(prefix + local)
            if param is None or not isinstance(value, Tensor) or tuple(value.shape) != shape:
                continue  # for torch to name
            if tuple(param.shape) != shape:
                state[prefix + local] = storage.part_of(i, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise self._not_by_itself("copied")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise self._not_by_itself("pickled, saved as an object or sent")

    def _not_by_itself(self, what: str) -> StateError:
        return StateError(
            f"a module inside of FSDP cannot be {what}: it has this rank's parts of its "
            "parameters, and hooks that need the group. Save model.state_dict() of the FSDP "
            "itself, which all ranks call; copy.deepcopy(model), called by all ranks, is another "
            "FSDP, and model.unwrap() the plain module"
        )


def guard_modules(
    module: nn.Module, storages: Sequence[Storage], check_call: Callable[[], None]
) -> None:
    """Put hooks on each module below ``module`` that has a sharded parameter, and on itself.

    Args:
        check_call: called before each forward of ``module`` itself.
    """
    unguard_modules(module)
    homes = {
        id(member.param): (member.name, storage, i)
        for storage in storages
        if storage.sharded
        for i, member in enumerate(storage.members)
    }
    for one in module.modules():
        own = {
            local: homes[id(param)]
            for local, param in one._parameters.items()
            if id(param) in homes
        }
        if own or one is module:
            guard = WholeOnly(own, check_call if one is module else None)
            if one is module:
                one.register_forward_pre_hook(guard.before_call, prepend=True)
            one.register_state_dict_pre_hook(guard.before_state)
            one.register_load_state_dict_pre_hook(guard.before_load)


def unguard_modules(module: nn.Module) -> None:
    """Take the hooks off again, also those that a copy has got from its original."""
    for one in module.modules():
        kinds: Sequence[dict[int, Any]] = (
            one._forward_pre_hooks,
            one._state_dict_pre_hooks,
            one._load_state_dict_pre_hooks,
        )
        for hooks in kinds:
            for key in [key for key, hook in hooks.items() if _guard_of(hook) is not None]:
                del hooks[key]


def allow_copies(module: nn.Module, memo: dict[int, Any]) -> None:
    """Let ``module`` be copied with ``memo``; the copy then has hooks of the original."""
    for guard in _guards(module):
        memo[id(guard)] = guard


def _guards(module: nn.Module) -> Iterable[WholeOnly]:
    for one in module.modules():
        for hook in one._state_dict_pre_hooks.values():
            if (guard := _guard_of(hook)) is not None:
                yield guard


def _guard_of(hook: Any) -> WholeOnly | None:
    found = getattr(getattr(hook, "hook", hook), "__self__", None)  # torch wraps those of loading
    return found if isinstance(found, WholeOnly) else None
