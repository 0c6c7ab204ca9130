"""Runs the tests of this folder without pytest, and prints a line of JSON for each.

python -m tests.cuda --device cuda --share 0/4 test_fsdp test_ddp
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType

from tests.cuda.lines import Line, run_lines
from tests.cuda.sanitizer import under_sanitizer

MODULES = ("test_fsdp", "test_ddp", "test_pipeline", "test_checkpoint")


def lines_of(module: ModuleType, device: str) -> Iterator[tuple[str, Line]]:
    """Each test of a module with each of its cases, by name."""
    kind = module.__name__.rpartition(".test_")[2]
    for name, function in vars(module).items():
        if not name.startswith("test_"):
            continue
        if "case" not in inspect.signature(function).parameters:
            yield f"{kind}: {name}", lambda function=function: function(device)  # type: ignore[misc]
            continue
        for title, case in module.CASES.items():
            yield f"{kind}: {name} [{title}]", lambda f=function, case=case: f(device, case)  # type: ignore[misc]


def main() -> int:
    """Run the modules that were named; 1 if a test fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--share", default="0/1", help="i/n: every n-th test, from the i-th on")
    parser.add_argument("--after", type=int, default=0, help="leave out the first tests of these")
    parser.add_argument("--sanitizer", action="store_true", help="one rank, under torch's CSAN")
    parser.add_argument("modules", nargs="*", default=MODULES)
    options = parser.parse_args()
    modules = [importlib.import_module(f"tests.cuda.{name}") for name in options.modules]
    lines = [line for module in modules for line in lines_of(module, options.device)]
    start, step = map(int, options.share.split("/"))
    lines = lines[start::step]
    if options.sanitizer:
        lines = under_sanitizer(options.device, lines)
    return run_lines(lines, options.device, options.after)


if __name__ == "__main__":
    raise SystemExit(main())
