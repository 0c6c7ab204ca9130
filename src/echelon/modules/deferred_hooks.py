"""Hooks of users on gradients that autograd has accumulated, called when these are reduced.

[Note: hooks that wait]
Autograd calls the hooks of ``param.register_post_accumulate_grad_hook`` as soon as this rank has
its gradient, before the reduction. Under FSDP the parameter is unsharded then, and may be memory
that all ranks read. An optimizer that steps there would train each rank separately, or write what
other ranks read. So a wrapper replaces each such hook by an object that does nothing when autograd
calls it, and calls the hooks itself when ``.grad`` is the reduced gradient.

The objects are put into the dict that autograd reads, under the same keys, because the handles of
users refer to that dict. The garbage collector does not see this dict, so the objects, and the
hooks of wrappers, refer to their wrapper weakly; otherwise a wrapper that is dropped would never be
freed. When the wrapper is gone, autograd's calls reach the hooks of users again.
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
    """Replaces the hook of a user."""

    __slots__ = ("hook", "owner")

    def __init__(self, hook: _Hook, owner: DeferredHooks) -> None:
        self.hook, self.owner = hook, weakref.ref(owner)

    def __call__(self, param: nn.Parameter) -> None:
        if self.owner() is None:  # the wrapper was dropped: the module is a plain one again
            self.hook(param)


@final
class DeferredHooks:
    """The hooks of users on the gradients of ``named`` parameters, which wait for reduced ones.

    Autograd never reaches the ``unseen`` parameters, but their hooks are called with the others.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], unseen: Iterable[nn.Parameter] = ()
    ) -> None:
        self._named = list(named)
        self._wrapper_ids: set[int] = set()  # ids of the wrapper's hooks
        self._dicts = [_hooks_of(param) for _, param in self._named]
        self._unseen = [_hooks_of(param) for param in unseen]
        self.defer()

    def register(self, param: nn.Parameter, hook: _Hook) -> RemovableHandle:
        """Register a hook of the wrapper, at most one for a parameter, which does not wait.

        The hook may refer to its wrapper only weakly, see the note.
        """
        handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)
        self._wrapper_ids.add(handle.id)
        return handle

    @property
    def _is_any(self) -> bool:
        """Whether there may be hooks of users; a backward without them costs only this check."""
        return max(map(len, self._dicts), default=0) > bool(self._wrapper_ids) or any(self._unseen)

    def defer(self, arrived: nn.Parameter | None = None) -> None:
        """Let all hooks wait that were registered since the last call.

        Autograd is about to call the hooks of the parameter ``arrived``. Raises StateError if one
        of them is a new hook of a user, because the gradient is not reduced.
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
        """Let the hooks of one parameter wait; returns whether one is new."""
        is_new = False
        for key, hook in hooks.items():
            if isinstance(hook, _Waiting):
                if hook.owner() is not self:  # its wrapper was dropped
                    hooks[key] = _Waiting(hook.hook, self)
            elif key not in self._wrapper_ids:
                hooks[key] = _Waiting(hook, self)
                is_new = True
        return is_new

    def find(self) -> str | None:
        """The name of a parameter that autograd reaches and that has a hook of a user."""
        for (name, _), hooks in zip(self._named, self._dicts, strict=True):
            if not self._wrapper_ids.issuperset(hooks):
                return name
        return None

    def run(self, reduced: Iterable[nn.Parameter]) -> None:
        """Call the hooks of parameters whose ``.grad`` has a new reduced gradient."""
        if not self._is_any:
            return
        with torch.no_grad():  # as in a backward
            for param in reduced:
                for hook in [*param._post_accumulate_grad_hooks.values()]:
                    if isinstance(hook, _Waiting):
                        hook.hook(param)

    def close(self) -> None:
        """Let autograd call the hooks of users again."""
        for hooks in (*self._dicts, *self._unseen):
            for key, hook in hooks.items():
                if isinstance(hook, _Waiting):
                    hooks[key] = hook.hook


@final
class StepHooks:
    """The hooks of users on gradients to which one step adds several times, called at its end.

    Parameters that nobody has hooked cost a look at one attribute in a step.
    """

    def __init__(self) -> None:
        self._deferred = DeferredHooks(())
        self._hooked: list[nn.Parameter] = []

    def begin(self, params: Iterable[nn.Parameter]) -> None:
        """Let the hooks on ``params`` wait; a step that adds to their gradients begins."""
        hooked = [param for param in params if param._post_accumulate_grad_hooks]
        if len(hooked) != len(self._hooked):
            self._deferred = DeferredHooks(("", param) for param in hooked)
        self._hooked = hooked
        self._deferred.defer()

    def end(self) -> None:
        """Call the hooks of parameters that have a gradient: it is complete."""
        self._deferred.run(param for param in self._hooked if param.grad is not None)


def _hooks_of(param: nn.Parameter) -> dict[int, Any]:
    """The dict of hooks that autograd and handles use, which stays the same object."""
    if param._post_accumulate_grad_hooks is None:
        param._post_accumulate_grad_hooks = OrderedDict()
    hooks: dict[int, Any] = param._post_accumulate_grad_hooks
    return hooks
