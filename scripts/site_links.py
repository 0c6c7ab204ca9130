"""Where a link that leaves docs/ leads on the site: to a page that is added there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# Pages of the repository that lie outside of docs/, by their names on the site.
OUTSIDE = {
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "changelog.md": ROOT / "CHANGELOG.md",
    "benchmarks-method.md": ROOT / "benchmarks" / "README.md",
}
# Programs that pages link to, each as a page of its code.
PROGRAMS = {
    path.relative_to(ROOT).with_suffix(".md").as_posix(): path
    for path in sorted((ROOT / "examples" / "conversion").glob("*.py"))
}
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")


def page_of(target: Path) -> str | None:
    """The page of the site, from its root, that has a file of the repository; None without one."""
    if target == ROOT / "README.md":
        return "index.md"
    for name, path in (OUTSIDE | PROGRAMS).items():
        if path == target:
            return name
    inside = target.is_relative_to(DOCS) and target.exists()
    return target.relative_to(DOCS).as_posix() if inside else None
