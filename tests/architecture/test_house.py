"""Where a file stands and what it is called: rooms, unique names, and a test file for each file."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.architecture.sources import PACKAGE, ROOT, Modules, package_of, read_modules

MAX_LEVELS = 2  # of folders under src/echelon
MAX_LOOSE = 6  # files directly under src/echelon
# What a file is in its room: its entry, a group of ranks, the start of them.
MAY_STAND_TWICE = {"api", "group", "start", "__main__"}

# These stand twice still. The lists only become shorter.
KNOWN_MODULE_NAMES: set[str] = set()
KNOWN_CLASS_NAMES: set[str] = set()

# One starts the command line, one holds a constant.
NEED_NO_TEST = {"__main__", "version"}
# Source files without a test file of their name: one path under src/echelon a line. What they do is
# tested elsewhere. The list only becomes shorter.
UNTESTED = Path(__file__).parent / "untested.txt"


def packages(modules: Modules) -> set[str]:
    """The modules that are folders."""
    return {name.rpartition(".")[0] for name in modules}


def too_deep(modules: Modules) -> list[str]:
    """Modules in more folders than two."""
    return [
        f"{name} stands in {name.count('.')} folders, more than {MAX_LEVELS}"
        for name in modules
        if name not in packages(modules) and name.count(".") > MAX_LEVELS
    ]


def too_many_loose(modules: Modules) -> list[str]:
    """A sentence when too many modules stand in no room."""
    loose = [name for name in modules if name and "." not in name]
    loose = [name for name in loose if name not in packages(modules) and name != "__main__"]
    if len(loose) <= MAX_LOOSE:
        return []
    return [f"{', '.join(loose)} are loose modules, more than {MAX_LOOSE}: find their rooms"]


def stand_twice(homes: Iterable[tuple[str, str]], known: set[str]) -> list[str]:
    """Names that several places give to different things, and known ones that do not any more.

    Args:
        homes: names, each with the place where it stands.
        known: names that may stand twice.
    """
    places = defaultdict(set)
    for name, home in homes:
        places[name].add(home)
    twice = {name: sorted(where) for name, where in places.items() if len(where) > 1}
    return [
        f"{name} is the name of {' and '.join(twice[name])}" for name in sorted(set(twice) - known)
    ] + [f"{name} stands only once; remove it from the list" for name in sorted(known - set(twice))]


def module_names(modules: Modules) -> list[tuple[str, str]]:
    """The last name of each module that is a file, with its whole name."""
    names = [(name.rpartition(".")[2], name) for name in sorted(modules)]
    folders = packages(modules)
    return [
        (last, name) for last, name in names if name not in folders and last not in MAY_STAND_TWICE
    ]


def class_names(modules: Modules) -> list[tuple[str, str]]:
    """The classes of all modules, also those inside of functions, with where they stand."""
    return [
        (node.name, f"{name or PACKAGE}:{node.lineno}")
        for name in sorted(modules)
        for node in ast.walk(modules[name])
        if isinstance(node, ast.ClassDef)
    ]


def without_test_file(modules: Modules, tests: Iterable[str], known: Iterable[str]) -> list[str]:
    """Modules whose room has no test file of their name, and known ones that have one by now.

    Args:
        tests: the test files, as paths under tests/.
        known: modules that may have none.
    """
    stems = {(Path(path).parts[0].removesuffix(".py"), Path(path).stem) for path in tests}
    folders = packages(modules)
    missing = set()
    for name in modules:
        if name and name not in folders and name not in NEED_NO_TEST:
            last = f"test_{name.rpartition('.')[2]}"
            rooms = (name.split(".")[0], last)  # a loose module may have its test beside the rooms
            if not any((room, last) in stems for room in rooms):
                missing.add(name)
    known = set(known)
    return [
        f"{name} has no test file: tests/{name.split('.')[0]}/test_{name.rpartition('.')[2]}.py"
        for name in sorted(missing - known)
    ] + [
        f"{name} is no module without a test file any more; remove it from the list"
        for name in sorted(known - missing)
    ]


def not_on_the_map(modules: Modules) -> list[str]:
    """Files and folders that a package's list in reading order has not, and those that are gone."""
    wrong = []
    for name in sorted(packages(modules)):
        _, found, text = (ast.get_docstring(modules[name]) or "").partition("In reading order::")
        if not found:
            continue
        prefix = f"{name}." if name else ""
        inside = {other.removeprefix(prefix).partition(".")[0] for other in modules if other}
        inside = {last for last in inside if f"{prefix}{last}" in modules}
        named = set(re.findall(r"\w+", text))
        rows = re.findall(r"^    ([a-z_0-9]+)  ", text, re.MULTILINE)
        wrong += [f"{name} does not list {last}" for last in sorted(inside - named)]
        wrong += [f"{name} lists {row}, which is not there" for row in rows if row not in inside]
    return wrong


# --- the project obeys them --------------------------------------------------------------------


def test_no_module_stands_deeper_than_in_two_folders() -> None:
    assert too_deep(read_modules()) == []


def test_few_modules_stand_outside_of_the_rooms() -> None:
    assert too_many_loose(read_modules()) == []


def test_no_two_modules_have_the_same_last_name() -> None:
    assert stand_twice(module_names(read_modules()), KNOWN_MODULE_NAMES) == []


def test_no_two_classes_have_the_same_name() -> None:
    assert stand_twice(class_names(read_modules()), KNOWN_CLASS_NAMES) == []


def test_a_list_in_reading_order_has_all_files_of_its_package() -> None:
    assert not_on_the_map(read_modules()) == []


def test_every_source_file_has_a_test_file_of_its_name() -> None:
    tests = [str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py")]
    known = UNTESTED.read_text().split()
    assert known == sorted(set(known)), "sorted, each once"
    assert without_test_file(read_modules(), tests, known) == []


# --- the rules see what they should ------------------------------------------------------------


def test_a_module_in_three_folders_is_named() -> None:
    modules = package_of(a="", a__b="", a__b__c="", a__b__c__d="", a__b__e="")
    assert too_deep(modules) == ["a.b.c.d stands in 3 folders, more than 2"]


def test_a_seventh_loose_module_is_named_and_packages_are_not_counted() -> None:
    modules = package_of(a="", b="", c="", d="", e="", f="", g="", room="", room__x="")
    assert too_many_loose(modules) == [
        "a, b, c, d, e, f, g are loose modules, more than 6: find their rooms"
    ]
    top = {"": ast.parse(""), "__main__": ast.parse("")}
    assert too_many_loose({**package_of(a="", b="", c="", d="", e="", f=""), **top}) == []


def test_a_module_name_that_stands_twice_is_named_and_that_of_a_transport_is_not() -> None:
    modules = package_of(
        comm="", comm__a__state="", fsdp="", fsdp__state="", comm__group="", fsdp__group=""
    )
    assert stand_twice(module_names(modules), set()) == [
        "state is the name of comm.a.state and fsdp.state"
    ]
    assert stand_twice(module_names(modules), {"state"}) == []
    assert stand_twice(module_names(modules), {"state", "order"}) == [
        "order stands only once; remove it from the list"
    ]


def test_a_class_name_that_stands_twice_is_named_also_in_one_file() -> None:
    modules = package_of(a="class X: ...\nclass Y: ...", b="def f():\n    class X: ...", c="")
    assert stand_twice(class_names(modules), set()) == ["X is the name of a:1 and b:2"]


def test_a_file_that_a_list_has_not_is_named_and_one_that_is_gone() -> None:
    text = '"""A room.\n\nIn reading order::\n\n    first  begins\n    third  ends\n"""'
    modules = {name: ast.parse("") for name in ("", "room.first", "room.second", "other.file")}
    modules |= {"room": ast.parse(text), "other": ast.parse('"""Another."""')}
    assert not_on_the_map(modules) == [
        "room does not list second",
        "room lists third, which is not there",
    ]


def test_a_module_without_a_test_file_is_named_and_one_that_has_it_by_now() -> None:
    modules = package_of(ddp="", ddp__reducer="", ddp__join="", comm="", comm__shm="", ranges="")
    tests = ["ddp/test_join.py", "comm/test_reducer.py", "test_ranges.py", "comm/deep/test_shm.py"]
    assert without_test_file(modules, tests, []) == [
        "ddp.reducer has no test file: tests/ddp/test_reducer.py"
    ]
    assert without_test_file(modules, tests, ["ddp.reducer", "ddp.join"]) == [
        "ddp.join is no module without a test file any more; remove it from the list"
    ]
