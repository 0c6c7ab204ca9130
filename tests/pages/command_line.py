"""The page of the command line, made from what its commands print.

``python -m tests.pages.command_line`` writes docs/reference/command-line.md again.
"""

from collections.abc import Iterator

import typer.main
from typer.testing import CliRunner

from echelon.cli import app
from tests.pages.code_blocks import ROOT

PAGE = ROOT / "docs" / "reference" / "command-line.md"
MARK = "<!-- run by tests/pages/test_command_line.py -->"


def command_names() -> Iterator[list[str]]:
    """The words of each command, those of a group of commands one by one."""
    for name, command in typer.main.get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        yield from ([name, other] for other in inner) if inner else [name.split()]


def written_page() -> str:
    """The text of the page."""
    parts = ["# Command line\n", "Each command prints this with `--help`.\n"]
    for words in sorted(command_names()):
        command = " ".join(["echelon", *words])
        shown = CliRunner().invoke(
            app, [*words, "--help"], env={"COLUMNS": "80"}, prog_name="echelon"
        )
        parts += [
            f"## {command}\n",
            f"```\n$ {command} --help\n{shown.output.strip()}\n```\n{MARK}\n",
        ]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(written_page())
