"""The menu of the site has every page, once."""

from tests.pages.code_blocks import ROOT
from tests.pages.navigation import sections

# What scripts/site_pages.py adds from outside of docs/.
OUTSIDE = {"benchmarks-method.md", "changelog.md", "contributing.md"}


def test_every_page_of_docs_is_in_the_menu_once() -> None:
    listed = [page for pages in sections().values() for page in pages]
    there = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert there - set(listed) == set(), "add these to nav in mkdocs.yml"
    assert set(listed) - there - OUTSIDE == set(), "nav has pages that are not there"
    assert sorted(listed) == sorted(set(listed))


def test_the_sections_are_those_of_the_plan() -> None:
    wanted = ["Tutorial", "How-to", "Concepts", "Laboratory", "Coming from", "Reference"]
    assert set(wanted) <= set(sections())
    assert len(sections()["Tutorial"]) == 9  # eight chapters and their table
