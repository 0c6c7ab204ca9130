"""``echelon doctor``: what this machine has, what is missing, and whether ranks can communicate."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

from echelon.cli.output import cell
from echelon.comm.buffers import available_nbytes
from echelon.errors import EchelonError
from echelon.launch.run import run
from echelon.page import bytes_text
from echelon.process.operating_system import num_processors, require_linux

if TYPE_CHECKING:
    from echelon.comm.world import World

LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 11)
LEAST_SHARED = 512 * 2**20  # bytes; a small model's gradients on a few ranks


class Verdict(Enum):
    """The meaning of a finding, and the style in which it is shown."""

    GOOD = ("ok", "green")
    NOTE = ("note", "yellow")
    MISSING = ("missing", "bold red")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A property of this machine.

    Attributes:
        name: the name of the property.
        value: its value.
        verdict: whether that is enough; ``MISSING`` means that echelon cannot work.
        advice: what to do about it; empty if there is nothing to do.
    """

    name: str
    value: str
    verdict: Verdict = Verdict.GOOD
    advice: str = ""


def examine() -> int:
    """Print a table of findings; returns 1 if something essential is missing, else 0."""
    table = Table(title="echelon doctor", title_justify="left", pad_edge=False)
    for column in ("what", "found", "", "what to do"):
        table.add_column(column, overflow="fold")
    failed = False
    console = Console()
    with console.status("looking …"):
        for finding in findings():
            word, style = finding.verdict.value
            table.add_row(
                finding.name, cell(finding.value), f"[{style}]{word}[/]", cell(finding.advice)
            )
            failed = failed or finding.verdict is Verdict.MISSING
    console.print(table)
    return int(failed)


def findings() -> Iterator[Finding]:
    """Examine this machine, one property after the other."""
    yield _version("Python", platform.python_version(), LEAST_PYTHON)
    yield _version("torch", str(torch.__version__), LEAST_TORCH)
    yield _cores()
    try:
        require_linux("local processes")
    except EchelonError as error:
        yield Finding(name="local processes", value=str(error), verdict=Verdict.NOTE)
    else:
        yield _memory()
        yield _shared_memory()
    yield _interfaces()
    yield _port()
    yield from _backends()
    yield _trial("threads")
    if sys.platform == "linux":
        yield _trial("processes")


def _version(name: str, value: str, least: tuple[int, int]) -> Finding:
    numbers = tuple(int(part) for part in value.split(".")[:2])
    if numbers >= least:
        return Finding(name=name, value=value)
    wanted = ".".join(map(str, least))
    return Finding(
        name=name, value=value, verdict=Verdict.MISSING, advice=f"install {wanted} or newer"
    )


def _cores() -> Finding:
    cores = num_processors()
    chosen = os.environ.get("OMP_NUM_THREADS")
    threads = f"{torch.get_num_threads()} torch threads"
    if chosen is not None:
        return Finding(
            name="cores",
            value=f"{cores}, {threads} (OMP_NUM_THREADS={chosen})",
            verdict=Verdict.NOTE,
            advice="echelon run keeps your OMP_NUM_THREADS; unset it to share the cores evenly",
        )
    return Finding(name="cores", value=f"{cores}, {threads}; echelon run gives each rank its share")


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Finding(name="memory", value=f"{bytes_text(total)} on this machine")


def _shared_memory() -> Finding:
    from echelon.comm.shm.segment import Segment

    name = "shared memory"
    advice = "free memory, or raise the container's limit"
    try:
        segment = Segment.create(2**20, what="a trial", reserve=True)
    except EchelonError as error:
        return Finding(name=name, value=str(error), verdict=Verdict.MISSING, advice=advice)
    segment.unpublish()
    available = available_nbytes()
    value = f"memfd works, {bytes_text(available)} available"
    if available < LEAST_SHARED:
        return Finding(name=name, value=value, verdict=Verdict.NOTE, advice=advice)
    return Finding(name=name, value=value)


def _interfaces() -> Finding:
    names = [name for _, name in socket.if_nameindex()]
    value = ", ".join(names) or "none"
    if "lo" in names:
        return Finding(name="network", value=value)
    return Finding(
        name="network",
        value=value,
        verdict=Verdict.NOTE,
        advice="there is no lo; set GLOO_SOCKET_IFNAME to the loopback interface",
    )


def _port() -> Finding:
    """Whether a socket on loopback can be bound, and reached."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2.0):
                return Finding(name="free port", value=f"127.0.0.1:{port} can be reached")
    except OSError as error:
        return Finding(
            name="free port",
            value=f"127.0.0.1 cannot be used: {error.strerror}",
            verdict=Verdict.MISSING,
            advice="bring loopback up (ip link set lo up); processes meet there",
        )


def _backends() -> Iterator[Finding]:
    """The backends of torch for several hosts, which one host does not need."""
    from echelon.comm.torch_dist.engines import available_backends

    backends = available_backends()
    yield Finding(
        name="torch.distributed",
        value=", ".join(backends) or "no backend",
        verdict=Verdict.GOOD if "gloo" in backends else Verdict.NOTE,
        advice="" if "gloo" in backends else "several hosts need a torch built with gloo",
    )
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        nccl = "nccl" in backends
        yield Finding(
            name="CUDA",
            value=f"{count} × {torch.cuda.get_device_name(0)}",
            verdict=Verdict.GOOD if nccl else Verdict.NOTE,
            advice="" if nccl else "this torch has no NCCL: GPUs cannot communicate",
        )
    else:
        yield Finding(name="CUDA", value="no device; ranks run on the CPU")


def sum_of_ranks(world: World) -> int:
    """The function that the trial runs on each rank."""
    total = torch.tensor([world.rank + 1])
    world.group.all_reduce(total)
    return int(total.item())


def _trial(world: str, fn: Callable[[World], int] = sum_of_ranks) -> Finding:
    """Start two ranks, which add their numbers by an all-reduce."""
    name = f"2 ranks as {world}"
    try:
        sums = run(fn, 2, world, timeout=20.0)
    except Exception as error:  # any error is a finding
        first = str(error).split("\n", 1)[0]
        call = f'doctor.run(doctor.sum_of_ranks, 2, "{world}")'
        return Finding(
            name=name,
            value=f"{type(error).__name__}: {first}",
            verdict=Verdict.MISSING,
            advice=f"see all of it with python -c 'from echelon.cli import doctor; {call}'",
        )
    if sums == [3, 3]:
        return Finding(name=name, value="all-reduce gives the right sum")
    return Finding(
        name=name,
        value=f"all-reduce gave {sums} instead of [3, 3]",
        verdict=Verdict.MISSING,
        advice=f"report this with the output of {sys.executable} -m torch.utils.collect_env",
    )
