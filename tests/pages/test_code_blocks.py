"""The code of every page runs, or the page says why not."""

import contextlib
import io
import linecache
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ec
from tests.children import environ
from tests.hosts import skip_without_host
from tests.pages.code_blocks import (
    PAGES,
    ROOT,
    CodeBlock,
    code_blocks,
    differing_line,
    num_ranks,
    page_name,
)
from tests.pages.navigation import sections

BLOCKS = {page: code_blocks(page) for page in PAGES}
WITH_PYTHON = [page for page in PAGES if any(block.is_python for block in BLOCKS[page])]
WITH_COMMANDS = [
    page
    for page in PAGES
    if any(block.is_shell and block.commands and not block.mark for block in BLOCKS[page])
]
# Pages that teach by doing: each has code that runs.
TAUGHT = [
    ROOT / "docs" / page
    for title in ("Tutorial", "How-to", "Laboratory", "Integrations", "Coming from")
    for page in sections().get(title, [])
]


def execute(block: CodeBlock, page: Path, namespace: dict[str, Any]) -> None:
    """Run a block in the namespace of its page; errors show its lines."""
    name = f"<{page_name(page)}:{block.line}>"
    lines = block.text.splitlines(keepends=True)
    linecache.cache[name] = (len(block.text), None, lines, name)
    exec(compile(block.text, name, "exec"), namespace)


def run_page(page: Path, world: ec.World | None) -> str | None:
    """Run the blocks of Python; the first line that a page shows as output and is not."""
    namespace: dict[str, Any] = {"__name__": "__main__", "ec": ec, "torch": torch, "world": world}
    torch.manual_seed(0)
    printed: list[str] = []
    for block in BLOCKS[page]:
        if block.file_name and not block.mark:
            Path(block.file_name).write_text(block.text)
        elif block.is_python:
            output = io.StringIO()
            with contextlib.redirect_stdout(output) if world is None else contextlib.nullcontext():
                execute(block, page, namespace)
            printed = output.getvalue().splitlines()
        elif block.language == "" and not block.is_shell and block.follows and printed:
            line = differing_line(block.text.splitlines(), printed)
            if line is not None:
                return f"{page_name(page)}:{block.line} shows {line!r}; printed were {printed}"
    return None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in which a page may write, and in which it finds the examples."""
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "benchmarks", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    state = random.getstate()
    yield tmp_path
    random.setstate(state)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON, ids=page_name)
def test_python_of_a_page_runs_and_prints_what_it_shows(page: Path, folder: Path) -> None:
    skip_without_host(page)
    ranks = num_ranks(page)
    if ranks:
        assert ec.run(lambda world: run_page(page, world), ranks) == [None] * ranks
    else:
        assert run_page(page, None) is None


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=page_name)
def test_commands_of_a_page_print_what_it_shows(page: Path, folder: Path) -> None:
    for block in BLOCKS[page]:
        if block.file_name and not block.mark:
            (folder / block.file_name).write_text(block.text)
        for command, shown in block.commands if block.is_shell and not block.mark else ():
            words = shlex.split(command)
            tools = {"echelon": ["echelon"], "python": [], "pytest": ["pytest", "-q"]}
            assert words[0] in tools, f"{page_name(page)}:{block.line} {command} has no mark"
            head = [sys.executable, *(f"-m {' '.join(tools[words[0]])}".split() or ["-m"])]
            done = subprocess.run(
                [*(head if tools[words[0]] else head[:1]), *words[1:]],
                cwd=folder,
                env=environ(OMP_NUM_THREADS="1", PYTEST_ADDOPTS=""),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=110,
            )
            line = differing_line(shown, done.stdout.splitlines())
            assert line is None, f"{command} does not print {line!r} there:\n{done.stdout}"
            assert shown or done.returncode == 0, done.stdout


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_block_of_code_runs_or_says_why_not(page: Path) -> None:
    problems = []
    commands = " ".join(
        command for block in BLOCKS[page] for command, _ in block.commands if block.is_shell
    )
    for block in BLOCKS[page]:
        place = f"{page_name(page)}:{block.line}"
        if block.mark.startswith("run by "):
            test, _, name = block.mark.removeprefix("run by ").partition("::")
            if not (ROOT / test).is_file() or f"def {name}" not in (ROOT / test).read_text():
                problems.append(f"{place}: {block.mark} names no test")
        elif block.mark and len(block.mark) < len("not run: ") + 10:
            problems.append(f"{place}: {block.mark} gives no reason")
        elif block.is_shell and not block.mark and not block.commands:
            problems.append(f"{place}: commands that nobody runs and that say not why")
        elif block.file_name and not block.mark and Path(block.file_name).stem not in commands:
            problems.append(f"{place}: no command of the page uses {block.file_name}")
    assert problems == []


@pytest.mark.parametrize("page", TAUGHT, ids=page_name)
def test_a_page_that_teaches_has_code_that_runs(page: Path) -> None:
    # Jobs of a cluster are files of YAML, which a test that is named starts as the cluster would.
    blocks = [
        block
        for block in BLOCKS[page]
        if block.language == "python" or block.is_shell or block.mark.startswith("run by ")
    ]
    assert [block for block in blocks if not block.mark.startswith("not run")]


def test_blocks_and_their_marks_are_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- ranks: 3 -->\n```python\nx = 1\n```\n<!-- not run: a reason -->\n\n"
        "<!-- python\ny = 2\n-->\n- item\n\n  ```\n  $ echelon run  # why\n  out\n  ```\n"
        "```python\n# train.py\nz = 3\n```\n"
    )
    first, hidden, shell, file = code_blocks(page)
    assert (first.text, first.mark, first.is_python) == ("x = 1\n", "not run: a reason", False)
    assert (hidden.text, hidden.line, hidden.is_python) == ("y = 2\n", 8, True)
    assert (shell.is_shell, shell.commands) == (True, [("echelon run", ["out"])])
    assert (file.file_name, file.is_python) == ("train.py", False)
    assert num_ranks(page) == 3


def test_a_line_that_was_not_printed_is_named() -> None:
    assert differing_line(["a", "…", "b … d"], ["a", "x", "b c d"]) is None
    assert differing_line(["a", "c"], ["a", "b"]) == "c"
    assert differing_line(["by 1.4e-16"], ["by 0.0e+00"]) is None
    assert differing_line(["by 0.0e+00"], ["by 3.7e-15"]) is None
    assert differing_line(["by 0.0e+00"], ["by 3.7e-05"]) == "by 0.0e+00"
    assert differing_line(["b", "a"], ["a", "b"]) == "a"
