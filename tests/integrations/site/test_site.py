"""The documentation site is built without warnings and the network; its links lead somewhere."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.children import environ
from tests.pages.code_blocks import ROOT
from tests.pages.navigation import sections

# Attributes by which a browser fetches something without being asked to.
LOADING = {("script", "src"), ("img", "src"), ("iframe", "src"), ("link", "href")}


class PageParts(HTMLParser):
    """What one page links to, loads, and can be linked to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {values[name] or "" for name in ("id", "name") if name in values}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"] or "")
        for name in ("src", "href"):
            if (tag, name) in LOADING and values.get(name) and values.get("rel") != "canonical":
                self.loaded.append(values[name] or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a site that was built with every warning as an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environ(NO_MKDOCS_2_WARNING="1", http_proxy="http://127.0.0.1:9"),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, PageParts]:
    """The parts of every page, by its path in the site."""
    parts = {}
    for path in site.rglob("*.html"):
        page = PageParts()
        page.feed(path.read_text())
        parts[path.relative_to(site).as_posix()] = page
    return parts


def broken(site: Path, pages: dict[str, PageParts]) -> Iterator[str]:
    """The links of all pages to a page, file or anchor that is not there."""
    for name, page in pages.items():
        for link in {*page.links, *page.loaded}:
            address = urlsplit(link)
            if address.scheme or address.netloc or name == "404.html":
                continue
            target = (site / name).parent / unquote(address.path) if address.path else site / name
            key = target.resolve().relative_to(site.resolve()).as_posix()
            if not target.exists():
                yield f"{name} links to {link}, which does not exist"
            elif key in pages and unquote(address.fragment) not in {"", *pages[key].anchors}:
                yield f"{name} links to {link}, and {key} has no such anchor"


def test_no_link_is_broken(site: Path, pages: dict[str, PageParts]) -> None:
    assert sorted(broken(site, pages)) == []
    assert sum(len(page.links) for page in pages.values()) > 1000


def test_no_page_loads_anything_from_another_host(site: Path, pages: dict[str, PageParts]) -> None:
    loaded = {link for page in pages.values() for link in page.loaded}
    assert [link for link in loaded if urlsplit(link).netloc] == []
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", styles) == []


def test_every_page_of_the_menu_was_built(pages: dict[str, PageParts]) -> None:
    listed = [page for names in sections().values() for page in names]
    built = [re.sub(r"README\.md$", "index.md", page).removesuffix(".md") for page in listed]
    assert [page for page in built if f"{page}.html" not in pages] == []


def test_the_reference_has_every_public_name(pages: dict[str, PageParts]) -> None:
    anchors = {
        anchor for name, page in pages.items() if "reference/" in name for anchor in page.anchors
    }
    anchors |= {anchor.replace("echelon.errors.", "echelon.") for anchor in anchors}
    lines = (ROOT / "tests" / "golden" / "public_api.txt").read_text().splitlines()
    # Attributes that an exception sets on itself have no heading; nor have operators.
    names = {re.split(r"[( ]", line)[0] for line in lines if not line.endswith(" set")}
    names = {name for name in names if "__" not in name}
    assert len(names) > 400
    assert sorted(names - anchors) == []


def test_search_has_every_page(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text()
    assert '"location":"tutorial/a-hang.html' in index.replace(": ", ":")


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = PageParts()
    page.feed('<a href="no.html">x</a><a href="#no">y</a><img src="https://a.b/c"><p id="z">')
    (tmp_path / "a.html").write_text("")
    assert sorted(broken(tmp_path, {"a.html": page})) == [
        "a.html links to #no, and a.html has no such anchor",
        "a.html links to no.html, which does not exist",
    ]
    assert (page.loaded, page.anchors) == (["https://a.b/c"], {"z"})
