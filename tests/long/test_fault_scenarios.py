"""Hundreds of faults of a rank: each job ends within its bound, and no innocent rank is blamed."""

import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import echelon as ec
from tests.children import environ
from tests.long import fault_scenarios
from tests.long.fault_scenarios import (
    AT_THE_END,
    SCENARIOS,
    TIMEOUTS_S,
    Scenario,
    blamed,
    play,
)

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = {"threads": 4, "processes": 3, "gloo": 3}
NUM_PIECES = {"threads": 2, "processes": 6, "gloo": 8}  # of less than 300 s each
PIECES = [(world, piece) for world, count in NUM_PIECES.items() for piece in range(count)]
DEATH_S, HANG_S = 5.0, 10.0  # after a death; after the timeout of those that wait for a hang
LOAD_S = float(os.environ.get("ECHELON_LOAD_S", "10"))  # more, where several run at once


@dataclass
class Ended:
    """How a scenario ended: who was blamed, and how long after the fault."""

    scenario: Scenario
    blamed: set[int]
    first_line: str
    seconds: float

    @property
    def bound_s(self) -> float:
        timeout_s = TIMEOUTS_S[self.scenario.world]
        if self.scenario.kind == "fork":  # the job goes on
            return float("inf")
        return timeout_s + HANG_S if self.scenario.hangs else DEATH_S

    @property
    def is_wrong(self) -> bool:
        if not self.blamed:
            return not self.scenario.may_end_well
        return self.blamed != {self.scenario.culprit}

    def __str__(self) -> str:
        signs = "WRONG " * self.is_wrong + "LATE " * (self.seconds > self.bound_s)
        return f"{signs}{self.scenario} | {self.seconds:.1f} s | {self.first_line:.160}"


def ended(scenario: Scenario) -> Ended:
    """What comes of it; once more where the job ended before its fault, on a busy machine."""
    for _ in range(3):
        if (found := _ended(scenario)) is not None:
            return found
    raise AssertionError(f"{scenario} never came to its fault")


def _ended(scenario: Scenario) -> Ended | None:
    with tempfile.TemporaryDirectory() as name:
        folder, found, line = Path(name), set(), "ended well"
        if scenario.world == "gloo":
            line = of_script(scenario, folder) or line
            found = {int(rank) for rank in re.findall(r"^rank (\d+)\b", line)}
            if not found and line != "ended well":
                found = {-1}  # nobody is named
        else:
            try:
                ranks = fault_scenarios.LAYOUTS[scenario.technique].ranks
                timeout_s = TIMEOUTS_S[scenario.world]
                ec.run(play, ranks, scenario.world, args=(scenario, folder), timeout=timeout_s)
            except BaseException as error:
                found, line = blamed(error), f"{type(error).__name__}: {error}".partition("\n")[0]
        stamp = folder / "fault"
        if not stamp.exists() and not found and scenario.moment in AT_THE_END:
            return Ended(scenario, found, "ended before its fault", 0.0)  # as it may
        if not stamp.exists():
            print(f"before its fault: {scenario} | {line}", flush=True)
            return None
        return Ended(scenario, found, line, time.time() - float(stamp.read_text()))


def of_script(scenario: Scenario, folder: Path) -> str:
    """The first line of ``echelon run``; empty where it ended well."""
    facts = (scenario.world, scenario.technique, scenario.moment, scenario.kind)
    ranks = fault_scenarios.LAYOUTS[scenario.technique].ranks
    command = [sys.executable, "-m", "echelon", "run", "--ranks", str(ranks)]
    command += [fault_scenarios.__file__, *facts, str(scenario.culprit), str(folder)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, env=environ(TMPDIR=str(folder), PYTHONPATH=path)
    )
    lines = done.stderr.splitlines() or [f"no line, exit code {done.returncode}"]
    return lines[0] if done.returncode else ""


def of_piece(world: str, piece: int) -> list[Scenario]:
    wanted = [scenario for scenario in SCENARIOS if scenario.world == world]
    return wanted[piece :: NUM_PIECES[world]]


def test_there_are_four_hundred_scenarios_and_no_two_are_alike() -> None:
    assert len(set(SCENARIOS)) == len(SCENARIOS) >= 400


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("world", "piece"), PIECES)
def test_each_fault_ends_its_job_in_time_and_blames_no_innocent_rank(
    world: str, piece: int
) -> None:
    with ThreadPoolExecutor(AT_ONCE[world]) as pool:
        found = list(pool.map(ended, of_piece(world, piece)))
    late = [one for one in found if one.seconds > one.bound_s]
    wrong = [one for one in found if one.is_wrong]
    print(*found, sep="\n")
    print(f"{world}: {len(found)} faults, {len(late)} late, {len(wrong)} wrong")
    assert not wrong, "\n".join(map(str, wrong))
    too_late = [str(one) for one in late if one.seconds > one.bound_s + LOAD_S]
    assert not too_late, "\n".join(too_late)
