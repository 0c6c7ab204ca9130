"""The architecture as a test: who may import whom, how long a file may be, which names exist.

Modules are read, not imported. Each rule is a function from sources to sentences; the tests
at the top expect none from the project, the tests below give the same rules a wrong example.
CONTRIBUTING.md says what to do about each sentence.
"""

import __future__

import ast
import importlib
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "echelon"

# Lowest first. A room is a file or a folder under src/echelon; what is inside a folder belongs
# to it. A module imports its own room and the layers below, so rooms side by side never meet.
LAYERS: list[set[str]] = [
    {"errors", "version"},
    {"checks", "events", "ranges", "values"},
    {"process"},
    {"diagnosis"},
    {"comm"},
    {"c10d", "modules"},
    {"state"},
    {"launch"},
    {"testing", "train"},
    {"ddp", "fsdp", "pipeline", "checkpoint", "observe"},
    {"plan"},
    {"planner"},
    {"cli"},
    {"__main__"},
    {PACKAGE},  # __init__.py: the public names
]

MAY_IMPORT_TORCH_DISTRIBUTED = {"comm.torch_dist", "c10d", "launch.agent"}
MAY_ASK_FOR_DEVICE_TYPE = {"comm.streams"}
NAMELESS = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

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


# --- reading imports ---------------------------------------------------------------------------


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
    found = set()
    for dotted in imported_names(modules[name], types=types):
        package, *parts = dotted.split(".")
        if package == PACKAGE:
            while parts and ".".join(parts) not in modules:
                parts.pop()
            found.add(".".join(parts))
    return found - {name}


# --- rules -------------------------------------------------------------------------------------


def room(name: str) -> str:
    """The file or folder under src/echelon that a module belongs to."""
    return name.split(".")[0] or PACKAGE


def layer(name: str, *, default: int) -> int:
    """The position in LAYERS of a module's room; ``default`` where it has none."""
    return next((i for i, rooms in enumerate(LAYERS) if room(name) in rooms), default)


def homeless(modules: Modules) -> list[str]:
    """Modules without a layer."""
    return [f"{name} is in no room of LAYERS" for name in modules if layer(name, default=-1) < 0]


def imports_upwards(modules: Modules) -> list[str]:
    """Imports of a module that is neither in the same room nor in a lower layer."""
    return [
        f"{name or PACKAGE} imports {other or PACKAGE}, which is not below it in LAYERS"
        for name in modules
        for other in sorted(imported_modules(modules, name))
        if room(name) != room(other) and layer(other, default=-1) >= layer(name, default=99)
    ]


def cycles(modules: Modules) -> list[str]:
    """Modules that import each other in a circle, lazily or not; for annotations it is allowed."""
    found: set[frozenset[str]] = set()
    sentences = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            circle = path[path.index(name) :]
            if frozenset(circle) not in found:
                found.add(frozenset(circle))
                steps = " imports ".join(step or PACKAGE for step in [*circle, name])
                sentences.append(f"{steps}, which is a circle")
        elif name not in done:
            for other in sorted(imported_modules(modules, name, types=False)):
                visit(other, [*path, name])
            done.add(name)

    for name in sorted(modules):
        visit(name, [])
    return sentences


def foreign_to_torch_distributed(modules: Modules) -> list[str]:
    """Uses of torch.distributed outside the two rooms that wrap it."""
    sentences = []
    for name in sorted(modules):
        if any(f"{name}.".startswith(f"{room}.") for room in MAY_IMPORT_TORCH_DISTRIBUTED):
            continue
        written = set(imported_names(modules[name])) | {
            ast.unparse(node) for node in ast.walk(modules[name]) if isinstance(node, ast.Attribute)
        }
        if any(f"{dotted}.".startswith("torch.distributed.") for dotted in written):
            allowed = " and ".join(sorted(MAY_IMPORT_TORCH_DISTRIBUTED))
            sentences.append(f"{name or PACKAGE} uses torch.distributed; only {allowed} may")
    return sentences


def asks_for_device_type(modules: Modules) -> list[str]:
    """Branches on the kind of a device outside streams.py."""
    sentences = []
    for name in sorted(set(modules) - MAY_ASK_FOR_DEVICE_TYPE):
        for node in ast.walk(modules[name]):
            if isinstance(node, ast.Attribute) and (
                node.attr in {"is_cuda", "is_cpu"}
                or (node.attr == "type" and ast.unparse(node.value).rstrip(")").endswith("device"))
            ):
                asked = ast.unparse(node)
                sentences.append(
                    f"{name or PACKAGE}, line {node.lineno}, asks for {asked}; only streams may"
                )
    return sentences


def too_long(path: str, source: str) -> list[str]:
    """The file, and each function in it, that is longer than the limit."""
    sentences = []
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        sentences.append(
            f"{path} has {num_lines} lines, more than {MAX_FILE_LINES}: it holds two nouns"
        )
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                sentences.append(
                    f"{path}:{node.lineno}: {node.name} has {num_lines} lines, "
                    f"more than {MAX_FUNCTION_LINES}: it does two things"
                )
    return sentences


def nameless(path: Path) -> list[str]:
    """A file or folder whose name does not say what is in it."""
    return [
        f"{path} is named {part!r}, which does not say what is in it"
        for part in path.with_suffix("").parts
        if NAMELESS & set(part.split("_"))
    ]


def unlisted_names(package: ModuleType) -> list[str]:
    """Differences between ``__all__`` and the names that a user can import."""
    if not hasattr(package, "__all__"):
        return [f"{package.__name__} has no __all__"]
    listed = list(package.__all__)
    missing = [name for name in listed if not hasattr(package, name)]
    public = {
        name
        for name in set(dir(package)) - set(missing)
        if not name.startswith("_")
        # Not meant as names of the package: what it needs itself, and modules, of which each
        # one becomes an attribute when anybody imports it.
        and not hasattr(typing, name)
        and not isinstance(getattr(package, name), ModuleType | __future__._Feature)
    }
    return (
        [f"{name} is in __all__ and cannot be imported" for name in missing]
        + [f"{name} is public and not in __all__" for name in sorted(public - set(listed))]
        + [f"{name} is twice in __all__" for name in sorted(set(listed)) if listed.count(name) > 1]
    )


# --- the project obeys them --------------------------------------------------------------------


def test_every_module_is_in_a_layer() -> None:
    assert homeless(read_modules()) == []


def test_every_module_imports_only_its_own_room_and_lower_layers() -> None:
    assert imports_upwards(read_modules()) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert cycles(read_modules()) == []


def test_only_two_rooms_know_torch_distributed() -> None:
    assert foreign_to_torch_distributed(read_modules()) == []


def test_only_streams_asks_what_kind_of_device_it_has() -> None:
    assert asks_for_device_type(read_modules()) == []


def test_files_and_functions_keep_to_their_length() -> None:
    assert [
        sentence
        for path in project_files()
        for sentence in too_long(str(path.relative_to(ROOT)), path.read_text())
    ] == []


def test_file_names_say_what_is_in_them() -> None:
    assert [s for path in project_files() for s in nameless(path.relative_to(ROOT))] == []


def test_all_is_what_a_user_can_import() -> None:
    assert unlisted_names(importlib.import_module(PACKAGE)) == []


def test_every_folder_of_tests_is_a_package_so_that_child_processes_can_import_it() -> None:
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()] == []


# --- the rules see what they should ------------------------------------------------------------


def package_of(**sources: str) -> dict[str, ast.Module]:
    """Modules from sources; ``__`` in a name stands for a dot."""
    return {name.replace("__", "."): ast.parse(source) for name, source in sources.items()}


def test_an_import_of_a_sibling_is_named() -> None:
    modules = package_of(pipeline__execute="from echelon.fsdp.api import FSDP", fsdp__api="")
    assert imports_upwards(modules) == [
        "pipeline.execute imports fsdp.api, which is not below it in LAYERS"
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import echelon.ddp.api",
        "from echelon.ddp import api",
        "from echelon.ddp.api import DDP",
        "def late():\n    from echelon.ddp.api import DDP",
        "if TYPE_CHECKING:\n    from echelon.ddp.api import DDP",
        "importlib.import_module('echelon.ddp.api')",
    ],
)
def test_every_way_to_import_upwards_is_seen(source: str) -> None:
    modules = package_of(comm__world=source, ddp="", ddp__api="")
    assert imports_upwards(modules) == [
        "comm.world imports ddp.api, which is not below it in LAYERS"
    ]


def test_the_own_room_and_lower_layers_may_be_imported() -> None:
    source = "from echelon.ddp import buckets\nfrom echelon.comm.world import Group"
    modules = package_of(ddp__api=source, ddp__buckets="", comm__world="", ddp="", comm="")
    assert imports_upwards(modules) == []


def test_the_package_itself_is_above_all_its_modules() -> None:
    modules = {"": ast.parse(""), **package_of(ddp__api="from echelon import DDP")}
    assert imports_upwards(modules) == ["ddp.api imports echelon, which is not below it in LAYERS"]


def test_a_module_without_a_layer_is_named() -> None:
    assert homeless(package_of(tricks__fast="")) == ["tricks.fast is in no room of LAYERS"]


def test_a_circle_of_lazy_imports_is_drawn() -> None:
    late = "def late():\n    from echelon.comm.world import Group"
    modules = package_of(comm__mesh=late, comm__world="import echelon.comm.mesh")
    assert cycles(modules) == ["comm.mesh imports comm.world imports comm.mesh, which is a circle"]


def test_a_circle_for_annotations_only_is_allowed() -> None:
    typed = "if TYPE_CHECKING:\n    from echelon.comm.world import Group"
    modules = package_of(comm__mesh=typed, comm__world="import echelon.comm.mesh")
    assert cycles(modules) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import TCPStore",
        "import torch\ntorch.distributed.barrier()",
    ],
)
def test_every_use_of_torch_distributed_is_seen(source: str) -> None:
    assert foreign_to_torch_distributed(package_of(comm__run=source)) == [
        "comm.run uses torch.distributed; only c10d and comm.torch_dist and launch.agent may"
    ]
    assert foreign_to_torch_distributed(package_of(comm__torch_dist=source)) == []


@pytest.mark.parametrize(
    "asked", ["device.type", "tensor.device.type", "self._device.type", "tensor.is_cuda"]
)
def test_a_question_for_the_kind_of_device_is_named(asked: str) -> None:
    assert asks_for_device_type(package_of(ddp__api=f"x = {asked} == 1")) == [
        f"ddp.api, line 1, asks for {asked}; only streams may"
    ]
    assert asks_for_device_type(package_of(comm__streams=f"x = {asked} == 1")) == []


def test_a_long_file_and_a_long_function_are_named() -> None:
    source = "def f():\n" + "    x = 1\n" * 400
    assert too_long("a.py", source) == [
        "a.py has 401 lines, more than 400: it holds two nouns",
        "a.py:1: f has 401 lines, more than 60: it does two things",
    ]


@pytest.mark.parametrize("path", ["src/utils.py", "tests/common/test_a.py", "src/io_helpers.py"])
def test_a_name_that_says_nothing_is_named(path: str) -> None:
    assert len(nameless(Path(path))) == 1


def test_a_public_name_outside_all_is_named() -> None:
    package = ModuleType("package")
    package.__all__ = ["gone"]
    package.stray = 1
    assert unlisted_names(package) == [
        "gone is in __all__ and cannot be imported",
        "stray is public and not in __all__",
    ]
