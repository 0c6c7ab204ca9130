"""Every link between files of the documentation leads to a page of the site."""

import re

from scripts.site_links import DOCS, LINK, OUTSIDE, page_of
from tests.pages.code_blocks import ROOT


def test_every_link_leads_to_a_page_of_the_site() -> None:
    pages = [*DOCS.rglob("*.md"), *OUTSIDE.values()]
    prose = {
        page: re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S) for page in pages
    }
    links = [(page, link) for page in pages for link in LINK.findall(prose[page])]
    lost = [
        f"{page.relative_to(ROOT)}: {link}"
        for page, link in links
        if page_of((page.parent / link).resolve()) is None
    ]
    assert len(links) > 300
    assert lost == []


def test_a_file_without_a_page_is_seen() -> None:
    assert page_of(ROOT / "README.md") == "index.md"
    assert page_of(ROOT / "CHANGELOG.md") == "changelog.md"
    assert page_of(DOCS / "fsdp.md") == "fsdp.md"
    assert page_of(ROOT / "examples" / "conversion" / "plan.py") == "examples/conversion/plan.md"
    assert page_of(ROOT / "Makefile") is None
    assert page_of(DOCS / "nowhere.md") is None
