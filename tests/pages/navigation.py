"""The menu of the site, as mkdocs.yml has it."""

import re

from tests.pages.code_blocks import ROOT


def sections() -> dict[str, list[str]]:
    """The pages of each section of the menu, by their paths in docs/."""
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    pages: dict[str, list[str]] = {}
    for line in menu.splitlines():
        if match := re.match(r"  - ([\w. -]+):(?: (\S+\.md))?$", line):
            title = match[1]
            pages[title] = [match[2]] if match[2] else []
        elif match := re.match(r" +- (?:.*: )?(\S+\.md)$", line):
            pages[title].append(match[1])
    return pages
