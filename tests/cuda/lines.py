"""Runs named lines one after another, each with a limit, and prints a line of JSON for each.

``BEGIN title`` comes before each and ``RESULT {...}`` after it. A line that hangs, or that loses
the device, ends the process; with ``--after N`` another process goes on behind the first N lines.
"""

from __future__ import annotations

import faulthandler
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

LINE_S = 25.0  # more than ECHELON_TIMEOUT of the parts, so that a rank that waits can tell why
BUSY = 4  # times that, on the CPU of a machine that may be busy
DEVICE_LOST = 75  # the exit code when no later line of the process can work
TAIL = 3000  # characters of a traceback

Line = Callable[[], Mapping[str, Any] | None]  # what it has measured, or nothing


class LeftOut(Exception):
    """Something that this machine or device lacks; its text says what."""


def run_lines(
    lines: Iterable[tuple[str, Line]], device: str, after: int = 0, limit_s: float = LINE_S
) -> int:
    """Run all lines but the first ``after``; returns the exit code of the process."""
    code = 0
    limit_s *= 1 if device == "cuda" else BUSY
    for number, (title, line) in enumerate(lines):
        if number < after:
            continue
        print(f"BEGIN {title}", flush=True)
        faulthandler.dump_traceback_later(limit_s, exit=True)
        row = outcome(title, line)
        lost = _device_is_lost()
        faulthandler.cancel_dump_traceback_later()
        print(f"RESULT {json.dumps(row)}", flush=True)
        code = max(code, int(bool(row["error"])))
        if lost:
            os._exit(DEVICE_LOST)  # to end in good order needs the device, too
    return code


def outcome(title: str, line: Line) -> dict[str, Any]:
    """What became of one line: its error, what it left out, or what it has measured."""
    start_s = time.perf_counter()
    row: dict[str, Any] = {"line": title, "error": "", "left_out": ""}
    try:
        row |= line() or {}
    except LeftOut as lacking:
        row["left_out"] = str(lacking)
    except Exception as error:  # whatever the line raises is what the page tells of it
        reports = [str(each)[:TAIL] for each in getattr(error, "errors", ())]  # the sanitizer's
        row["error"] = "\n".join([*reports[:3], traceback.format_exc()[-TAIL:]])
    row["seconds"] = round(time.perf_counter() - start_s, 2)
    return row


def _device_is_lost() -> bool:
    """Whether CUDA refuses everything from now on, as after an illegal access."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
