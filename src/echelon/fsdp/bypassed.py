"""Which modules are never called, because a module around them uses their parameters itself.

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
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import NamedTuple

from torch import nn

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
