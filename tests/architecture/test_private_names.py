"""Every private name of torch that echelon uses has a row: why, and what to do without it."""

import ast
import importlib
import tomllib
from collections.abc import Callable, Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.architecture.sources import Modules, package_of, read_modules

TABLE = Path(__file__).with_name("private_names.toml")
# Of namedtuples and of ``sys``: with an underscore, and documented.
PUBLIC = {"_asdict", "_fields", "_make", "_replace", "_getframe", "_current_frames"}
# ``torch._C`` alone is a way to what a row names.
WAYS = {
    "torch._C",
    "torch._C._autograd",
    "torch._C._dynamo",
    "torch._C._functorch",
    "torch._C._profiler",
}
OBJECTS: dict[str, Callable[[], Any]] = {
    "torch.Tensor": lambda: nn.Parameter(torch.ones(1)),
    "torch.UntypedStorage": lambda: torch.ones(1).untyped_storage(),
    "torch.autograd.graph.Node": lambda: torch.ones(1, requires_grad=True).sum().grad_fn,
    "torch.nn.Module": lambda: nn.Linear(1, 1),
    "torch.optim.Optimizer": lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))]),
    "torch.amp.GradScaler": lambda: torch.amp.GradScaler("cpu"),
}


@cache
def table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(TABLE.read_text())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_of_torch(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The dotted names of torch with a private part that a module imports or writes, by line."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                imported[alias.asname or top] = alias.name if alias.asname else top
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}", node.lineno
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in imported:
            yield ".".join([imported[inner.id], *reversed(parts)]), node.lineno  # type: ignore[attr-defined]


def private_names_of_torch(modules: Modules) -> dict[str, str]:
    """By dotted name, a module and a line that uses it; ways to other names are left out."""
    return {
        name: f"{module or 'echelon'}, line {line}"
        for module in sorted(modules)
        for name, line in names_of_torch(modules[module])
        if name.split(".")[0] == "torch"
        and any(map(is_private, name.split(".")))
        and name not in WAYS
    }


@cache
def uses() -> dict[str, str]:
    """Those of the package."""
    return private_names_of_torch(read_modules())


def row_of(name: str) -> str | None:
    parts = name.split(".")
    above = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((each for each in above if each in table()["torch"]), None)


def private_attributes(modules: Modules) -> dict[str, str]:
    """Private attributes of objects that no class or function of the package is known to define."""
    defined, used = set[str](), dict[str, str]()
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                if isinstance(node.ctx, ast.Load):
                    used.setdefault(node.attr, f"{module or 'echelon'}, line {node.lineno}")
                elif isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
                    defined.add(node.attr)
    return {name: place for name, place in used.items() if name not in defined | PUBLIC}


def rows_of_attributes() -> dict[str, str]:
    """By attribute, the name of its row."""
    return {row.rpartition(".")[2]: row for row in table()["torch_attributes"]}


def without_row(modules: Modules) -> list[str]:
    """Sentences about uses that no row explains."""
    of_torch = private_names_of_torch(modules)
    sentences = [
        f"{place} uses {name}: take a public name, or give it a row in {TABLE.name}"
        for name, place in of_torch.items()
        if row_of(name) is None
    ]
    known = set(rows_of_attributes()) | set(" ".join(table()["others"].values()).split())
    known |= {part for name in of_torch for part in name.split(".")}
    sentences += [
        f"{place} uses the attribute {name}: take a public one, or give it a row in {TABLE.name}"
        for name, place in private_attributes(modules).items()
        if name not in known
    ]
    return sentences


# --- the project -------------------------------------------------------------------------------


def test_every_private_name_has_a_row() -> None:
    assert without_row(read_modules()) == []


def test_every_row_is_used_and_says_why_and_what_to_do() -> None:
    used = {row_of(name) for name in uses()}
    assert set(table()["torch"]) - used == set()
    text = "\n".join(map(ast.unparse, read_modules().values()))
    attributes = [*rows_of_attributes(), *" ".join(table()["others"].values()).split()]
    assert [name for name in attributes if f".{name}" not in text and f"'{name}'" not in text] == []
    rows = [*table()["torch"].values(), *table()["torch_attributes"].values()]
    assert all(len(row) == 2 and all(map(str.strip, row)) for row in rows)


@pytest.mark.parametrize("row", sorted(table()["torch"]))
def test_the_installed_torch_has_what_a_row_names(row: str) -> None:
    names = [name for name in uses() if row_of(name) == row]
    optional = {"ProcessGroupNCCL", "Options"}  # which a build for CPUs lacks
    for name in names:
        if not optional.isdisjoint(name.split(".")):
            continue
        reason, remedy = table()["torch"][row]
        assert exists(name), (
            f"torch {torch.__version__} has no {name}. It is used because: {reason}. "
            f"Instead: {remedy}."
        )


@pytest.mark.parametrize("row", sorted(table()["torch_attributes"]))
def test_objects_of_the_installed_torch_have_the_attribute_of_a_row(row: str) -> None:
    owner, _, name = row.rpartition(".")
    reason, remedy = table()["torch_attributes"][row]
    assert hasattr(OBJECTS[owner](), name), (
        f"a {owner} of torch {torch.__version__} has no {name}. It is used because: {reason}. "
        f"Instead: {remedy}."
    )


def exists(name: str) -> bool:
    """Whether a dotted name can be imported, or is an attribute of what can."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:n]))
        except ImportError:
            continue
        missing = object()
        return reduce(lambda at, part: getattr(at, part, missing), parts[n:], module) is not missing
    return False


# --- the rules see what they should ------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("import torch\ntorch._nobody()", "line 2 uses torch._nobody"),
        ("from torch._nowhere import name", "line 1 uses torch._nowhere.name"),
        ("from torch import optim as o\no._deep.name", "line 2 uses torch.optim._deep"),
        ("import torch._nowhere as n\nn.name", "line 1 uses torch._nowhere"),
        ("def f(x):\n    return x._nobody", "line 2 uses the attribute _nobody"),
    ],
)
def test_a_new_private_name_is_found(source: str, use: str) -> None:
    sentences = without_row(package_of(comm__run=source))
    assert sentences
    assert use in sentences[0].replace(",", "").replace("comm.run ", "")


def test_a_name_that_torch_lacks_is_not_there() -> None:
    assert exists("torch.nn.Linear.forward")
    assert not exists("torch._C._nobody")
    assert not exists("nowhere.name")
