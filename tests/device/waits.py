"""Where echelon's code has a stream or the host wait for a device."""

from __future__ import annotations

import gc
import linecache
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

import echelon
from echelon.testing.device import SimulatedDevice, simulated_device
from echelon.testing.device.report import Frame

SOURCE = str(Path(echelon.__file__).parent)


def run(program: Callable[[], object], **options: Any) -> SimulatedDevice:
    """The device on which a program has run, and has given back its memory."""
    with simulated_device(**options) as device:
        program()
        gc.collect()  # or the next program would do it, and its streams would wait for these
        device.look()
    return device


def places(stacks: Counter[tuple[Frame, ...]]) -> Counter[Frame]:
    """How often each line of echelon waits, by the innermost one outside of ``comm``."""
    found: Counter[Frame] = Counter()
    for stack, count in stacks.items():
        ours = (frame for frame in stack if frame.file.startswith(SOURCE))
        place = next((frame for frame in ours if room(frame) not in ("comm", "testing")), None)
        if place is not None:
            found[place] += count
    return found


def room(frame: Frame) -> str:
    """The package of a line, such as ``"fsdp"``."""
    return frame.file[len(SOURCE) + 1 :].partition("/")[0]


def site(frame: Frame) -> str:
    """A line without its number: the file, the function and the line itself."""
    text = linecache.getline(frame.file, frame.line).strip()
    return f"{frame.file[len(SOURCE) + 1 :]}, {frame.function}: {text}"


def is_found(place: Frame, program: Callable[[], object]) -> bool:
    """Whether something races without the waits of a line."""
    report = run(on_one_thread(program), without=[place]).report()
    return bool(report.findings or report.still_used)


def on_one_thread(program: Callable[[], object]) -> Callable[[], None]:
    """The program, whose backwards free memory in one order, as they run on the thread of it."""

    def run() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            program()

    return run


def never_found(place: Frame, programs: Collection[Callable[[], object]]) -> bool:
    """Whether nothing races in any of these programs without the waits of a line."""
    return not any(is_found(place, program) for program in programs)
