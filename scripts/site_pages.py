"""Hooks of mkdocs: pages from outside of docs/, and drawings that follow the colour scheme.

GitHub shows the same files, so links and pictures are written for GitHub and changed here.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel
from site_links import DOCS, LINK, OUTSIDE, PROGRAMS, page_of

_PICTURE = re.compile(r'<p>\s*<img alt="([^"]*)" src="[^"]*?(images/[\w-]+\.svg)"[^>]*>\s*</p>')


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside, with links as they are on the site, and the programs."""
    for name, path in OUTSIDE.items():
        content = LINK.sub(partial(_on_site, path, ""), path.read_text())
        files.append(File.generated(config, name, content=content))
    for name, path in PROGRAMS.items():
        content = f"# {path.name}\n\n```python\n{path.read_text()}```\n"
        not_in_nav = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, name, content=content, inclusion=not_in_nav))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links that leave docs/ lead to the pages that were added."""
    source = DOCS / page.file.src_uri
    if not source.exists():  # added by on_files
        return markdown
    return LINK.sub(partial(_on_site, source, "../" * page.file.src_uri.count("/")), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Put drawings into the page itself, where its colours reach them.

    A drawing that has a narrow form, ``x-narrow.svg``, is replaced by it on a narrow screen.
    """

    def drawings(image: re.Match[str]) -> str:
        path = DOCS / image[2]
        narrow = path.with_stem(f"{path.stem}-narrow")
        if not narrow.exists():
            return _figure(path, image[1], "drawing")
        return _figure(path, image[1], "drawing wide") + _figure(narrow, image[1], "drawing narrow")

    return _PICTURE.sub(drawings, html)


def _figure(path: Path, label: str, classes: str) -> str:
    svg = re.sub(r"<style>.*?</style>", "", path.read_text(), flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="\d+" height="\d+"', r"\1", svg)
    return f'<figure class="{classes}" role="img" aria-label="{label}">{svg}</figure>'


def _on_site(source: Path, to_root: str, link: re.Match[str]) -> str:
    """A link of a page as it is on the site."""
    target = (source.parent / link[1]).resolve()
    if source.is_relative_to(DOCS) and target.is_relative_to(DOCS):
        return link[0]
    page = page_of(target)
    return link[0] if page is None else f"]({to_root}{page}"
