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

A step of a pipeline adds to a gradient several times, and wrappers may reduce it as often. There
the hook of a user waits for the end of the step inside of the object that waits for the wrapper:
who calls it, autograd or the wrapper, tells that the gradient has arrived.
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
        hook.is_of_wrapper = True  # type: ignore[attr-defined]  # for ``StepHooks``
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
                # A frozen parameter may have kept a gradient, which is reduced with the others.
                hooks = param._post_accumulate_grad_hooks if param.requires_grad else {}
                for hook in [*hooks.values()]:
                    if isinstance(hook, _Waiting):
                        hook.hook(param)

    def close(self) -> None:
        """Let autograd call the hooks of users again."""
        for hooks in (*self._dicts, *self._unseen):
            for key, hook in hooks.items():
                if isinstance(hook, _Waiting):
                    hooks[key] = hook.hook


@final
class _WaitingForStep:
    """Replaces the hook of a user on a gradient to which one step adds several times."""

    __slots__ = ("find_step", "hook")

    def __init__(self, hook: _Hook, find_step: Callable[[], StepHooks | None]) -> None:
        self.hook, self.find_step = hook, find_step

    def __call__(self, param: nn.Parameter) -> None:
        step = self.find_step()
        if step is None or not step.is_open:
            self.hook(param)
        else:
            step.add(param)


@final
class StepHooks:
    """The hooks of users on gradients to which steps add several times, called once at the end.

    Outside of steps a call of autograd or of a wrapper reaches them at once. Parameters that nobody
    has hooked cost a look at one attribute in a step.

    Attributes:
        is_open: whether a step adds to gradients, or has done so and more will come.
    """

    def __init__(self) -> None:
        self._arrived: set[nn.Parameter] = set()
        self._find_self = weakref.ref(self)
        self.is_open = False

    def begin(self, params: Iterable[nn.Parameter]) -> None:
        """Let the hooks on ``params`` wait for ``end``; a step that adds to gradients begins."""
        self.is_open = True
        for param in params:
            hooks = param._post_accumulate_grad_hooks
            for key, hook in hooks.items() if hooks else ():
                if isinstance(hook, _Waiting):
                    hook.hook = self._waiting(hook.hook)
                elif not hasattr(hook, "is_of_wrapper"):
                    hooks[key] = self._waiting(hook)

    def _waiting(self, hook: _Hook) -> _WaitingForStep:
        # Another pipeline may have had the stage before.
        own = hook.hook if isinstance(hook, _WaitingForStep) else hook
        return _WaitingForStep(own, self._find_self)

    def add(self, param: nn.Parameter) -> None:
        """Have the hooks of a parameter called at the end: its gradient has arrived."""
        self._arrived.add(param)

    def end(self, params: Iterable[nn.Parameter]) -> None:
        """Call the hooks of those of ``params`` whose gradients have arrived: they are complete."""
        arrived, self._arrived, self.is_open = self._arrived, set(), False
        with torch.no_grad():  # as in a backward
            for param in params if arrived else ():
                if param in arrived and param.grad is not None:
                    for hook in _that_wait(param._post_accumulate_grad_hooks):
                        hook(param)


def wait_for_step(hooks: dict[int, Any]) -> bool:
    """Whether autograd calls a hook that waits for the end of a step, and no wrapper does."""
    return any(isinstance(hook, _WaitingForStep) for hook in hooks.values())


def _that_wait(hooks: dict[int, Any] | None) -> list[_WaitingForStep]:
    """The hooks that wait for the end of a step, also inside of those that wait for a wrapper."""
    outer = hooks.values() if hooks else ()
    inner = (hook.hook if isinstance(hook, _Waiting) else hook for hook in outer)
    return [hook for hook in inner if isinstance(hook, _WaitingForStep)]


def _hooks_of(param: nn.Parameter) -> dict[int, Any]:
    """The dict of hooks that autograd and handles use, which stays the same object."""
    if param._post_accumulate_grad_hooks is None:
        param._post_accumulate_grad_hooks = OrderedDict()
    hooks: dict[int, Any] = param._post_accumulate_grad_hooks
    return hooks
