"""Which parts of a model are gathered together: a rule, and the units that it makes of a module.

A unit is a module whose parameters are gathered before its forward and released after it. What no
unit claims belongs to the root. A parameter that several modules share lives once, in the lowest
unit that contains all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final

from torch import nn

from echelon import checks
from echelon.errors import ArgumentError
from echelon.fsdp.bypassed import bypassed_modules

__all__ = ["Member", "Rule", "UnitPlan", "by_function", "by_size", "by_type", "plan_units", "whole"]


@final
@dataclass(frozen=True)
class Rule:
    """Decides which modules become units.

    Attributes:
        text: as in the source.
        claims: called with a module below the root, the number of its parameters, and the number
            of those that no unit inside it has claimed; children come before their parents.
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
    least = checks.whole("by_size(num_parameters)", num_parameters, low=1)

    def claims(module: nn.Module, numel: int, rest: int) -> bool:
        return not isinstance(module, nn.ModuleList | nn.ModuleDict) and rest >= least

    return Rule(f"by_size({least})", claims)


def by_type(*classes: type[nn.Module] | str) -> Rule:
    """Modules of these classes, or of classes with these names."""
    if not classes:
        raise ArgumentError("by_type() needs at least one class, or the name of one")
    for one in classes:
        if not isinstance(one, str) and not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise ArgumentError(f"by_type got {one!r}; give classes of modules, or their names")
    names = {one for one in classes if isinstance(one, str)}
    types = tuple(one for one in classes if not isinstance(one, str))

    def claims(module: nn.Module, numel: int, rest: int) -> bool:
        return isinstance(module, types) or type(module).__name__ in names

    listed = ", ".join(one if isinstance(one, str) else one.__name__ for one in classes)
    return Rule(f"by_type({listed})", claims)


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
        name: in the model.
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
        name: of its module in the model; empty for the root.
        module: what is called.
        members: its parameters, in the order of the model.
    """

    name: str
    module: nn.Module
    members: tuple[Member, ...]

    @property
    def num_parameters(self) -> int:
        """Elements of all members."""
        return sum(member.param.numel() for member in self.members)

    @property
    def text(self) -> str:
        """What it consists of, for ranks to compare."""
        names = ", ".join(member.name for member in self.members)
        return f"{self.num_parameters} elements of {names or 'no parameters'}"


def plan_units(
    model: nn.Module, rule: Rule, ignored: Collection[nn.Parameter] = ()
) -> list[UnitPlan]:
    """Cut ``model`` into units: those of the rule in the order of the model, after the root.

    Args:
        ignored: parameters that belong to no unit.

    Raises:
        ArgumentError: ``rule`` is none.

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
            f"units={rule} matches no module, so the whole model is one unit; "
            f"the model has {', '.join(kinds)}",
            stacklevel=2,
        )
    paths: dict[int, str] = {}
    members: dict[str, list[Member]] = {"": [], **{name: [] for name in claimed}}
    first: dict[int, Member] = {}
    unit_of = {id(module): name for name, module in claimed.items()}
    homes: dict[str, str] = {}  # the unit of each place in the model
    for prefix, module in model.named_modules(remove_duplicate=False):
        above = homes[prefix.rpartition(".")[0]] if prefix else ""
        homes[prefix] = unit_of.get(id(module), above)
        for name, param in module._parameters.items():
            if param is None or id(param) in skip:
                continue
            unit = homes[prefix]
            if id(param) in paths:
                unit = _common(paths[id(param)], unit, claimed)
            else:
                first[id(param)] = Member(f"{prefix}.{name}".lstrip("."), param, module)
            paths[id(param)] = unit
    for key, member in first.items():
        members[paths[key]].append(member)
    plans = [UnitPlan("", model, tuple(members[""]))]
    plans += [
        UnitPlan(name, claimed[name], tuple(members[name])) for name in claimed if members[name]
    ]
    return plans


def _claimed(model: nn.Module, rule: Rule, skip: set[int]) -> dict[str, nn.Module]:
    """The modules that the rule takes, by name, in the order of the model."""
    taken: dict[str, nn.Module] = {}
    bypassed = bypassed_modules(model) if rule.text != whole().text else set()
    owned: set[int] = set()  # parameters of units
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        for child, submodule in module.named_children():
            visit(f"{name}.{child}".lstrip("."), submodule)
        params = {id(p): p for p in module.parameters() if id(p) not in skip}
        rest = sum(p.numel() for key, p in params.items() if key not in owned)
        if module in bypassed:
            return  # a unit is gathered when it is called
        if name and params and rule.claims(module, sum(p.numel() for p in params.values()), rest):
            taken[name] = module
            owned.update(params)

    visit("", model)
    return {name: taken[name] for name, _ in model.named_modules() if name in taken}


def _common(a: str, b: str, claimed: Collection[str]) -> str:
    """The lowest unit that contains both units."""
    while a != b:
        longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
        longer = longer.rpartition(".")[0]
        while longer and longer not in claimed:
            longer = longer.rpartition(".")[0]
        a, b = longer, shorter
    return a
