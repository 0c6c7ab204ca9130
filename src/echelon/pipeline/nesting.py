"""How containers are nested, as data that another process makes the same containers of.

Only containers that the receiver knows by itself are made: those of Python, named tuples of modules
that it has imported, and classes that it has registered with ``torch.utils._pytree``.
"""

from __future__ import annotations

import sys
from collections import defaultdict, namedtuple
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from echelon.errors import ArgumentError

_NAMED = "namedtuple"  # its name stands for all of its classes
_MAKERS: dict[str, Any] = {
    kind.__name__: kind for kind in (int, float, str, list, dict, set, tuple)
}

# None for a leaf, else the kind of a container, what it needs to be made, and its length.
Node = tuple[str, Any, int] | None


def described(tree: Any) -> list[Node]:
    """Each container and each leaf of ``tree``, those of a container behind it.

    Raises:
        ArgumentError: the receiver could not find a class that is in it.
    """
    return list(_described(tree))


def _described(tree: Any) -> Iterator[Node]:
    kind = pytree._get_node_type(tree)
    if kind not in pytree.SUPPORTED_NODES:
        yield None
        return
    children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(tree)
    if kind is namedtuple:
        context = _name(context)
        if _named_tuple(context) is not type(tree):
            raise ArgumentError(_unknown(context))
        yield _NAMED, context, len(children)
    elif kind is defaultdict:
        factory, keys = context
        name = None if factory is None else getattr(factory, "__name__", "")
        if factory is not None and _MAKERS.get(name or "") is not factory:
            raise ArgumentError(
                f"a defaultdict of {factory!r:.60} cannot go to another stage: give a dict"
            )
        yield _name(kind), (name, keys), len(children)
    else:
        yield _name(kind), context, len(children)
    for child in children:
        yield from _described(child)


def rebuilt(nodes: Sequence[Node], leaves: Iterator[Any]) -> Any:
    """The containers of ``described``, with these leaves.

    Raises:
        ArgumentError: a class that this process does not know.
    """
    kinds = {_name(kind): kind for kind in pytree.SUPPORTED_NODES if kind is not namedtuple}
    return _rebuilt(iter(nodes), leaves, kinds)


def _rebuilt(nodes: Iterator[Node], leaves: Iterator[Any], kinds: dict[str, Any]) -> Any:
    node = next(nodes)
    if node is None:
        return next(leaves)
    name, context, length = node
    children = [_rebuilt(nodes, leaves, kinds) for _ in range(length)]
    if name == _NAMED:
        made = _named_tuple(context)
        if made is None:
            raise ArgumentError(_unknown(context))
        return made(*children)
    if name not in kinds:
        raise ArgumentError(
            f"another stage sends a {name}, which is not registered with torch.utils._pytree in "
            "this process: import the module that registers it on all ranks"
        )
    kind = kinds[name]
    if kind is defaultdict:
        factory, keys = context
        context = [None if factory is None else _MAKERS[factory], keys]
    return pytree.SUPPORTED_NODES[kind].unflatten_fn(children, context)


def _name(kind: Any) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _named_tuple(name: str) -> Any:
    """The class of that name in a module that is imported; None where there is none."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    known = isinstance(found, type) and pytree.is_namedtuple_class(found)
    return found if known else None


def _unknown(name: str) -> str:
    return (
        f"what goes to the next stage cannot be written down: {name.replace(':', '.')} is not "
        "found by its name; define the class at the top of a module that all ranks import"
    )
