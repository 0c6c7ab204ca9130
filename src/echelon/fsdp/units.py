"""Which parts of a model are gathered together: a rule, and the units that it makes of a module.

A unit is a module whose parameters are gathered before its forward and released after it. What no
unit claims belongs to the root. A parameter that several modules share lives once, in the lowest
unit that contains all of them.

[Note: modules that are never called]
``nn.MultiheadAttention`` passes ``self.out_proj.weight`` to a function and never calls
``self.out_proj``. Such a module cannot be a unit: nothing would gather it. Its own code tells
nothing, that of the module around it does: somewhere it reads ``self.child.param``, and nowhere it
calls ``self.child(...)``. What it does to set itself up is not counted, nor what asks for a
dtype or a shape.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import NamedTuple, final

from torch import nn

from echelon import checks
from echelon.errors import ArgumentError

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
    least = checks.integer("by_size(num_parameters)", num_parameters, low=1)

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


# Modules that are never called: see the note -------------------------------------------------

_SETS_UP = ("__init__", "_init", "init_", "reset_", "_reset", "tie_", "_tie")
_DESCRIBES = {
    "dtype",
    "device",
    "shape",
    "size",
    "dim",
    "ndim",
    "numel",
    "requires_grad",
    "is_cuda",
}
# CPython 3.11 counts the depth of a tree that it makes in one place for all threads, and raises
# SystemError when two make one at a time: https://github.com/python/cpython/issues/106905
_parsing = threading.Lock()
_ASKS = {"isinstance", "hasattr", "getattr", "id", "type"}


class _Uses(NamedTuple):
    """What the code of a class does with what lies below ``self``, as dotted paths."""

    reads: frozenset[str]
    calls: frozenset[str]


def bypassed_modules(model: nn.Module) -> set[nn.Module]:
    """The modules below ``model`` whose parameters others use in their place.

    Example:
        >>> found = bypassed_modules(nn.TransformerEncoderLayer(8, 2, 16))
        >>> [type(module).__name__ for module in found]
        ['NonDynamicallyQuantizableLinear']
    """
    found: set[nn.Module] = set()
    names = frozenset(name for module in model.modules() for name in module._parameters)
    for module in model.modules():
        kind: type = type(module)
        uses = _uses_of(kind, names)
        for path in uses.reads:
            owner_path, _, local = path.rpartition(".")
            owner = _below(module, owner_path)
            if owner is not None and local in owner._parameters and owner_path not in uses.calls:
                found.add(owner)
    return found


def _below(module: nn.Module, path: str) -> nn.Module | None:
    """The submodule at a dotted path of at least one name; None if there is none."""
    current: nn.Module | None = module if path else None
    for name in path.split("."):
        current = None if current is None else current._modules.get(name)
    return current


@cache
def _uses_of(cls: type, names: frozenset[str]) -> _Uses:
    """What the methods of a class and of its bases do; nothing where there is no source.

    Args:
        names: of parameters; a class that mentions none of them need not be read.
    """
    reads: set[str] = set()
    calls: set[str] = set()
    methods: dict[str, FunctionType] = {}
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and not name.startswith(_SETS_UP):
                methods.setdefault(name, value)  # a base's, where no subclass has replaced it
    if any(_mentions(inspect.unwrap(method).__code__, names) for method in methods.values()):
        for method in methods.values():
            for is_call, path in _paths(_tree_of(method)):
                (calls if is_call else reads).add(path)
    return _Uses(frozenset(reads), frozenset(calls))


def _mentions(code: CodeType, names: frozenset[str]) -> bool:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return not names.isdisjoint(code.co_names) or any(_mentions(one, names) for one in inner)


@cache
def _tree_of(method: FunctionType) -> ast.Module:
    """The source of a method."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(method)))
        with _parsing:
            return ast.parse(source)
    except (OSError, TypeError, SyntaxError):  # made at run time, or from compiled code
        return ast.Module(body=[], type_ignores=[])


def _paths(node: ast.AST) -> Iterator[tuple[bool, str]]:
    """Each ``self.a.b`` that code reads, and whether it calls that."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in _ASKS:
            return
        if (path := _path(node.func)) is not None:
            yield True, path
    elif isinstance(node, ast.Assert):
        return
    elif isinstance(node, ast.Attribute):
        if node.attr in _DESCRIBES:
            return
        if isinstance(node.ctx, ast.Load) and (path := _path(node)) is not None:
            yield False, path
            return
    for child in ast.iter_child_nodes(node):
        yield from _paths(child)


def _path(node: ast.expr) -> str | None:
    """``a.b`` of ``self.a.b``."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    is_own = isinstance(node, ast.Name) and node.id == "self"
    return ".".join(reversed(names)) if is_own and names else None
