"""Hooks on all modules and all optimizers, which each simulated rank registers for itself.

A program registers such a hook in each of its processes, to run for what this process computes. The
dictionaries of torch stay the same objects, because handles and modules keep them.

Hooks of echelon run on every rank: they are registered once in a process, and ask whose turn it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from torch.nn.modules import module
from torch.optim import optimizer

from echelon.comm.threads.process_state import register_state

_Hooks: TypeAlias = tuple[tuple[int, Any], ...]
_OURS = __name__.partition(".")[0] + "."

_HOLDERS: list[dict[int, Any]] = [
    hooks
    for holder in (module, optimizer)
    for name, hooks in vars(holder).items()
    if name.startswith("_global_") and isinstance(hooks, dict)
]
_is_full = "_global_is_full_backward_hook"
_State: TypeAlias = tuple[tuple[_Hooks, ...], Any]
_NONE: _State = (tuple(() for _ in _HOLDERS), None)
_seen: list[Any] = []  # what was there when it was last looked at
_latest: _State = _NONE  # what of it is a rank's own


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_OURS)


def _select(hooks: Iterable[tuple[int, Any]], *, ours: bool) -> _Hooks:
    return tuple([(key, hook) for key, hook in hooks if _is_ours(hook) is ours])


def _save() -> _State:
    global _seen, _latest
    seen = [*map(tuple, map(dict.items, _HOLDERS)), vars(module)[_is_full]]
    if seen != _seen:
        _seen = seen
        values = tuple([_select(hooks, ours=False) for hooks in seen[:-1]]), seen[-1]
        _latest = _NONE if values == _NONE else values
    return _latest


def _restore(values: _State) -> None:
    for holder, hooks in zip(_HOLDERS, values[0], strict=True):
        wanted = (*_select(holder.items(), ours=True), *hooks)
        if tuple(holder.items()) != wanted:
            holder.clear()
            holder.update(sorted(wanted))  # by their numbers, as they were registered
    vars(module)[_is_full] = values[1]


register_state("hooks on all modules and optimizers", _save, _restore)
