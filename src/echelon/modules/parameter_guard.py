"""The parameters that a wrapper has found in its module, and whether they are still the ones."""

from __future__ import annotations

from typing import final

from torch import nn

from echelon.errors import StateError
from echelon.modules.compiled import plain_name


@final
class ParameterGuard:
    """Sees when a wrapped module has got other parameters: nobody would reduce their gradients.

    Looks at every forward, so it compares with a flat list and walks the module only when something
    has changed.

    Args:
        module: what is wrapped, with the parameters that the wrapper knows.
        owner: name of the wrapper, for messages.
        keeps_names: refuse a parameter under another name, as of a module that was pruned or
            parametrized: what goes with it was made from a part.
    """

    def __init__(self, module: nn.Module, owner: str, *, keeps_names: bool = False) -> None:
        self._module, self._owner = module, owner
        self._names = {param: plain_name(name) for name, param in module.named_parameters()}
        self._keeps_names = keeps_names
        self._known = {param: (param.dtype, param.requires_grad) for param in module.parameters()}
        self._look()

    def _look(self) -> None:
        tables = [t for one in self._module.modules() for t in (one._parameters, one._modules)]
        self._lengths = [(table, len(table)) for table in tables]
        self._places = [(table, name, table[name]) for table in tables for name in table]
        self._traits = [(p, p.dtype, p.requires_grad) for p in self._module.parameters()]

    def check(self) -> None:
        """Refuse a module with other parameters.

        Raises:
            StateError: one was added, replaced, converted or unfrozen; names it.
        """
        if self._is_as_seen():
            return
        for name, param in self._module.named_parameters():
            self._compare(name, param)
        self._look()  # what has changed needs no reduction

    def _is_as_seen(self) -> bool:
        for table, name, item in self._places:
            if table.get(name) is not item:
                return False
        for table, length in self._lengths:
            if len(table) != length:
                return False
        for param, dtype, trainable in self._traits:
            if param.dtype is not dtype or param.requires_grad is not trainable:
                return False
        return True

    def _compare(self, name: str, param: nn.Parameter) -> None:
        dtype, trainable = self._known.get(param, (param.dtype, None))
        before = self._names.get(param)
        if self._keeps_names and before not in (None, plain_name(name)):
            raise StateError(
                f"parameter {before!r} became {name!r} after {self._owner} wrapped the model, as "
                "prune, spectral_norm and parametrizations do, and what they made was made from "
                "this rank's part: change the model first and wrap it then"
            )
        what, do = None, "change the model first and wrap it then"
        if trainable is None and param.requires_grad and not isinstance(param, nn.Parameter):
            what = "was exchanged for another tensor, as torch.func.functional_call does,"
            do = (
                "give functional_call the module inside of a DDP (model.module), whose gradients "
                "are then of this rank alone, or the model before it is sharded"
            )
        elif trainable is None and param.requires_grad:
            what = "was added or replaced"
        elif param.dtype is not dtype:
            what = f"was converted from {dtype} to {param.dtype}"
        elif trainable is False and param.requires_grad:
            what = "was frozen, and unfrozen"
            do = (
                "wrap the model while everything that is ever trained requires a gradient, and "
                "freeze it then; that, and to thaw it again, is allowed between any two steps"
            )
        if what is not None:
            raise StateError(
                f"parameter {name!r} {what} after {self._owner} wrapped the model, so its gradient "
                f"would not be reduced: {do}"
            )
