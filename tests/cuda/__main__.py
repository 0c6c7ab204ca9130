"""Runs the tests of this folder without pytest, and prints a line of JSON for each.

python -m tests.cuda --device cuda test_fsdp test_ddp
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import time
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

MODULES = ("test_fsdp", "test_ddp", "test_pipeline", "test_checkpoint")


def calls(module: ModuleType, device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each test of a module with each of its cases, by name."""
    for name, function in vars(module).items():
        if not name.startswith("test_"):
            continue
        if "case" not in inspect.signature(function).parameters:
            yield name, lambda function=function: function(device)  # type: ignore[misc]
            continue
        for title, case in module.CASES.items():
            yield f"{name} [{title}]", lambda f=function, case=case: f(device, case)  # type: ignore[misc]


def main() -> int:
    """Run the modules that were named; 1 if a test fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("modules", nargs="*", default=MODULES)
    options = parser.parse_args()
    failed = 0
    for name in options.modules:
        module = importlib.import_module(f"tests.cuda.{name}")
        for title, call in calls(module, options.device):
            start_s = time.perf_counter()
            error = ""
            try:
                call()
            except Exception:
                error = traceback.format_exc()[-3000:]
                failed += 1
            seconds = round(time.perf_counter() - start_s, 2)
            row = {"module": name, "test": title, "seconds": seconds, "error": error}
            print(f"RESULT {json.dumps(row)}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
