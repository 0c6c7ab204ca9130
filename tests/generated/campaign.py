"""Runs many cases and says how each ended."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.comm.world import World
from echelon.errors import CommError, EchelonError, StageError
from tests.generated.judge import Difference, is_allowed
from tests.generated.operations import Spec
from tests.generated.program import InvalidCase
from tests.generated.ranks import run_case
from tests.generated.reference import expect
from tests.generated.stages import Whole
from tests.generated.thresholds import thresholds_set
from tests.worlds import NCCL_RULES, run_world

TIMEOUT_S = 60.0  # a parameter may have 64 MiB
SEVERITY = ("right", "invalid", "hang", "refused", "our error", "raw error", "difference")


@dataclass
class Outcome:
    """How a case ended.

    Attributes:
        kind: ``"right"``, ``"invalid"``, ``"refused"`` as documentation says, or, of a failure,
            ``"difference"``, ``"raw error"``, ``"our error"``, ``"hang"``.
        text: of a failure, what happened.
        where: of an error, the innermost line of the library.
        trace: of an error, all lines.
    """

    kind: str
    text: str = ""
    where: str = ""
    trace: str = ""

    @property
    def failed(self) -> bool:
        return self.kind not in ("right", "invalid", "refused")


def outcome_of(case: Spec, error: BaseException) -> Outcome:
    """What an exception of a world says."""
    frames = traceback.extract_tb(error.__traceback__)
    known = [f for f in frames if "/echelon/" in f.filename or "/tests/" in f.filename]
    inner = [f for f in known if not f.filename.endswith("threads/randomness.py")]
    where = f"{'/'.join(inner[-1].filename.split('/')[-2:])}:{inner[-1].name}" if inner else ""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, InvalidCase):
        return Outcome("invalid", text)
    if isinstance(error, Difference):
        return Outcome("difference", text)
    if is_allowed(case, error):
        return Outcome("refused", text)
    trace = "".join(traceback.format_exception(error))
    cause = error.__cause__ if isinstance(error, StageError) else error
    where += f" ({cause})"[:40] if isinstance(error, StageError) else ""
    kind = "our error" if isinstance(cause, EchelonError) else "raw error"
    return Outcome("hang" if isinstance(error, CommError) else kind, text, where, trace)


def run_one(case: Spec, timeout: float = TIMEOUT_S) -> Outcome:
    """Run one case in its world."""
    if case["world"] != "threads":
        return run_batch([case], timeout)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = expected_of(case)
            with thresholds_set(case["thresholds"]):
                kind = NCCL_RULES if case.get("rules") else "threads"
                run_world(kind, run_case, case["ranks"], (case, expected), timeout)
        except Exception as error:
            return outcome_of(case, error)
    return Outcome("right")


def expected_of(case: Spec) -> Any:
    """What every rank has to see."""
    return Whole(case).run() if case["technique"] == "pipeline" else expect(case)


def on_rank(world: World, cases: list[Spec], progress: str) -> list[list[str]]:
    """Cases one after another, until one fails; how each ended."""
    with thresholds_set(cases[0]["thresholds"]):
        outcomes = outcomes_of(world, cases, progress)
        world.close()  # what is outstanding after a failure runs with these thresholds, too
        return outcomes


def outcomes_of(world: World, cases: list[Spec], progress: str) -> list[list[str]]:
    """The same, with the thresholds as they are."""
    outcomes = []
    for i, case in enumerate(cases):
        if world.rank == 0:
            Path(progress).write_text(str(i))
        outcome = Outcome("right")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                run_case(world, case, expected_of(case))
            except Exception as error:
                outcome = outcome_of(case, error)
        outcomes.append([outcome.kind, outcome.text, outcome.where, outcome.trace])
        if outcome.kind not in ("right", "invalid"):
            break  # ranks are at different places now
    return outcomes


def run_batch(cases: list[Spec], timeout: float = TIMEOUT_S) -> list[Outcome]:
    """Run cases of one world, number of ranks and choice of thresholds.

    The world starts anew after each failure.
    """
    assert all(case["thresholds"] == cases[0]["thresholds"] for case in cases)
    found: list[Outcome] = []
    while len(found) < len(cases):
        rest = cases[len(found) :]
        with tempfile.TemporaryDirectory() as folder:
            progress = Path(folder) / "case"
            progress.write_text("0")
            try:
                args = (rest, str(progress))
                by_rank = run_world(rest[0]["world"], on_rank, rest[0]["ranks"], args, timeout)
            except Exception as error:  # a process died
                at = int(progress.read_text())
                found += [Outcome("right")] * at
                found.append(Outcome("crash", f"{type(error).__name__}: {error}"))
                continue
        ended = min(len(one) for one in by_rank)
        found += [Outcome(*one) for one in by_rank[0][: ended - 1]]
        # The rank that failed first knows why; the others have lost it.
        last = [Outcome(*one[ended - 1]) for one in by_rank]
        found.append(max(last, key=lambda one: SEVERITY.index(one.kind)))
    return found
