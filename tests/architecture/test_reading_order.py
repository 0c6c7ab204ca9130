"""A package whose docstring names some of its files names all of them."""

import ast
import re

from tests.architecture.sources import Modules, read_modules


def not_on_the_map(modules: Modules) -> list[str]:
    """Files and folders that a package's docstring has not, and those of its list that are gone."""
    wrong = []
    for name in sorted(modules):
        docstring = ast.get_docstring(modules[name]) or ""
        before, found, text = docstring.partition("In reading order::")
        text = text if found else before
        prefix = f"{name}." if name else ""
        inside = {
            other.removeprefix(prefix)
            for other in modules
            if other.startswith(prefix) and "." not in other.removeprefix(prefix)
        } - {""}
        if not found and not inside & set(
            re.findall(r"^(?:    |``)([a-z_0-9]+)", text, re.MULTILINE)
        ):
            continue  # no list
        named = set(re.findall(r"\w+", text))
        rows = re.findall(r"^(?:    |``)([a-z_0-9]+)(?:``)?  ", text, re.MULTILINE)
        wrong += [f"{name} does not list {last}" for last in sorted(inside - named)]
        wrong += [f"{name} lists {row}, which is not there" for row in rows if row not in inside]
    return wrong


def test_a_list_in_reading_order_has_all_files_of_its_package() -> None:
    assert not_on_the_map(read_modules()) == []


def test_a_file_that_a_list_has_not_is_named_and_one_that_is_gone() -> None:
    text = '"""A room.\n\nIn reading order::\n\n    first  begins\n    third  ends\n"""'
    modules = {name: ast.parse("") for name in ("", "room.first", "room.second", "other.file")}
    modules |= {"room": ast.parse(text), "other": ast.parse('"""Another."""')}
    assert not_on_the_map(modules) == [
        "room does not list second",
        "room lists third, which is not there",
    ]
