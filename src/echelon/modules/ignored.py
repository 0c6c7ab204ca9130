"""Parameters that a wrapper is told to leave alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from echelon.errors import ArgumentError


def ignored_parameters(
    module: nn.Module, ignored: Sequence[nn.Module | nn.Parameter]
) -> list[nn.Parameter]:
    """The parameters that stay whole and local.

    Raises:
        ArgumentError: something that is not in the model, a parameter that an ignored module
            shares with one that is not, or all there are.
    """
    if not isinstance(ignored, Iterable):
        raise ArgumentError(f"ignored is {ignored!r:.80}; give a list of modules and parameters")
    ignored = list(ignored)  # it is read twice
    params = dict.fromkeys(module.parameters())
    modules = set(module.modules())
    skip: dict[nn.Parameter, None] = {}
    inside: set[nn.Module] = set()
    for one in ignored:
        if isinstance(one, nn.Parameter) and one in params:
            skip[one] = None
        elif isinstance(one, nn.Module) and one in modules:
            inside.update(one.modules())
            skip.update(dict.fromkeys(one.parameters()))
        else:
            raise ArgumentError(f"ignored has {one!r:.80}, which is not in the model")
    for name, submodule in module.named_modules():
        if submodule in inside:
            continue
        for local, param in submodule._parameters.items():
            if param in skip and not any(param is one for one in ignored):
                raise ArgumentError(
                    f"parameter {local!r} of module {name!r} is shared with an ignored module: "
                    "ignore both, or neither"
                )
    if skip and not any(param.requires_grad for param in params if param not in skip):
        raise ArgumentError(
            f"ignored has every parameter of {type(module).__name__} that requires a gradient, so "
            "nothing is left to share: use the module itself"
        )
    return list(skip)
