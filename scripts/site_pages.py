"""Hooks of mkdocs: pages from outside of docs/, and drawings that follow the colour scheme.

GitHub shows the same files, so links and pictures are written for GitHub and changed here.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Pages of the repository that lie outside of docs/, by their names on the site.
OUTSIDE = {
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "changelog.md": ROOT / "CHANGELOG.md",
    "benchmarks-method.md": ROOT / "benchmarks" / "README.md",
}
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
_PICTURE = re.compile(r'<p>\s*<img alt="([^"]*)" src="[^"]*?(images/[\w-]+\.svg)"[^>]*>\s*</p>')


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside, with links as they are on the site."""
    for name, path in OUTSIDE.items():
        content = _LINK.sub(partial(_on_site, path), path.read_text())
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links that leave docs/ lead to the pages that were added."""
    if page.file.src_uri in OUTSIDE:
        return markdown
    source = ROOT / "docs" / page.file.src_uri
    depth = "../" * page.file.src_uri.count("/")

    def change(link: re.Match[str]) -> str:
        target = (source.parent / link[1]).resolve()
        name = _outside_name(target)
        return link[0] if name is None else f"]({depth}{name}"

    return _LINK.sub(change, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Put drawings into the page itself, where its colours reach them.

    A drawing that has a narrow form, ``x-narrow.svg``, is replaced by it on a narrow screen.
    """

    def drawings(image: re.Match[str]) -> str:
        path = ROOT / "docs" / image[2]
        narrow = path.with_stem(f"{path.stem}-narrow")
        if not narrow.exists():
            return _figure(path, image[1], "drawing")
        return _figure(path, image[1], "drawing wide") + _figure(narrow, image[1], "drawing narrow")

    return _PICTURE.sub(drawings, html)


def _figure(path: Path, label: str, classes: str) -> str:
    svg = re.sub(r"<style>.*?</style>", "", path.read_text(), flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="\d+" height="\d+"', r"\1", svg)
    return f'<figure class="{classes}" role="img" aria-label="{label}">{svg}</figure>'


def _outside_name(target: Path) -> str | None:
    return next((name for name, path in OUTSIDE.items() if path == target), None)


def _on_site(page: Path, match: re.Match[str]) -> str:
    """The link of a page from outside as it is on the site."""
    link = match[1]
    target = (page.parent / link).resolve()
    name = _outside_name(target)
    if name is None and target.is_relative_to(ROOT / "docs"):
        name = target.relative_to(ROOT / "docs").as_posix()
    return "](" + (name or ("index.md" if target == ROOT / "README.md" else link))
