"""The names of the plain model, also for modules that ``torch.compile`` has wrapped.

``torch.compile(module)`` is a module around ``module``, and every name gets a part ``_orig_mod``.
Without this, a checkpoint of a compiled model could not be loaded into the plain model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_COMPILED = "_orig_mod"  # the name of the module that torch.compile has wrapped


def plain_name(name: str) -> str:
    """The name in the plain model, without the parts that ``torch.compile`` adds.

    Example:
        >>> plain_name("_orig_mod.blocks.0._orig_mod.weight")
        'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def plain_state(module: nn.Module, state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A state with plain names, from which ``module`` reads the versions of its modules."""
    versions = {plain_name(path): own for path, own in versions_of(state).items()}
    paths = [path for path, _ in module.named_modules(remove_duplicate=False)]
    return with_versions(
        {plain_name(key): value for key, value in state.items()},
        {path: versions.get(plain_name(path), {}) for path in paths},
    )


def versions_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The versions of modules that ``state_dict()`` has noted in a state, by their names."""
    return dict(getattr(state, "_metadata", None) or {})


def with_versions(tensors: Mapping[str, Any], versions: dict[str, Any]) -> OrderedDict[str, Any]:
    """A state with the versions of modules where torch looks for them."""
    state = OrderedDict(tensors)
    state._metadata = versions  # type: ignore[attr-defined]
    return state


def compiled_inside(module: nn.Module) -> nn.Module | None:
    """The module that ``torch.compile`` has wrapped in ``module``; None if it has not."""
    return module._modules.get(_COMPILED)


def captures_graphs(module: nn.Module) -> bool:
    """Whether ``torch.compile`` was asked to record CUDA graphs of ``module`` itself."""
    made = module if compiled_inside(module) is not None else module._compiled_call_impl
    config_of = None if made is None else vars(made).get("get_compiler_config")
    config = None if config_of is None else config_of()
    return isinstance(config, Mapping) and bool(config.get("triton.cudagraphs"))


def keep_plain_names(module: nn.Module) -> None:
    """Give the state dicts of ``module``, and of all modules in it, plain names.

    State dicts with either kind of names can be loaded.
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
    for key in list(state):  # all keys are moved, so that their order stays
        value = state.pop(key)
        state[prefix + key.removeprefix(start) if key.startswith(start) else key] = value


def _insert(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    start = f"{prefix}{_COMPILED}."
    for key in list(state):
        if key.startswith(prefix) and not key.startswith(start):
            state[start + key.removeprefix(prefix)] = state.pop(key)


def keep_order_of_graphs() -> None:
    """Let torch try compiled graphs in the order in which they were made.

    Otherwise it begins with the graph that ran last. If two graphs fit, one for a shape and one for
    any, a recomputation could run another graph than its forward did, and save other tensors:
    https://github.com/pytorch/pytorch/issues/166926. This holds for the whole process, and changes
    nothing but the order. A version of torch without the switch is left as it is.
    """
    switch = vars(torch._C._dynamo.eval_frame).get("_set_lru_cache")
    if switch is not None:
        switch(False)
