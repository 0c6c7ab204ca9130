"""How long a step takes in other libraries' trainers, with their own DDP and FSDP and with ours.

    python benchmarks/trainers.py --host lightning

Each variant is a job of its own, under torchrun, and all jobs of a host live at the same time and
take turns. Afterwards their losses are compared. A host is a file ``trainer_HOST.py`` with
``VARIANTS`` (names, in the order of the table), ``BARS`` and ``train(variant, task, loader)``,
which trains until the loader ends and returns the losses of this rank.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from bars import Bar, bar_table, judge
from pairs import Samples
from ranks import die_with_parent
from report import console_for_tables, markdown_table, write_report
from rich.table import Table
from trainer_turns import Driver, wait_until

HERE = Path(__file__).resolve().parent
_WARM_UP = 2  # turns, in which optimizers make their states and wrappers learn the order


class Host(Enum):
    """A library whose trainer is measured."""

    LIGHTNING = "lightning"
    ACCELERATE = "accelerate"
    TRANSFORMERS = "transformers"


@contextmanager
def jobs(
    host: str, variants: Sequence[str], ranks: int, settings: dict[str, Any]
) -> Iterator[dict[str, Driver]]:
    """Start a job for each variant; at the end stop them and wait for them."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory(prefix="echelon-trainers-") as root:
        try:
            drivers = {}
            for i, variant in enumerate(variants):
                folder = Path(root, str(i))
                folder.mkdir()
                command = [
                    *(
                        sys.executable,
                        "-m",
                        "torch.distributed.run",
                        "--nproc-per-node",
                        str(ranks),
                    ),
                    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
                    *(str(HERE / "trainer_rank.py"), host, variant, str(folder)),
                    json.dumps(settings),
                ]
                log = (folder / "log").open("wb")
                environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
                started[variant] = job = subprocess.Popen(
                    command,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=root,
                    preexec_fn=die_with_parent,
                )
                log.close()
                drivers[variant] = Driver(folder, ranks, lambda job=job: job.poll() is None)
            yield drivers
            for driver in drivers.values():
                driver.stop()
            for variant, job in started.items():
                if job.wait(120) != 0:
                    raise RuntimeError(f"{variant} failed")
        except BaseException:
            for variant, driver in drivers.items():
                text = (driver.folder / "log").read_text(errors="replace")
                print(f"--- the end of {variant}\n{text[-3000:]}", file=sys.stderr)
            raise
        finally:
            for job in started.values():
                if job.poll() is None:
                    job.terminate()
                    job.wait()


def measure(
    host: str, variants: Sequence[str], ranks: int, rounds: int, settings: dict[str, Any]
) -> tuple[Samples, dict[str, list[float]]]:
    """The times of all variants in turns, and the losses of rank 0."""
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    cpu_seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    losses = {}
    with jobs(host, variants, ranks, settings) as drivers:
        for round_ in range(-_WARM_UP, rounds):
            for turn in range(len(variants)):
                variant = variants[(round_ + turn) % len(variants)]
                wall, cpu = drivers[variant].run()
                if round_ >= 0:
                    seconds[variant].append(wall)
                    cpu_seconds[variant].append(cpu)
        for driver in drivers.values():
            driver.stop()
        for variant, driver in drivers.items():
            path = driver.folder / "losses-0"
            wait_until(lambda path=path, job=driver: path.exists() or not job.is_alive())
            losses[variant] = json.loads(path.read_text())
    return Samples(seconds, cpu_seconds), losses


def compare_losses(losses: dict[str, list[float]]) -> float:
    """The largest difference between losses of variants at the same step; fails if it is large."""
    first = next(iter(losses.values()))
    far = 0.0
    for variant, values in losses.items():
        assert len(values) == len(first) > 0, f"{variant} has made another number of steps"
        far = max([far, *(abs(a - b) for a, b in zip(values, first, strict=True))])
    assert far <= 1e-3 * max(first), f"losses differ by {far:.3g}"
    return far


def table_of(host: str, samples: Samples, bars: Sequence[Bar], apart: float) -> Table:
    """A row for each variant."""
    title = f"{host}: GPT, {samples.num_rounds} rounds, losses differ by at most {apart:.2g}"
    peers = {bar.name: bar.peer for bar in bars}
    table = markdown_table(title, ["variant"], ["ms a step", "CPU ms", "× faster", "than"])
    for name in samples.seconds:
        peer = peers.get(name, "")
        times = f"{samples.ratio(peer, name):.3f}" if peer else ""
        cpu = sorted(samples.cpu_seconds[name])[samples.num_rounds // 2]
        table.add_row(name, f"{samples.median_s(name) * 1e3:.1f}", f"{cpu * 1e3:.1f}", times, peer)
    return table


def main(
    host: Annotated[Host, typer.Option(help="Whose trainer.")] = Host.LIGHTNING,
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
    rounds: Annotated[int, typer.Option(help="Turns of each variant.")] = 20,
    steps: Annotated[int, typer.Option(help="Steps in a turn.")] = 4,
    layers: Annotated[int, typer.Option(help="Of the GPT.")] = 8,
    variant: Annotated[list[str] | None, typer.Option(help="Only these.")] = None,
    output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
) -> None:
    """Measure the steps of a trainer with its own DDP and FSDP and with ours, in alternation."""
    module = importlib.import_module(f"trainer_{host.value}")
    settings = {"steps": steps, "layers": layers}
    samples, losses = measure(host.value, variant or module.VARIANTS, ranks, rounds, settings)
    apart = compare_losses(losses)
    console = console_for_tables()
    console.print(table_of(host.value, samples, module.BARS, apart))
    outcomes = [outcome for bar in module.BARS for outcome in judge(bar, samples)]
    console.print(bar_table(outcomes))
    record = {"host": host.value, "ranks": ranks, **settings, "losses": losses}
    path = write_report(
        f"trainers_{host.value}", outcomes, output, settings=record, tasks=[samples.record()]
    )
    console.print(f"All samples are in {path}")


if __name__ == "__main__":
    typer.run(main)
