"""Programs of torch.distributed in which one rank stops, and whether the first line names it.

Scenarios are drawn: what the rank does, how many ranks there are, who starts them, whether the rank
stops in a subgroup, and in which operation. ``python -m tests.long.torch_hangs 300`` runs some and
prints the share of first lines that are right.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

import echelon as ec
from echelon.errors import CollectiveMismatch, CommTimeout, DeadlockError, RankFailed

SECONDS = 4.0
_SLEEP_S = 20.0  # of a rank that hangs; threads cannot be ended


@dataclass(frozen=True)
class Scenario:
    """What happens in a program.

    Attributes:
        kind: what the rank does.
        world: ``"threads"`` or ``"processes"`` of ``ec.run``, or ``"launched"`` by ``echelon run``.
        culprit: the rank in the job.
        members: the ranks of the subgroup in which it stops; all for the default group.
        op: in which it stops.
    """

    kind: str
    world: str
    ranks: int
    culprit: int
    members: tuple[int, ...]
    op: str


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup, members: tuple[int, ...]) -> None:
    dist.all_gather([torch.empty_like(tensor) for _ in members], tensor, group=group)


def _scatter_sum(tensor: torch.Tensor, group: dist.ProcessGroup, members: tuple[int, ...]) -> None:
    whole = tensor.repeat(len(members))
    dist.reduce_scatter_tensor(torch.empty_like(tensor), whole, group=group)


def _exchange(tensor: torch.Tensor, group: dist.ProcessGroup, members: tuple[int, ...]) -> None:
    whole = tensor.repeat(len(members))
    dist.all_to_all_single(torch.empty_like(whole), whole, group=group)


def _ring(tensor: torch.Tensor, group: dist.ProcessGroup, members: tuple[int, ...]) -> None:
    place = members.index(dist.get_rank())
    after, before = members[(place + 1) % len(members)], members[place - 1]
    work = dist.isend(tensor, after, group=group)
    dist.recv(torch.empty_like(tensor), before, group=group)
    work.wait()


_OPS: dict[str, Callable[[torch.Tensor, dist.ProcessGroup, tuple[int, ...]], object]] = {
    "all_reduce": lambda tensor, group, members: dist.all_reduce(tensor, group=group),
    "all_gather": _all_gather,
    "reduce_scatter": _scatter_sum,
    "all_to_all": _exchange,
    "broadcast": lambda tensor, group, members: dist.broadcast(tensor, members[0], group=group),
    "barrier": lambda tensor, group, members: dist.barrier(group),
    "ring": _ring,
}
_KINDS = ("hang", "late", "exit", "raise", "shape", "kill", "order", "groups")
# A broadcast's source need not wait. In a ring sends need not wait, so the next rank makes another
# order of two groups good.
_WITHOUT_WAIT = {"broadcast"}
_WITHOUT_ORDER = {"broadcast", "ring"}


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    stream = random.Random(seed)
    world = stream.choice(("threads", "processes", "launched"))
    kinds = [kind for kind in _KINDS if not (kind == "kill" and world == "threads")]
    kind = stream.choice(kinds)
    ranks = stream.randint(3 if kind == "groups" else 2, 4)  # else both groups are the same
    members = tuple(range(ranks))
    if ranks > 2 and stream.random() < 0.5 and kind not in ("late", "groups"):
        members = tuple(sorted(stream.sample(members, stream.randint(2, ranks - 1))))
    if kind == "shape":
        ops = ["all_reduce", "all_gather", "reduce_scatter", "ring"]
    else:
        left_out = _WITHOUT_ORDER if kind == "order" else _WITHOUT_WAIT
        ops = [op for op in _OPS if op not in left_out]
    return Scenario(kind, world, ranks, stream.choice(members), members, stream.choice(ops))


def program(scenario: Scenario) -> None:
    """What each rank runs, which knows torch.distributed only."""
    rank = int(os.environ["RANK"])
    is_culprit = rank == scenario.culprit
    if scenario.kind == "late" and is_culprit:
        time.sleep(_SLEEP_S)
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", timeout=timeout)
    group = dist.group.WORLD
    if scenario.kind == "groups":  # made in another order
        lists = [[0, 1], list(range(scenario.ranks))]
        for ranks in lists[:: -1 if is_culprit else 1]:
            dist.new_group(ranks, timeout=timeout)
        return
    subgroup = dist.new_group(list(scenario.members), timeout=timeout)
    other = dist.new_group(list(scenario.members), timeout=timeout)
    if len(scenario.members) < scenario.ranks:
        group = subgroup
    if rank not in scenario.members:
        return
    assert group is not None
    act = _OPS[scenario.op]
    for step in range(4):
        if is_culprit and step == 2:
            _stop(scenario.kind)
        numel = 5 if is_culprit and step == 2 and scenario.kind == "shape" else 4
        groups = [group, other]
        if is_culprit and step == 2 and scenario.kind == "order":
            groups.reverse()
        for each in groups:
            act(torch.ones(numel), each, scenario.members)


def _stop(kind: str) -> None:
    if kind == "hang":
        time.sleep(_SLEEP_S)
    elif kind == "exit":
        sys.exit(0)
    elif kind == "raise":
        raise ValueError("boom")
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


# What is right -------------------------------------------------------------------------------


def first_line(scenario: Scenario) -> str:
    """The first line that a user sees of the failure."""
    if scenario.world == "launched":
        return _launched(scenario)
    try:
        ec.run(program, scenario.ranks, scenario.world, args=(scenario,), timeout=SECONDS)
    except BaseException as error:
        return _of_error(error, scenario)
    return "nothing"


def _launched(scenario: Scenario) -> str:
    command = [sys.executable, "-m", "echelon", "run", "--ranks", str(scenario.ranks), "-m"]
    command += ["tests.long.torch_hangs", "--program", json.dumps(asdict(scenario))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = [
        line for line in done.stderr.splitlines() if re.match("(rank |the ranks|ranks )", line)
    ]
    return lines[0] if lines else done.stderr[-300:]


def _of_error(error: BaseException, scenario: Scenario) -> str:
    """An error of ``ec.run`` in the words in which ``echelon run`` begins."""
    first = str(error).splitlines()[0] if str(error) else ""
    notes = " ".join(getattr(error, "__notes__", ()))
    name = type(error).__name__
    if isinstance(error, CollectiveMismatch | DeadlockError):
        return f"the ranks disagree: {name}: {first}; {sorted(getattr(error, 'calls', {}))}"
    if isinstance(error, CommTimeout):
        named = [*error.stuck, *error.missing]
        return f"rank {named[0]} {next(iter(error.stuck.values()), 'did not come')}"
    if isinstance(error, RankFailed):
        return f"rank {error.failed_rank} {error.cause}"
    found = re.search(r"raised on (rank \d+)", notes)
    return f"{found[1] if found else '?'} raised {name}: {first}"


def is_right(scenario: Scenario, line: str) -> bool:
    """Whether a first line names the rank, and what it did."""
    subject = f"rank {scenario.culprit} "
    match scenario.kind:
        case "hang":
            return line.startswith(subject) and "sleeps or waits outside communication" in line
        case "late":
            return line.startswith(subject) and ("did not come" in line or "sleeps" in line)
        case "exit":
            words = ("exited with code 0", "returned and left", "has ended", "has returned")
            return (line.startswith(subject) and any(word in line for word in words)) or (
                "DeadlockError" in line
            )
        case "raise":
            return line.startswith(subject) and "ValueError: boom" in line
        case "kill":
            return line.startswith(subject) and "SIGKILL" in line
        case "shape" | "groups":
            return line.startswith("the ranks disagree") and "CollectiveMismatch" in line
        case _:  # each waits for the others, in another group
            return line.startswith("the ranks disagree") and "DeadlockError" in line


def run_all(seeds: range, stop_s: float = float("inf")) -> Iterator[tuple[Scenario, str, bool]]:
    """Run scenarios, until a time of the monotonic clock."""
    for seed in seeds:
        if time.monotonic() > stop_s:
            return
        scenario = draw(seed)
        line = first_line(scenario)
        yield scenario, line, is_right(scenario, line)


def main() -> None:
    if sys.argv[1] == "--program":
        facts = json.loads(sys.argv[2])
        program(Scenario(**{**facts, "members": tuple(facts["members"])}))
        return
    start, stop = map(int, sys.argv[1].split(":")) if ":" in sys.argv[1] else (0, int(sys.argv[1]))
    limit_s = float(sys.argv[2]) if len(sys.argv) > 2 else float("inf")
    right = total = 0
    for scenario, line, good in run_all(range(start, stop), time.monotonic() + limit_s):
        total, right = total + 1, right + good
        mark = "right" if good else "WRONG"
        print(f"{mark} {scenario}\n      {line[:200]}", flush=True)
    print(f"{right} of {total} first lines are right")


if __name__ == "__main__":
    main()
