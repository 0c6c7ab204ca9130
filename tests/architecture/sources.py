"""The source files of the project as trees, and what each imports. Nothing is imported here."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = "echelon"

Modules = Mapping[str, ast.Module]  # by name without the package: "comm.threads"; "" is echelon


@cache
def read_modules() -> dict[str, ast.Module]:
    """The modules of the package, by name without the package."""
    top = ROOT / "src" / PACKAGE
    modules = {}
    for path in sorted(top.rglob("*.py")):
        parts = list(path.relative_to(top).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        modules[".".join(parts)] = ast.parse(path.read_text(), filename=str(path))
    return modules


def project_files() -> list[Path]:
    """All Python files that people read."""
    folders = ("src", "tests", "examples", "benchmarks", "scripts")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def walk(tree: ast.AST, *, types: bool) -> Iterator[ast.AST]:
    """All nodes of ``tree``; those under ``if TYPE_CHECKING`` only with ``types``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and not types and "TYPE_CHECKING" in ast.unparse(node.test):
            for branch in node.orelse:
                yield branch
                yield from walk(branch, types=types)
        else:
            yield node
            yield from walk(node, types=types)


def imported_names(tree: ast.Module, *, types: bool = True) -> Iterator[str]:
    """The dotted names that a module imports, anywhere in it, also by a literal string."""
    for node in walk(tree, types=types):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0]
            if called in {"import_module", "__import__"} and isinstance(first, ast.Constant):
                yield str(first.value)


def imported_modules(modules: Modules, name: str, *, types: bool = True) -> set[str]:
    """The modules of this package that ``name`` imports.

    ``from echelon.comm import world`` imports ``comm.world``; ``from echelon.comm import Group``
    imports ``world`` itself, because no module has that name.
    """
    imported = set()
    for dotted in imported_names(modules[name], types=types):
        package, *parts = dotted.split(".")
        if package == PACKAGE:
            while parts and ".".join(parts) not in modules:
                parts.pop()
            imported.add(".".join(parts))
    return imported - {name}


def package_of(**sources: str) -> dict[str, ast.Module]:
    """Modules from sources; ``__`` in a name stands for a dot."""
    return {name.replace("__", "."): ast.parse(source) for name, source in sources.items()}
