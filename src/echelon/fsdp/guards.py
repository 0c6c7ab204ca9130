"""Keeps code outside of FSDP from taking this rank's shards for unsharded parameters.

The wrapper knows that parameters are sharded, but the modules inside of it do not: torch reads the
state of each, pickles it or copies it, and its code may use a parameter while that is sharded.
Optimizers do not know that other ranks read what they write. Each of them gets an error that names
the parameter, or waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, final

from torch import nn
from torch.optim.optimizer import Optimizer

from echelon.errors import StateError
from echelon.fsdp.hooks import Hooks
from echelon.fsdp.storage import Storage
from echelon.modules.optimizer_hooks import StepCheck, add_step_check, remove_step_check
from echelon.modules.optimizer_trial import Cut
from echelon.modules.partial_steps import allow_other_steps, refuse_other_steps
from echelon.modules.plain_steps import refuse_kept_gradients
from echelon.modules.sharded_tensor import is_part, sharding_of
from echelon.modules.wrapper import no_assign


def guard(module: nn.Module, storages: Sequence[tuple[str, Storage]], hooks: Hooks) -> None:
    """Guard a module and its storages, whose flat parameters have the given names."""
    _guard_steps(storages, hooks)
    _guard_modules(module, [storage for _, storage in storages], hooks.check_root)


def unguard(module: nn.Module, storages: Sequence[Storage]) -> None:
    """Remove all guards: the parameters are those of a plain module again."""
    _unguard_modules(module)
    _unguard_steps(storages)


# States of modules ---------------------------------------------------------------------------


@final
class ModuleGuard:
    """The hooks on one module that has sharded parameters: before calls, and around its state.

    ``sharded`` has the names of sharded parameters in the module. ``check_call`` is called before
    each forward of the module.
    """

    def __init__(
        self, sharded: Sequence[str], check_call: Callable[[], None] | None = None
    ) -> None:
        self._sharded, self._check_call = sharded, check_call

    def before_call(self, module: nn.Module, inputs: object) -> None:
        """Refuse a forward that would use shards."""
        if self._check_call is not None:
            self._check_call()

    def before_state(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Refuse the state of a module while a parameter is sharded, unless with ``keep_vars``."""
        for local in self._sharded:
            param = module._parameters.get(local)
            if not keep_vars and param is not None and is_part(param):
                sharding = sharding_of(param)
                raise StateError(
                    f"state_dict() of a module inside of FSDP, where {sharding.describe()}: nobody "
                    "could load this rank's part. Take "
                    "model.state_dict() of the FSDP itself on all ranks and save that, such as "
                    "with save_pretrained(folder, state_dict=...), or call ec.save; or do it "
                    "inside `with model.full_parameters():`, which all ranks enter"
                )

    def before_load(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: object
    ) -> None:
        """Refuse to replace shards by other tensors; a shard takes its part of a whole value."""
        if metadata.get("assign_to_params_buffers"):
            raise no_assign("FSDP shards")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise self._not_by_itself("copied")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise self._not_by_itself("pickled, saved as an object or sent")

    def _not_by_itself(self, what: str) -> StateError:
        return StateError(
            f"a module inside of FSDP cannot be {what}: it has this rank's shards of its "
            "parameters, and hooks that need the group. Save model.state_dict() of the FSDP "
            "itself, which all ranks call; copy.deepcopy(model), called by all ranks, is another "
            "FSDP, and model.unwrap() the plain module"
        )


def _guard_modules(
    module: nn.Module, storages: Sequence[Storage], check_call: Callable[[], None]
) -> None:
    """Put hooks on ``module``, and on each module in it that has a sharded parameter.

    ``check_call`` is called before each forward of ``module`` itself.
    """
    _unguard_modules(module)
    sharded = {id(param) for storage in storages if storage.sharded for param in storage.params}
    for submodule in module.modules():
        guarded = [local for local, p in submodule._parameters.items() if id(p) in sharded]
        if guarded or submodule is module:
            guard = ModuleGuard(guarded, check_call if submodule is module else None)
            if submodule is module:
                submodule.register_forward_pre_hook(guard.before_call, prepend=True)
            submodule.register_state_dict_pre_hook(guard.before_state)
            submodule.register_load_state_dict_pre_hook(guard.before_load)


def _unguard_modules(module: nn.Module) -> None:
    """Take the hooks off again, also those that a copy has inherited from its original."""
    for submodule in module.modules():
        kinds: Sequence[dict[int, Any]] = (
            submodule._forward_pre_hooks,
            submodule._state_dict_pre_hooks,
            submodule._load_state_dict_pre_hooks,
        )
        for hooks in kinds:
            for key in [key for key, hook in hooks.items() if _guard_of(hook) is not None]:
                del hooks[key]


def allow_copies(module: nn.Module, memo: dict[int, Any]) -> None:
    """Let ``module`` be copied with ``memo``; the copy then has the hooks of the original."""
    for guard in _guards(module):
        memo[id(guard)] = guard


def _guards(module: nn.Module) -> Iterable[ModuleGuard]:
    for submodule in module.modules():
        for hook in submodule._state_dict_pre_hooks.values():
            if (guard := _guard_of(hook)) is not None:
                yield guard


def _guard_of(hook: Any) -> ModuleGuard | None:
    # torch wraps the hooks of load_state_dict in an object with an attribute ``hook``.
    owner = getattr(getattr(hook, "hook", hook), "__self__", None)
    return owner if isinstance(owner, ModuleGuard) else None


# Steps of optimizers -------------------------------------------------------------------------


@final
class WaitForForwards(StepCheck):
    """Lets no optimizer write shards that another rank still reads.

    A backward that reduces needs all ranks, and comes after their last use of the parameters, so a
    step after it is safe. But a forward may have no such backward: an evaluation without
    ``no_grad``, or one under ``no_sync``. Then the ranks meet before the step.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = weakref.ref(hooks)

    def before_step(self, optimizer: Optimizer) -> None:
        hooks = self._hooks()
        if hooks is None:
            return
        if hooks.always_shown:
            raise StateError(
                f"a step of {type(optimizer).__name__} inside full_parameters(), where parameters "
                "are whole, and gradients and states are parts: call it outside"
            )
        hooks.wait_for_forwards()

    def wait(self) -> None:
        """Return when shards may be written."""
        hooks = self._hooks()
        if hooks is not None:
            hooks.wait_for_forwards()


@final
class NeedsReducedGradients(StepCheck):
    """Refuses a step over gradients that ``no_sync`` keeps, before it has changed anything."""

    is_of_gradients = True

    def before_step(self, optimizer: Optimizer) -> None:
        refuse_kept_gradients(optimizer)


_NEEDS_REDUCED = NeedsReducedGradients()  # one, which runs once for all parameters of a step


@final
class BehindFlatParameter(StepCheck):
    """Refuses optimizers over the ``params`` of which the flat parameter ``name`` consists.

    Their ``.grad`` is None outside of backward, so a step would silently do nothing.
    """

    def __init__(self, name: str, params: Iterable[nn.Parameter]) -> None:
        self._name, self._ids = name, {id(param) for param in params}

    def before_step(self, optimizer: Optimizer) -> None:
        for i, group in enumerate(optimizer.param_groups):
            if any(id(param) in self._ids for param in group["params"]):
                raise StateError(
                    f"group {i} of {type(optimizer).__name__} has a parameter that FSDP has put "
                    f"into the flat parameter {self._name!r}, so its step would change nothing: "
                    "make the optimizer after wrapping, with model.parameters(), or wrap with "
                    "use_orig_params=True"
                )


def _guard_steps(storages: Iterable[tuple[str, Storage]], hooks: Hooks) -> None:
    for name, storage in storages:
        params = storage.optimizer_params
        add_step_check(params, _NEEDS_REDUCED)
        if storage.is_flat:
            add_step_check(storage.params, BehindFlatParameter(name, storage.params))
        if storage.sharded and storage.group.size > 1:
            sharded = Cut.FLAT if storage.is_flat else Cut.ROWS if storage.rows else Cut.ELEMENTS
            refuse_other_steps(params, "FSDP shards parameters", sharded)
        elif storage.is_flat:
            what = "with use_orig_params=False FSDP shows them parameters of one dim"
            refuse_other_steps(params, what, Cut.ONE_FLAT)
        if storage.sharded:
            waits = WaitForForwards(hooks)
            add_step_check(params, waits)
            storage.on_write = waits.wait


def _unguard_steps(storages: Iterable[Storage]) -> None:
    for storage in storages:
        remove_step_check(storage.params, BehindFlatParameter)
        remove_step_check(storage.optimizer_params, WaitForForwards)
        remove_step_check(storage.optimizer_params, NeedsReducedGradients)
        allow_other_steps([*storage.params, *storage.optimizer_params])


# After unwrap() ------------------------------------------------------------------------------


@final
class Detached:
    """Replaces the attributes of a wrapper after ``unwrap()``, and raises at any use."""

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error()

    def __iter__(self) -> NoReturn:
        raise self._error()

    def __getitem__(self, key: Any) -> NoReturn:
        raise self._error()

    def _error(self) -> StateError:
        return StateError("this FSDP was taken off its module by unwrap(): wrap the module again")
