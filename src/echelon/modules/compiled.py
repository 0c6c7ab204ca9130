"""Modules that ``torch.compile`` has put into one of its own keep the plain model's names.

``torch.compile(module)`` is a module around ``module``, and torch shows it in every name as
``_orig_mod``. A checkpoint of a compiled model could then not be loaded into the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_COMPILED = "_orig_mod"  # where torch.compile puts a module into one of its own


def plain_name(name: str) -> str:
    """The name without what ``torch.compile`` puts into it.

    Example:
        >>> plain_name("_orig_mod.blocks.0._orig_mod.weight")
        'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def plain_keys(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with plain names."""
    return {plain_name(key): value for key, value in state.items()}


def compiled_inside(module: nn.Module) -> nn.Module | None:
    """What ``torch.compile`` was given if ``module`` is what it returned."""
    return module._modules.get(_COMPILED)


def keep_plain_names(module: nn.Module) -> None:
    """Let the state dicts of ``module``, and of all in it, have plain names, compiled or not.

    Both kinds of names are loaded.
    """
    for submodule in module.modules():
        if (
            compiled_inside(submodule) is not None
            and _remove not in submodule._state_dict_hooks.values()
        ):
            submodule.register_state_dict_post_hook(_remove)
            submodule.register_load_state_dict_pre_hook(_insert)


def _remove(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    start = f"{prefix}{_COMPILED}."
    for key in list(state):  # all of them, so that their order stays
        value = state.pop(key)
        state[prefix + key.removeprefix(start) if key.startswith(start) else key] = value


def _insert(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    start = f"{prefix}{_COMPILED}."
    for key in list(state):
        if key.startswith(prefix) and not key.startswith(start):
            state[start + key.removeprefix(prefix)] = state.pop(key)


def keep_order_of_graphs() -> None:
    """Let torch look for a compiled graph in the order in which the graphs were made.

    Else it begins with the one that ran last. Of two that fit, one for a shape and one for any,
    a recomputation would then run another than its forward did, and keep other tensors:
    https://github.com/pytorch/pytorch/issues/166926. It holds for the whole process, where it
    changes nothing but this order. A torch without the switch is left as it is.
    """
    switch = vars(torch._C._dynamo.eval_frame).get("_set_lru_cache")
    if switch is not None:
        switch(False)
