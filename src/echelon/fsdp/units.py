"""Which parts of a model are unsharded together: wrapping rules, and the units that they make.

A unit is a module whose parameters are unsharded before its forward and resharded after it.
Parameters that no unit claims belong to the root. A parameter that several modules share (a tied
one) is stored once, in the lowest unit that contains all of them.

[Note: modules that are never called]
``nn.MultiheadAttention`` passes ``self.out_proj.weight`` to a function and never calls
``self.out_proj``. Such a module cannot be a unit, because nothing would unshard it. Those of torch
are known here, and so are containers without a forward, such as ``nn.ParameterList``. In other
modules, the line that uses a parameter of a unit which is not unsharded raises an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final

from torch import nn

from echelon import checks
from echelon.errors import ArgumentError

__all__ = ["Member", "Rule", "UnitPlan", "by_function", "by_size", "by_type", "plan_units", "whole"]


@final
@dataclass(frozen=True)
class Rule:
    """Decides which modules become units.

    Attributes:
        text: the rule as it is written in a program.
        claims: is called with a module below the root, the number of its parameters, and the number
            of those that no unit inside it has claimed, for children before their parents.
    """

    text: str
    claims: Callable[[nn.Module, int, int], bool]

    def __repr__(self) -> str:
        return self.text


def whole() -> Rule:
    """One unit: the whole model."""
    return Rule("whole()", lambda module, numel, rest: False)


def by_size(num_parameters: int) -> Rule:
    """Modules with at least ``num_parameters`` that no unit inside them has claimed."""
    least = checks.integer("by_size(num_parameters)", num_parameters, low=1)

    def claims(module: nn.Module, numel: int, rest: int) -> bool:
        return rest >= least

    return Rule(f"by_size({least})", claims)


def by_type(
    *classes: type[nn.Module] | str | tuple[type[nn.Module] | str, ...],
) -> Rule:
    """Modules of these classes, or of classes with these names; also given as a tuple."""
    listed = [cls for given in classes for cls in (given if isinstance(given, tuple) else (given,))]
    if not listed:
        raise ArgumentError("by_type() needs at least one class, or the name of one")
    for cls in listed:
        if not isinstance(cls, str) and not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ArgumentError(f"by_type got {cls!r}; give classes of modules, or their names")
    names = {cls for cls in listed if isinstance(cls, str)}
    types = tuple(cls for cls in listed if not isinstance(cls, str))

    def claims(module: nn.Module, numel: int, rest: int) -> bool:
        return isinstance(module, types) or type(module).__name__ in names

    written = ", ".join(cls if isinstance(cls, str) else cls.__name__ for cls in listed)
    return Rule(f"by_type({written})", claims)


def by_function(function: Callable[[nn.Module, int], bool]) -> Rule:
    """Modules for which ``function(module, number of its parameters)`` is true."""
    if not callable(function):
        raise ArgumentError(f"by_function got {function!r}; give a function of module and number")
    return Rule(
        f"by_function({getattr(function, '__name__', function)!s})",
        lambda module, numel, rest: bool(function(module, numel)),
    )


@final
@dataclass(frozen=True)
class Member:
    """A parameter of a unit.

    Attributes:
        name: its name in the model.
        param: the object that the optimizer holds.
        owner: a module that has it.
    """

    name: str
    param: nn.Parameter
    owner: nn.Module


@final
@dataclass(frozen=True)
class UnitPlan:
    """One unit.

    Attributes:
        name: the name of its module in the model; empty for the root.
        module: the module itself.
        members: its parameters, in the order of the model.
    """

    name: str
    module: nn.Module
    members: tuple[Member, ...]

    @property
    def num_parameters(self) -> int:
        """The number of elements of all members."""
        return sum(member.param.numel() for member in self.members)

    @property
    def text(self) -> str:
        """A description of its parameters, for ranks to compare."""
        names = ", ".join(member.name for member in self.members)
        return f"{self.num_parameters} elements of {names or 'no parameters'}"


def plan_units(
    model: nn.Module, rule: Rule, ignored: Collection[nn.Parameter] = ()
) -> list[UnitPlan]:
    """Cut ``model`` into units: those of the rule in the order of the model, after the root.

    Args:
        ignored: parameters that belong to no unit.

    Raises:
        ArgumentError: ``rule`` is not a rule.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> [(unit.name, unit.num_parameters) for unit in plan_units(model, by_type(nn.Linear))]
        [('', 0), ('0', 6), ('2', 6)]
    """
    if not isinstance(rule, Rule):
        raise ArgumentError(f"units is {rule!r}; use by_size, by_type, by_function or whole")
    skip = {id(param) for param in ignored}
    claimed = _claimed(model, rule, skip)
    if not claimed and rule.text != "whole()":
        kinds = sorted({type(module).__name__ for module in model.modules()})
        warnings.warn(
            f"units={rule} matches no module that is called, so the whole model is one unit; "
            f"the model has {', '.join(kinds)}",
            stacklevel=2,
        )
    unit_of_param: dict[int, str] = {}
    members: dict[str, list[Member]] = {"": [], **{name: [] for name in claimed}}
    first_places: dict[int, Member] = {}
    claimed_names = {id(module): name for name, module in claimed.items()}
    unit_of_path: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        above = unit_of_path[path.rpartition(".")[0]] if path else ""
        unit_of_path[path] = claimed_names.get(id(module), above)
        for name, param in module._parameters.items():
            if param is None or id(param) in skip:
                continue
            unit = unit_of_path[path]
            if id(param) in unit_of_param:  # it is tied
                unit = _lowest_common_unit(unit_of_param[id(param)], unit, claimed)
            else:
                first_places[id(param)] = Member(f"{path}.{name}".lstrip("."), param, module)
            unit_of_param[id(param)] = unit
    for key, member in first_places.items():
        members[unit_of_param[key]].append(member)
    plans = [UnitPlan("", model, tuple(members[""]))]
    plans += [
        UnitPlan(name, claimed[name], tuple(members[name])) for name in claimed if members[name]
    ]
    return plans


def _claimed(model: nn.Module, rule: Rule, skip: set[int]) -> dict[str, nn.Module]:
    """The modules that the rule makes units, by name, in the order of the model."""
    claimed: dict[str, nn.Module] = {}
    bypassed = bypassed_modules(model) if rule.text != whole().text else set()
    claimed_ids: set[int] = set()  # of parameters
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        for child, submodule in module.named_children():
            visit(f"{name}.{child}".lstrip("."), submodule)
        params = {id(p): p for p in module.parameters() if id(p) not in skip}
        rest = sum(p.numel() for key, p in params.items() if key not in claimed_ids)
        if module in bypassed:
            return  # a unit is unsharded when it is called
        if name and params and rule.claims(module, sum(p.numel() for p in params.values()), rest):
            claimed[name] = module
            claimed_ids.update(params)

    visit("", model)
    return {name: claimed[name] for name, _ in model.named_modules() if name in claimed}


def _lowest_common_unit(a: str, b: str, claimed: Collection[str]) -> str:
    """The name of the lowest unit that contains both units, for a tied parameter."""
    while a != b:
        longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
        longer = longer.rpartition(".")[0]
        while longer and longer not in claimed:
            longer = longer.rpartition(".")[0]
        a, b = longer, shorter
    return a


# Modules that are never called: see the note -------------------------------------------------

# The child that a module of torch never calls, by its class.
_NEVER_CALLED = {
    "torch.nn.modules.activation.MultiheadAttention": "out_proj",
    "torch.nn.modules.loss.LinearCrossEntropyLoss": "linear",  # since torch 2.13
}


def bypassed_modules(model: nn.Module) -> set[nn.Module]:
    """The modules of ``model`` that are never called: others use their parameters or submodules.

    Example:
        >>> modules = bypassed_modules(nn.TransformerEncoderLayer(8, 2, 16))
        >>> [type(module).__name__ for module in modules]
        ['NonDynamicallyQuantizableLinear']
    """
    bypassed = {module for module in model.modules() if not _has_forward(module)}
    for module in model.modules():
        for base in type(module).__mro__:
            local = _NEVER_CALLED.get(f"{base.__module__}.{base.__qualname__}")
            if local is not None:
                bypassed.add(module.get_submodule(local))
    return bypassed


def _has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: containers such as ``nn.ParameterList`` cannot."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward
