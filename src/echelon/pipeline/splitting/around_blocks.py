"""Which modules and parameters of a model run before its list of blocks, and which after it.

The order in which they are registered says so for most models. Where a forward uses a name on the
other side of the list only, as OPT uses its last norm, the order in the code of the forward counts.
Neither proves anything: a stage that lacks what its forward needs says so, with the names.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn


class NamesAround(NamedTuple):
    """The names of modules and parameters around a list of blocks.

    Attributes:
        before: those that run before the blocks.
        after: those that run after them.
        tables: modules of either whose only tensors are buffers that are not saved, such as tables
            of positions. Any stage can have them, since they are not trained.
    """

    before: list[str]
    after: list[str]
    tables: frozenset[str]


def names_around(model: nn.Module, list_name: str) -> NamesAround:
    """The names around the list ``list_name``, at every level on the way to it.

    Example:
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.norm = nn.Embedding(3, 2), nn.LayerNorm(2)
        ...         self.blocks = nn.ModuleList([nn.Linear(2, 2)])
        ...
        ...     def forward(self, x):
        ...         x = self.embed(x)
        ...         for block in self.blocks:
        ...             x = block(x)
        ...         return self.norm(x)
        >>> names_around(Model(), "blocks")[:2]
        (['embed'], ['norm'])
    """
    before: list[str] = []
    after: list[str] = []
    module, path = model, ""
    for step in list_name.split("."):
        children = list(module._modules)
        position = children.index(step)
        first = [*module._parameters, *children[:position]]
        last = children[position + 1 :]
        uses = _uses_of_forward(module)
        late = [local for local in first if _is_used_after(local, step, uses)]
        early = [local for local in last if _is_used_before(local, step, uses)]
        named_before = [local for local in first if local not in late] + early
        named_after = [local for local in last if local not in early]
        before += [f"{path}{local}" for local in named_before]
        after = [f"{path}{local}" for local in (*late, *named_after)] + after
        module, path = module.get_submodule(step), f"{path}{step}."
    modules = dict(model.named_modules(remove_duplicate=False))
    tables = (name for name in (*before, *after) if name in modules and _is_table(modules[name]))
    return NamesAround(before, after, frozenset(tables))


def _is_table(module: nn.Module) -> bool:
    return any(True for _ in module.buffers()) and not module.state_dict()


def _is_used_after(local: str, step: str, uses: list[str]) -> bool:
    """Whether a forward with these uses has ``local`` among them, and only after ``step``."""
    return {local, step} <= set(uses) and uses.index(local) > _last_index(uses, step)


def _is_used_before(local: str, step: str, uses: list[str]) -> bool:
    return {local, step} <= set(uses) and _last_index(uses, local) < uses.index(step)


def _last_index(uses: list[str], name: str) -> int:
    return len(uses) - 1 - uses[::-1].index(name)


def _uses_of_forward(module: nn.Module) -> list[str]:
    """The attributes that a forward uses, as its code runs them; empty where it has no source."""
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
        tree = ast.parse(textwrap.dedent(source))
    except (OSError, TypeError, SyntaxError):  # typed at a prompt, not of Python, or cut
        return []
    return list(_uses(tree))


def _uses(node: ast.AST) -> Iterator[str]:
    """The attributes that code uses: in ``self.head(self.body(x))`` the body comes first."""
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        children = [*node.args, *node.keywords, node.func]
    for child in children:
        yield from _uses(child)
    if isinstance(node, ast.Attribute):
        yield node.attr
