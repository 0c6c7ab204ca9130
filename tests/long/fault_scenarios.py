"""Faults of a rank, by kind, moment, world and technique: what the rank does, and who is blamed."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import torch

import echelon as ec
from echelon.errors import CommTimeout, DeadlockError, RankFailed
from tests.checkpoint.layouts import LAYOUTS, Trainee
from tests.comm.faults import DEATHS, HANGS, NEED_PROCESS

__all__ = ["SCENARIOS", "Scenario", "blamed", "play"]

TIMEOUTS_S = {"threads": 2.0, "processes": 5.0, "gloo": 8.0}


def forks() -> None:
    if os.fork() == 0:
        os._exit(0)


KINDS = HANGS | DEATHS | {"fork": forks}
MOMENTS = [
    "subgroup", "wrap", "forward", "backward", "clip", "optimizer",
    "save", "async save", "load", "after the last call",
]  # fmt: skip
AT_THE_END = ["exit handler", "thread at the end"]
BEFORE = ["before init"]
TECHNIQUES = {
    "threads": ["ddp3", "fsdp3", "pp3", "pp2-dp2", "hybrid4", "fsdp2-flat"],
    "processes": ["ddp3", "fsdp2", "pp2", "pp2-dp2", "fsdp3-rows"],
    "gloo": ["ddp2", "fsdp2", "pp2", "pp2-dp2"],
}
NUM_KINDS = {"threads": 3, "processes": 3, "gloo": 2}  # for each technique and moment


@dataclass(frozen=True)
class Scenario:
    """One rank meets one fault.

    Attributes:
        culprit: the rank that meets it.
    """

    world: str
    technique: str
    moment: str
    kind: str
    culprit: int

    @property
    def hangs(self) -> bool:
        return self.kind in HANGS

    @property
    def may_end_well(self) -> bool:
        """Whether no other rank needs the culprit any more, or it loses nothing."""
        late = self.moment in ("after the last call", *AT_THE_END)
        ends = self.kind in ("fork", "exit code 0", "sys.exit(0)")
        return self.kind == "fork" or (late and ends) or self.moment in AT_THE_END

    def __str__(self) -> str:
        return f"{self.world} | {self.technique} | {self.moment} | {self.kind} | {self.culprit}"


def _scenarios() -> Iterator[Scenario]:
    for world, techniques in TECHNIQUES.items():
        simulated = world == "threads"
        kinds = cycle([kind for kind in KINDS if not (simulated and kind in NEED_PROCESS)])
        moments = MOMENTS + ([] if simulated else AT_THE_END) + (BEFORE if world == "gloo" else [])
        for technique in techniques:
            for i, moment in enumerate(moments):
                for kind in islice(kinds, NUM_KINDS[world]):
                    ranks = LAYOUTS[technique].ranks
                    yield Scenario(world, technique, moment, kind, i % ranks)
            next(kinds)  # so that the next technique meets other kinds at the same moments


SCENARIOS = list(_scenarios())


class _Fault:
    """What the culprit does, once, when the moment has come."""

    def __init__(self, world: ec.World | None, scenario: Scenario, folder: Path) -> None:
        self._kind, self._stamp = scenario.kind, folder / "fault"
        self._here = world is None or world.rank == scenario.culprit

    def __call__(self, *ignored: object) -> None:
        if self._here:
            self._here = False
            self._stamp.write_text(repr(time.time()))
            KINDS[self._kind]()


class _Part:
    """A part of the state, whose save or load meets the fault."""

    def __init__(self, save: Callable[[], None], load: Callable[[], None]) -> None:
        self._save, self._load = save, load

    def state_dict(self) -> dict[str, int]:
        self._save()
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._load()


def _hook(trainee: Trainee, moment: str, fault: _Fault) -> None:
    linears = [m for m in trainee.model.modules() if isinstance(m, torch.nn.Linear)]
    for module in linears if moment == "forward" else []:
        module.register_forward_pre_hook(fault)
    for module in linears if moment == "backward" else []:
        module.register_forward_hook(
            lambda module, inputs, output: output.register_hook(fault) and None
        )
    if moment == "optimizer":
        trainee.optimizer.register_step_pre_hook(fault)


def play(world: ec.World, scenario: Scenario, folder: Path) -> int:
    """Train, save and load as each rank does; the culprit meets its fault."""
    moment, fault = scenario.moment, _Fault(world, scenario, folder)

    def at(*names: str) -> Callable[[], None]:
        return fault if moment in names else lambda: None

    world.group.barrier()
    at("subgroup")()
    world.group.subgroup(range(world.size))
    at("wrap")()
    trainee = LAYOUTS[scenario.technique].trainee(world)
    trainee.train(0)
    _hook(trainee, moment, fault)
    trainee.train(1)
    if moment == "clip":
        at("clip")()
    if not isinstance(trainee.model, ec.Pipeline):
        ec.clip_grad_norm_(trainee.model, 1.0)
    trainee.train(2)
    part = _Part(at("save"), at("load"))
    parts = {"model": trainee.model, "optimizer": trainee.optimizer}
    ec.save(folder / "run", step=2, **parts, part=part)
    asynchronous = _Part(at("async save"), lambda: None)
    ec.async_save(folder / "run", step=3, **parts, part=asynchronous).wait()
    ec.load(folder / "run", **parts, step=2, part=part)
    world.group.barrier()
    at("after the last call")()
    if moment == "exit handler" and world.rank == scenario.culprit:
        import atexit

        atexit.register(fault)
    if moment == "thread at the end" and world.rank == scenario.culprit:
        threading.Thread(target=fault).start()
    return world.step


def main() -> None:
    """A rank of ``echelon run``: world, technique, moment, kind, culprit, folder."""
    *facts, culprit, folder = sys.argv[1:]
    scenario = Scenario(*facts, int(culprit))
    if scenario.moment in BEFORE and os.environ["RANK"] == culprit:
        _Fault(None, scenario, Path(folder))()
    with ec.init("gloo", timeout=TIMEOUTS_S["gloo"]) as world:
        play(world, scenario, Path(folder))


def blamed(error: BaseException) -> set[int]:
    """The ranks that the first thing a user reads of an error of ``ec.run`` is about."""
    if isinstance(error, DeadlockError):
        gone = re.search(r"ranks? ([\d, ]+) returned already", str(error))
        return {int(rank) for rank in gone[1].split(",")} if gone else set(error.waits)
    if isinstance(error, RankFailed):
        return {error.failed_rank}
    if isinstance(error, CommTimeout):
        return set(error.stuck or error.missing)
    notes = re.search(r"raised on rank (\d+) of", "\n".join(getattr(error, "__notes__", ())))
    return {int(notes[1])} if notes else set()


if __name__ == "__main__":
    main()
