"""How jobs of several trainers take turns: a job goes on only while its loader gives it batches.

::

    driver      turn-3 of "ddp on gloo"           turn-3 of "echelon_ddp"
    job A       4 steps            waits in its loader
    job B       waits in its loader                4 steps

A trainer owns its loop, so nothing else can stop it between two steps. A trainer that asks for a
batch ahead runs the last step of a turn at the beginning of its next turn: each turn has the same
number of steps all the same. Files in a folder are the messages; who waits sleeps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

__all__ = ["Driver", "TurnLoader", "leave", "wait_until"]

_LOOK_S = 0.002


def wait_until(is_there: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Sleep until something is there; raise a TimeoutError if it does not come."""
    end_s = time.monotonic() + limit_s
    while not is_there():
        if time.monotonic() > end_s:
            raise TimeoutError(f"no turn came, or it did not end, within {limit_s:g} s")
        time.sleep(_LOOK_S)


def leave(path: Path, text: str) -> None:
    """Write a file that nobody sees before it has all of its text."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


@dataclass(frozen=True, kw_only=True)
class TurnLoader:
    """The batches of one rank of one job, again and again, in turns of ``steps``.

    Attributes:
        folder: of the job.
        rank: of this process.
        steps: the number of batches in a turn.
        batches: inputs and targets, used in turn.
    """

    folder: Path
    rank: int
    steps: int
    batches: list[tuple[Tensor, Tensor]]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        turn = 0
        while True:
            wait_until((self.folder / f"go-{turn}").exists)
            if (self.folder / f"go-{turn}").read_text() == "stop":
                return
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            for step in range(self.steps):
                yield self.batches[(turn * self.steps + step) % len(self.batches)]
            seconds = time.perf_counter() - start_s
            times = [seconds / self.steps, (time.process_time() - start_cpu_s) / self.steps]
            leave(self.folder / f"done-{turn}-{self.rank}", json.dumps(times))
            turn += 1


@dataclass
class Driver:
    """Gives a job its turns.

    Attributes:
        folder: of the job.
        ranks: the number of its processes.
        is_alive: whether the job still runs.
        turn: the number of the next turn.
    """

    folder: Path
    ranks: int
    is_alive: Callable[[], bool]
    turn: int = 0

    def run(self) -> tuple[float, float]:
        """Let the job run one turn; wall and processor seconds a step, of the slowest rank."""
        leave(self.folder / f"go-{self.turn}", "go")
        paths = [self.folder / f"done-{self.turn}-{rank}" for rank in range(self.ranks)]

        def is_over() -> bool:
            if not self.is_alive():
                raise RuntimeError(f"the job of {self.folder.name} ended in its turn {self.turn}")
            return all(path.exists() for path in paths)

        wait_until(is_over)
        times = [json.loads(path.read_text()) for path in paths]
        self.turn += 1
        return max(wall for wall, _ in times), max(cpu for _, cpu in times)

    def stop(self) -> None:
        """Let the trainer come to its end."""
        leave(self.folder / f"go-{self.turn}", "stop")
