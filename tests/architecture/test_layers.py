"""Who may import whom: the order of the rooms, and no circles.

Modules are read, not imported. Here and in the files beside this one, a rule is a function from
sources to sentences: one test expects none from the project, the others give the rule a wrong
example. CONTRIBUTING.md says what to do about each sentence.
"""

import ast

import pytest

from tests.architecture.sources import (
    PACKAGE,
    Modules,
    imported_modules,
    package_of,
    read_modules,
)

# Lowest first. A room is a file or a folder under src/echelon; what is inside a folder belongs
# to it. A module imports its own room and the layers below, so rooms side by side never meet.
LAYERS: list[set[str]] = [
    {"errors", "version"},
    {"checks", "events", "page", "ranges", "values"},
    {"process"},
    {"diagnosis"},
    {"comm"},
    {"c10d", "modules"},
    {"state"},
    {"launch"},
    {"testing", "train"},
    {"ddp", "fsdp", "pipeline", "checkpoint", "observe"},
    {"plans"},
    {"integrations", "laboratory"},
    {"planner"},
    {"cli"},
    {"__main__"},
    {PACKAGE},  # __init__.py: the public names
]

# Circles that are still there. This list only becomes shorter.
KNOWN_CIRCLES: list[set[str]] = []


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


def circles(modules: Modules) -> list[list[str]]:
    """Modules that import each other in a circle: anywhere in them, also for annotations only."""
    circles: dict[frozenset[str], list[str]] = {}
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            circle = path[path.index(name) :]
            circles.setdefault(frozenset(circle), circle)
        elif name not in done:
            for other in sorted(imported_modules(modules, name)):
                visit(other, [*path, name])
            done.add(name)

    for name in sorted(modules):
        visit(name, [])
    return list(circles.values())


def in_a_circle(modules: Modules, known: list[set[str]]) -> list[str]:
    """A sentence for each circle that is not ``known``, and for each known one that is gone."""
    now = circles(modules)
    new = [circle for circle in now if not any(set(circle) <= set(old) for old in known)]
    gone = [old for old in known if not any(set(circle) <= old for circle in now)]
    return [
        " imports ".join(name or PACKAGE for name in [*circle, circle[0]]) + ", which is a circle"
        for circle in new
    ] + [f"{' and '.join(sorted(old))} are no circle any more; remove them" for old in gone]


# --- the project obeys them --------------------------------------------------------------------


def test_every_module_is_in_a_layer() -> None:
    assert homeless(read_modules()) == []


def test_every_module_imports_only_its_own_room_and_lower_layers() -> None:
    assert imports_upwards(read_modules()) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert in_a_circle(read_modules(), KNOWN_CIRCLES) == []


# --- the rules see what they should ------------------------------------------------------------


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


@pytest.mark.parametrize(
    "source",
    [
        "from echelon.comm.world import Group",
        "def late():\n    from echelon.comm.world import Group",
        "if TYPE_CHECKING:\n    from echelon.comm.world import Group",
    ],
)
def test_a_circle_is_drawn_also_of_lazy_imports_and_for_annotations(source: str) -> None:
    modules = package_of(comm__mesh=source, comm__world="import echelon.comm.mesh")
    drawn = "comm.mesh imports comm.world imports comm.mesh, which is a circle"
    assert in_a_circle(modules, []) == [drawn]
    assert in_a_circle(modules, [{"comm.mesh", "comm.world", "comm.group"}]) == []


def test_a_known_circle_that_is_gone_is_named() -> None:
    modules = package_of(comm__mesh="", comm__world="import echelon.comm.mesh")
    assert in_a_circle(modules, [{"comm.mesh", "comm.world"}]) == [
        "comm.mesh and comm.world are no circle any more; remove them"
    ]
