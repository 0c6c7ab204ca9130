"""Hooks of users on gradients that autograd has accumulated, called when these are reduced.

[Note: hooks that wait]
Autograd calls what ``param.register_post_accumulate_grad_hook`` was given as soon as this rank has
its own gradient, which is not reduced; under FSDP the parameter is whole then, and may be memory
that all ranks read. An optimizer that steps there would train each rank on its own, or write what
others read. So a wrapper puts an object in the place of each such hook, which does nothing when
autograd calls it, and calls the hooks itself when ``.grad`` is what the ranks have reduced.

The objects are put into the dict that autograd reads, under the same keys, as the handles of users
refer to that dict. It lies where the garbage collector does not look, so they refer to their
wrapper weakly; when that is gone, autograd's calls go through to the hooks again.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from echelon.errors import StateError

_Hook = Callable[[nn.Parameter], Any]


@final
class _Waiting:
    """Stands where the hook of a user was."""

    __slots__ = ("hook", "owner")

    def __init__(self, hook: _Hook, owner: DeferredHooks) -> None:
        self.hook, self.owner = hook, weakref.ref(owner)

    def __call__(self, param: nn.Parameter) -> None:
        if self.owner() is None:  # the wrapper was dropped: the module is a plain one again
            self.hook(param)


@final
class DeferredHooks:
    """The hooks of users on the gradients of some parameters, which wait for reduced ones.

    Args:
        named: the parameters, with the names that errors give them.
        unseen: others, which autograd never comes to; their hooks are called all the same.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], unseen: Iterable[nn.Parameter] = ()
    ) -> None:
        self._named = list(named)
        self._own: set[int] = set()  # ids of the wrapper's hooks
        self._dicts = [_hooks_of(param) for _, param in self._named]
        self._unseen = [_hooks_of(param) for param in unseen]
        self.defer()

    def register(self, param: nn.Parameter, hook: _Hook) -> RemovableHandle:
        """Register a hook of the wrapper's own, at most one a parameter, which does not wait."""
        handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)
        self._own.add(handle.id)
        return handle

    @property
    def _is_any(self) -> bool:
        """Whether there may be hooks of users: all that a backward without any pays for."""
        return max(map(len, self._dicts), default=0) > bool(self._own) or any(self._unseen)

    def defer(self, arrived: nn.Parameter | None = None) -> None:
        """Let all hooks that were registered since the last call wait.

        Args:
            arrived: a parameter whose hooks autograd is about to call.

        Raises:
            StateError: it would call one of a user, whose gradient is not reduced.
        """
        if not self._is_any:
            return
        for hooks in self._unseen:
            self._defer_all(hooks)
        late = None
        for (name, param), hooks in zip(self._named, self._dicts, strict=True):
            if self._defer_all(hooks) and param is arrived:
                late = name
        if late is not None:
            raise StateError(
                f"a hook was registered on the gradient of parameter {late!r} after the forward, "
                "and backward came there by a way that no output of forward announced, so the "
                "hook would be called before the gradient is reduced: register hooks before "
                "forward, or return tensors from it, in tuples, lists, dicts or dataclasses"
            )

    def _defer_all(self, hooks: dict[int, Any]) -> bool:
        """Let the hooks of one parameter wait; whether one did not."""
        is_new = False
        for key, hook in hooks.items():
            if isinstance(hook, _Waiting):
                if hook.owner() is not self:  # of a wrapper that was dropped
                    hooks[key] = _Waiting(hook.hook, self)
            elif key not in self._own:
                hooks[key] = _Waiting(hook, self)
                is_new = True
        return is_new

    def find(self) -> str | None:
        """The name of a parameter that autograd comes to and that has a hook of a user."""
        for (name, _), hooks in zip(self._named, self._dicts, strict=True):
            if not self._own.issuperset(hooks):
                return name
        return None

    def run(self, came: Iterable[nn.Parameter]) -> None:
        """Call the hooks of parameters whose ``.grad`` has a new reduced gradient."""
        if not self._is_any:
            return
        with torch.no_grad():  # as in a backward
            for param in came:
                for hook in [*param._post_accumulate_grad_hooks.values()]:
                    if isinstance(hook, _Waiting):
                        hook.hook(param)

    def close(self) -> None:
        """From now on autograd calls the hooks again."""
        for hooks in (*self._dicts, *self._unseen):
            for key, hook in hooks.items():
                if isinstance(hook, _Waiting):
                    hooks[key] = hook.hook


def _hooks_of(param: nn.Parameter) -> dict[int, Any]:
    """What autograd and handles look at, which stays the same object from now on."""
    if param._post_accumulate_grad_hooks is None:
        param._post_accumulate_grad_hooks = OrderedDict()
    hooks: dict[int, Any] = param._post_accumulate_grad_hooks
    return hooks
