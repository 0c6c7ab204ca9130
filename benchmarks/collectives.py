"""How long collectives between processes of one host take: echelon, gloo and MPICH in alternation.

    python benchmarks/collectives.py [--quick]

A size is that of the whole tensor: the input of a reduce-scatter, the output of an all-gather.
Before a way is timed, its result is checked.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from bars import Bar, Kind, Outcome, bar_table, judge
from pairs import Samples, Variant, alternate, num_rounds_within
from peers import Peers
from ranks import find_mpiexec, on_ranks
from report import console_for_tables, markdown_table, write_report
from rich.table import Table
from torch import Tensor

import echelon as ec

ECHELON, WINDOW, GLOO, MPICH, MEMCPY = "echelon", "window", "gloo", "MPICH", "memcpy"
OPS = (
    "all_reduce",
    "reduce_scatter_single",
    "all_gather_single",
    "broadcast",
    "all_to_all_single",
    "barrier",
)
MIB = 2**20
SIZES = (4096, 65536, MIB, 25 * MIB, 100 * MIB)
QUICK_SIZES = (4096, MIB, 25 * MIB)
NUM_SIMULATED = 64

# Of 2 ranks: collective, bytes, variant, and how many times as long the peer takes.
BARS = (
    ("all_reduce", 25 * MIB, ECHELON, GLOO, 3.5),
    ("all_reduce", 25 * MIB, WINDOW, GLOO, 8.0),
    ("all_reduce", 25 * MIB, WINDOW, MPICH, 1.5),
    ("reduce_scatter_single", 25 * MIB, ECHELON, GLOO, 5.0),
    ("reduce_scatter_single", 25 * MIB, WINDOW, GLOO, 5.0),
    ("all_gather_single", 25 * MIB, ECHELON, GLOO, 3.5),
    ("all_gather_single", 25 * MIB, WINDOW, GLOO, 3.5),
    ("all_reduce", 4096, ECHELON, GLOO, 3.0),
)
SMALL_BAR_S = 100e-6  # all_reduce of 4 KiB
SIMULATED_BAR_S = 2.0


# --- on a rank ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One implementation of a collective, with its input and output tensor."""

    name: str
    run: Callable[[], object]
    source: Tensor
    target: Tensor


def measure_rank(peers: Peers, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """All cases for one number of ranks."""
    found = []
    for op in settings["ops"]:
        for nbytes in settings["sizes"] if op != "barrier" else [0]:
            with ways_to(op, nbytes, peers) as ways:
                for way in ways:
                    check(op, way, peers)
                found.append(measure_case(op, nbytes, peers, ways, settings["seconds"]))
    return found


def measure_case(
    op: str, nbytes: int, peers: Peers, ways: Sequence[Way], budget_s: float
) -> dict[str, Any]:
    """Time one collective of one size."""
    variants = [Variant(way.name, way.run) for way in ways]
    if nbytes:
        one, other = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
        variants.append(Variant(MEMCPY, lambda: other.copy_(one), frozenset({0})))
    # Short calls are timed in a row, or the clock and the barrier's exit would count.
    num_calls = 20 if nbytes <= 4096 else max(1, 2 * MIB // nbytes // 4)
    pilot = alternate(peers.group, variants, 2, num_calls)
    round_s = num_calls * sum(pilot.seconds[variant.name][-1] for variant in variants)
    samples = alternate(peers.group, variants, num_rounds_within(budget_s, round_s), num_calls)
    return {
        "op": op,
        "nbytes": nbytes,
        "ranks": peers.size,
        "num_calls": num_calls,
        **samples.record(),
    }


@contextmanager
def ways_to(op: str, nbytes: int, peers: Peers) -> Iterator[list[Way]]:
    """All implementations of ``op``, with their tensors; windows are closed at the end."""
    group, mpi, n = peers.group, peers.mpi, peers.size
    numel = nbytes // 4
    part = numel // n
    whole, other, piece = torch.zeros(numel), torch.zeros(numel), torch.zeros(part)
    windows = []
    ways: list[Way] = []

    def add(name: str, run: Callable[[], object], source: Tensor, target: Tensor) -> None:
        ways.append(Way(name, run, source, target))

    def window(length: int) -> Tensor:
        windows.append(group.window(length))
        return windows[-1].local

    if op == "all_reduce":
        inside = window(numel)
        add(ECHELON, lambda: group.all_reduce(whole), whole, whole)
        add(WINDOW, lambda: group.all_reduce(inside), inside, inside)
        add(GLOO, lambda: dist.all_reduce(whole), whole, whole)
    elif op == "reduce_scatter_single":
        inside = window(numel)
        add(ECHELON, lambda: group.reduce_scatter_single(piece, whole), whole, piece)
        add(WINDOW, lambda: group.reduce_scatter_single(piece, inside), inside, piece)
        add(GLOO, lambda: gloo_reduce_scatter(piece, whole), whole, piece)
    elif op == "all_gather_single":
        inside = window(part)
        add(ECHELON, lambda: group.all_gather_single(whole, piece), piece, whole)
        add(WINDOW, lambda: group.all_gather_single(whole, inside), inside, whole)
        add(GLOO, lambda: gloo_all_gather(whole, piece), piece, whole)
    elif op == "broadcast":
        add(ECHELON, lambda: group.broadcast(whole, 0), whole, whole)
        add(GLOO, lambda: dist.broadcast(whole, 0), whole, whole)
    elif op == "all_to_all_single":
        add(ECHELON, lambda: group.all_to_all_single(other, whole), whole, other)
        add(GLOO, lambda: dist.all_to_all_single(other, whole), whole, other)
    else:
        add(ECHELON, group.barrier, whole, whole)
        add(GLOO, dist.barrier, whole, whole)
    if mpi is not None:
        ways.append(mpich_way(op, mpi, whole, other, piece))
    try:
        yield ways
    finally:
        for one in windows:
            one.close()


def mpich_way(op: str, mpi: Any, whole: Tensor, other: Tensor, piece: Tensor) -> Way:
    """The way of MPICH; it reads and writes the same memory through numpy."""
    from mpi4py import MPI

    all_of, rest, part = whole.numpy(), other.numpy(), piece.numpy()
    return {
        "all_reduce": Way(MPICH, lambda: mpi.Allreduce(MPI.IN_PLACE, all_of), whole, whole),
        "reduce_scatter_single": Way(
            MPICH, lambda: mpi.Reduce_scatter_block(all_of, part), whole, piece
        ),
        "all_gather_single": Way(MPICH, lambda: mpi.Allgather(part, all_of), piece, whole),
        "broadcast": Way(MPICH, lambda: mpi.Bcast(all_of, 0), whole, whole),
        "all_to_all_single": Way(MPICH, lambda: mpi.Alltoall(all_of, rest), whole, other),
        "barrier": Way(MPICH, mpi.Barrier, whole, whole),
    }[op]


# torch 2.13 renamed these two.
gloo_reduce_scatter: Callable[[Tensor, Tensor], object] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
gloo_all_gather: Callable[[Tensor, Tensor], object] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


def check(op: str, way: Way, peers: Peers) -> None:
    """Run once on data that differs by rank, and compare; leaves zeros, whose sums stay finite."""
    n = peers.size
    way.target.zero_()
    way.source.fill_(peers.rank + 1)
    peers.group.barrier()
    way.run()
    peers.group.barrier()
    if op in ("all_reduce", "reduce_scatter_single"):
        right = bool((way.target == n * (n + 1) / 2).all())
    elif op == "broadcast":
        right = bool((way.target == 1).all())
    elif op == "barrier":
        right = True
    else:
        rows = torch.arange(1.0, n + 1).unsqueeze(1)
        right = bool((way.target.view(n, -1) == rows).all())
    if not right:
        raise AssertionError(f"{way.name} computed {op} wrongly on rank {peers.rank}")
    way.source.zero_()
    way.target.zero_()


# --- simulated ranks ---------------------------------------------------------------------------


def reduce_one_mib(world: ec.World) -> float:
    """Rank function: one all-reduce of 1 MiB."""
    tensor = torch.full((MIB // 4,), float(world.rank))
    world.group.all_reduce(tensor)
    return tensor[-1].item()


def measure_simulated(num_repeats: int) -> dict[str, Any]:
    """Start many simulated ranks, reduce 1 MiB, stop."""
    seconds = []
    for _ in range(num_repeats):
        start_s = time.perf_counter()
        results = ec.run(reduce_one_mib, NUM_SIMULATED, "threads")
        seconds.append(time.perf_counter() - start_s)
        assert results == [sum(range(NUM_SIMULATED))] * NUM_SIMULATED
    return {"ranks": NUM_SIMULATED, "seconds": seconds}


# --- the report --------------------------------------------------------------------------------


def table_of(cases: Sequence[dict[str, Any]], ranks: int) -> Table:
    """Medians in ms, and how many times as long the peers take."""
    title = f"{ranks} ranks: medians in ms; how many times as long as echelon the peers take"
    present = {name for case in cases for name in case["seconds"]}
    names = [n for n in (ECHELON, WINDOW, GLOO, MPICH, MEMCPY) if n in present]
    pairs = [(p, own) for p in (GLOO, MPICH) for own in (ECHELON, WINDOW) if {p, own} <= present]
    numbers = ("size", *names, *(f"{peer} / {own}" for peer, own in pairs))
    table = markdown_table(title, ["collective"], numbers)
    for case in cases:
        samples = Samples.of(case).quiet()
        has = samples.seconds.keys()
        times = [f"{samples.median_s(n) * 1e3:.3f}" if n in has else "" for n in names]
        ratios = [
            f"{samples.ratio(peer, own):.2f}" if {peer, own} <= has else "" for peer, own in pairs
        ]
        table.add_row(case["op"], text_of(case["nbytes"]), *times, *ratios)
    return table


def judged(cases: Sequence[dict[str, Any]], simulated: dict[str, Any]) -> list[Outcome]:
    """The outcomes of the bars for 2 ranks and for simulated ranks."""
    by_key = {(case["op"], case["nbytes"], case["ranks"]): case for case in cases}
    found: list[Outcome] = []

    def add(bar: Bar, op: str, nbytes: int) -> None:
        if (op, nbytes, 2) in by_key:
            found.extend(judge(bar, Samples.of(by_key[op, nbytes, 2]).quiet()))

    for op, nbytes, name, peer, bound in BARS:
        task = f"{op} {text_of(nbytes)}"
        add(Bar(task=task, name=name, kind=Kind.FASTER, bound=bound, peer=peer), op, nbytes)
    small = Bar(task="all_reduce 4 KiB", name=ECHELON, kind=Kind.SECONDS, bound=SMALL_BAR_S)
    add(small, "all_reduce", 4096)
    task = f"{NUM_SIMULATED} simulated ranks: start, all_reduce 1 MiB, stop"
    bar = Bar(task=task, name="threads", kind=Kind.SECONDS, bound=SIMULATED_BAR_S)
    return found + judge(bar, Samples({"threads": simulated["seconds"]}))


def text_of(nbytes: int) -> str:
    """``4 KiB``, ``25 MiB``."""
    if nbytes == 0:
        return ""
    return f"{nbytes // MIB} MiB" if nbytes % MIB == 0 else f"{nbytes / 1024:g} KiB"


def main(
    op: Annotated[list[str], typer.Option(help="Collectives.")] = list(OPS),  # noqa: B006
    size: Annotated[list[int] | None, typer.Option(help="Bytes of a tensor.")] = None,
    ranks: Annotated[list[int], typer.Option(help="Numbers of ranks.")] = [2, 4],  # noqa: B006
    seconds: Annotated[float, typer.Option(help="For one collective of one size.")] = 1.5,
    quick: Annotated[bool, typer.Option(help="Fewer sizes, 2 ranks, less time.")] = False,
    mpi: Annotated[bool, typer.Option(help="Measure MPICH where it is installed.")] = True,
    output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
) -> None:
    """Measure collectives of echelon, gloo and MPICH side by side."""
    console = console_for_tables()
    if quick:
        ranks, seconds = ranks[:1], min(seconds, 0.5)
    sizes = size or list(QUICK_SIZES if quick else SIZES)
    if unknown := set(op) - set(OPS):
        raise typer.BadParameter(f"{sorted(unknown)}: choose from {', '.join(OPS)}")
    if any(nbytes <= 0 or nbytes % (4 * num) for nbytes in sizes for num in ranks):
        raise typer.BadParameter(
            f"sizes {sizes}: give bytes, whole floats for each of {ranks} ranks"
        )
    settings: dict[str, Any] = {"ops": op, "sizes": sizes, "seconds": seconds}
    launcher = find_mpiexec() if mpi else None
    cores = len(os.sched_getaffinity(0))
    cases: list[dict[str, Any]] = []
    for num in ranks:
        # MPICH spins while it waits: with more ranks than cores a call takes whole time slices.
        mpiexec = launcher if num <= cores else None
        found = on_ranks("collectives:measure_rank", num, settings, mpiexec=mpiexec)
        cases.extend(found)
        console.print(table_of(found, num))
    simulated = measure_simulated(1 if quick else 5)
    outcomes = judged(cases, simulated)
    console.print(bar_table(outcomes))
    settings |= {"ranks": ranks, "mpi": launcher is not None}
    path = write_report(
        "collectives", outcomes, output, settings=settings, cases=cases, simulated=simulated
    )
    console.print(f"All samples are in {path}")


if __name__ == "__main__":
    typer.run(main)
