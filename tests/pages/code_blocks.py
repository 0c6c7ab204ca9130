"""The blocks of code of a page, and what the page says about running them.

A line after a block may say ``<!-- not run: why -->`` or ``<!-- run by tests/file.py -->``. What a
page needs and does not show is in a comment that begins with ``<!-- python``. A page whose blocks
run on several simulated ranks says ``<!-- ranks: 2 -->``.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
SHELL = ("sh", "bash", "console")
_COMMAND = re.compile(r"^(\$ |(echelon|make|mpirun|pip|pytest|python|srun|torchrun) )", re.M)
_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```[ ]*\n"
    r"(?:\n?(?P=indent)<!-- (?P<mark>(?:not run: |run by )[^>]*?) -->)?"
    r"|^(?P<hidden_indent> *)<!-- python\n(?P<hidden>.*?)^ *-->",
    re.M | re.S,
)


@dataclass(frozen=True, kw_only=True)
class CodeBlock:
    """One block of a page.

    Attributes:
        line: where its text begins, from 1.
        language: as the page names it; empty for a drawing, an output or commands.
        mark: what the page says about running it; empty for nothing.
        follows: whether nothing but empty lines is between it and the block before.
    """

    line: int
    language: str
    text: str
    mark: str = ""
    follows: bool = False

    @property
    def is_python(self) -> bool:
        """Whether it is code that runs in this process."""
        return self.language == "python" and not self.mark and not self.file_name

    @property
    def is_shell(self) -> bool:
        """Whether it has commands."""
        return self.language in SHELL or (not self.language and bool(_COMMAND.search(self.text)))

    @property
    def file_name(self) -> str:
        """The name of the file that it is, which its first line says."""
        first = re.match(r"# ([\w/]+\.py)\n", self.text)
        return first[1] if self.language == "python" and first else ""

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """Each command after a dollar sign, and the lines of output that are shown."""
        pairs: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                pairs.append((line[2:].split("  #")[0].strip(), []))
            elif pairs and line.strip():
                pairs[-1][1].append(line)
        return pairs


def code_blocks(page: Path) -> list[CodeBlock]:
    """All blocks of ``page``, in its order."""
    text = page.read_text()
    blocks = []
    end = 0
    for match in _BLOCK.finditer(text):
        indent, hidden = match["indent"] or match["hidden_indent"] or "", match["hidden"]
        code = match["text"] if hidden is None else hidden
        blocks.append(
            CodeBlock(
                line=text.count("\n", 0, match.start()) + 2,
                language=match["language"] if hidden is None else "python",
                text=re.sub(rf"^{indent}", "", code, flags=re.M),
                mark=match["mark"] or "",
                follows=not text[end : match.start()].strip(),
            )
        )
        end = match.end()
    return blocks


def num_ranks(page: Path) -> int:
    """On how many simulated ranks the blocks run; 0 for this process alone."""
    match = re.search(r"^<!-- ranks: (\d+) -->$", page.read_text(), re.M)
    return int(match[1]) if match else 0


def page_name(page: Path) -> str:
    """The path of a page as a test shows it."""
    return page.relative_to(ROOT).as_posix()


_ROUNDING = r"(?:\\d\\.\\de-1\\d|0\\.0e\\+00)"


def differing_line(shown: list[str], printed: list[str]) -> str | None:
    """The first line that is shown and was not printed in its place.

    ``…`` stands for any text, and a difference of rounding (``1.4e-16``) for any other one, or for
    none (``0.0e+00``): processors round differently.
    """
    rest = iter(printed)
    for line in shown:
        if line.strip() == "…":
            continue
        pattern = ".*".join(re.escape(piece) for piece in line.rstrip().split("…"))
        pattern = re.sub(r"\d\\\.\de\\-1\d|0\\\.0e\\\+00", _ROUNDING, pattern)
        if not any(re.fullmatch(pattern, other.rstrip()) for other in rest):
            return line
    return None
