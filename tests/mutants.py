"""One-line faults, drawn at random from all rooms of the source, and the tests that find them.

A suite that is rewritten has to find what the old one found. So the mutants of a revision are kept
in a file, each with the test that killed it::

    python -m tests.mutants draw --count 100 --seed 1 mutants.json     # in the old tree
    python -m tests.mutants kill mutants.json --tree /tmp/old --slice 0:100
    python -m tests.mutants kill mutants.json --tree /tmp/new --slice 0:100 --again
    python -m tests.mutants count mutants.json

``kill`` works in a copy of the tree, such as a worktree, and edits its source in place. A mutant
whose line is no longer in the source is ``gone``: what it broke was redesigned.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 900.0  # of the tests of one mutant; a mutant that makes them endless is killed
_TEXT = re.compile(r"^(\s*)(raise|\"\"\"|assert|from|import|@|class|def)\b")

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Mod: "//",
}


@dataclass(frozen=True)
class Mutant:
    """A fault in one line of a file of the source.

    Attributes:
        path: of the file, from ``src/echelon``.
        line: the number of the line, from 1.
        before: the line.
        after: the line with the fault.
        killed_by: the first test that failed; "time" where none ended in time; "" for none; None
            where nobody has tried.
    """

    path: str
    line: int
    before: str
    after: str
    killed_by: str | None = None


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All mutants of one file whose fault lies in one line, in the order of the file."""
    text = path.read_text()
    lines, tree = text.splitlines(), ast.parse(text)
    shown = str(path.relative_to(ROOT / "src/echelon"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr | ast.stmt) or node.lineno != node.end_lineno:
            continue
        before = lines[node.lineno - 1]
        if _TEXT.match(before):
            continue  # errors, declarations and imports
        for changed in _changes_of(node):
            start, stop = node.col_offset, node.end_col_offset
            raw = before.encode()
            after = (raw[:start] + changed.encode() + raw[stop:]).decode()
            if after != before:
                yield Mutant(shown, node.lineno, before, after)


def _changes_of(node: ast.AST) -> Iterator[str]:
    """Other texts for a node: a comparison, an operator, a constant, a condition or a call."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            yield f"{ast.unparse(left)} {_COMPARISONS[type(op)]} {ast.unparse(right)}"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            yield f"({ast.unparse(left)} {_OPERATORS[type(op)]} {ast.unparse(right)})"
        case ast.BoolOp(op=ast.And(), values=values):
            yield " or ".join(f"({ast.unparse(value)})" for value in values)
        case ast.BoolOp(op=ast.Or(), values=values):
            yield " and ".join(f"({ast.unparse(value)})" for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"bool({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield str(value + 1)
        case ast.Expr(value=ast.Call()):
            yield "pass"
        case ast.Return(value=ast.expr()):
            yield "return None"
        case ast.Continue():
            yield "break"
        case ast.Break():
            yield "continue"
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in _OPERATORS:
            yield f"{ast.unparse(target)} {_OPERATORS[type(op)]}= {ast.unparse(value)}"
        case _:
            return


def _compiles(mutant: Mutant) -> bool:
    lines = (ROOT / "src/echelon" / mutant.path).read_text().splitlines()
    lines[mutant.line - 1] = mutant.after
    try:
        ast.parse("\n".join(lines))
    except SyntaxError:
        return False
    return True


def draw(count: int, seed: int) -> list[Mutant]:
    """``count`` mutants, from each room as many as its share of the lines, and at least one."""
    drawn = random.Random(seed)
    rooms: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "src/echelon").rglob("*.py")):
        inside = path.relative_to(ROOT / "src/echelon")
        rooms.setdefault(inside.parts[0] if len(inside.parts) > 1 else "", []).append(path)
    sizes = {
        room: sum(path.read_text().count("\n") for path in paths) for room, paths in rooms.items()
    }
    chosen: list[Mutant] = []
    for room, paths in rooms.items():
        everything = list(chain.from_iterable(map(mutants_of, paths)))
        drawn.shuffle(everything)
        share = max(1, round(count * sizes[room] / sum(sizes.values())))
        chosen += islice(filter(_compiles, everything), share)
    return sorted(drawn.sample(chosen, min(count, len(chosen))), key=lambda m: (m.path, m.line))


def test_files_of(mutant: Mutant, tree: Path) -> list[str]:
    """The test files to ask: of the file, that import it, of its room; the nearest first."""
    path = Path(mutant.path)
    module = ".".join(("echelon", *path.with_suffix("").parts)).removesuffix(".__init__")
    room = tree / "tests" / path.parts[0] if len(path.parts) > 1 else tree / "tests"
    everything = sorted(
        file
        for file in (tree / "tests").rglob("test_*.py")
        if not {"long", "integrations", "architecture", "cuda"} & set(file.parts)
    )

    def distance(file: Path) -> int | None:
        text = file.read_text()
        if file.stem == f"test_{path.stem}":
            return 0
        if re.search(rf"\b{re.escape(module)}\b", text):
            return 1
        if file.is_relative_to(room) and (path.stem in text or len(path.parts) > 1):
            return 2
        if file.parent.name in ("laws", "plans", "generated", "attacks", "regressions"):
            return 3
        return 4 if file.parent == tree / "tests" and file.stem == "test_examples" else None

    ranked = [(rank, file) for file in everything if (rank := distance(file)) is not None]
    return [str(file.relative_to(tree)) for _, file in sorted(ranked)]


def kill(mutant: Mutant, tree: Path) -> Mutant:
    """Run the tests against a mutant; the mutant with what killed it, or ``gone``."""
    file = tree / "src/echelon" / mutant.path
    text = file.read_text() if file.exists() else ""
    lines = text.splitlines()
    at = mutant.line - 1
    if not (at < len(lines) and lines[at] == mutant.before):
        places = [i for i, line in enumerate(lines) if line == mutant.before]
        if len(places) != 1:
            return replace(mutant, killed_by="gone")
        at = places[0]
    files = test_files_of(mutant, tree)
    try:
        file.write_text("\n".join([*lines[:at], mutant.after, *lines[at + 1 :]]) + "\n")
        failed = _first_failure(files, tree)
    finally:
        file.write_text(text)
    if failed not in ("", "time") and _first_failure([failed], tree):
        return replace(mutant, killed_by=f"fails without it: {failed}")
    return replace(mutant, killed_by=failed)


def _first_failure(tests: Sequence[str], tree: Path) -> str:
    """The first test that fails, "time" if they do not end, or "" if all pass."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree / 'src'}:{tree}",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not slow", "--no-header", "-rfE", *tests]
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "time"
    if process.returncode == 0:
        return ""
    # The id of a test may have spaces.
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    return failed[0] if failed else f"pytest ended with {process.returncode}"


def read(file: Path) -> list[Mutant]:
    """The mutants of a file."""
    return [Mutant(**row) for row in json.loads(file.read_text())]


def write(file: Path, mutants: Sequence[Mutant]) -> None:
    """Write mutants to a file, one a line."""
    rows = ",\n".join(json.dumps(asdict(mutant)) for mutant in mutants)
    file.write_text(f"[\n{rows}\n]\n")


def main() -> None:
    """Draw mutants, kill them, or count who was killed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("action", choices=["draw", "kill", "count"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--slice", default=":")
    parser.add_argument("--again", action="store_true", help="also those that were tried")
    args = parser.parse_args()
    if args.action == "draw":
        write(args.file, draw(args.count, args.seed))
        return
    mutants = read(args.file)
    if args.action == "kill":
        first, last = (int(number) if number else None for number in args.slice.split(":"))
        for i in range(len(mutants))[first:last]:
            if args.again or mutants[i].killed_by is None:
                tried = kill(mutants[i], args.tree.resolve())
                print(
                    f"{i}: {tried.path}:{tried.line}: {tried.killed_by or 'survived'}", flush=True
                )
                mutants = read(args.file)  # others may work on other slices
                mutants[i] = tried
                write(args.file, mutants)
    kinds = Counter(_kind(mutant.killed_by) for mutant in mutants)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))


def _kind(killed_by: str | None) -> str:
    if killed_by is None:
        return "not tried"
    if killed_by in ("", "gone"):
        return killed_by or "survived"
    return "unclear" if killed_by.startswith("fails without it") else "killed"


if __name__ == "__main__":
    main()
