"""What the marks ``ranks`` and ``faults`` of a test ask for: on how many ranks it runs, and how.

It is read while tests are collected, so torch is imported only for a mark of faults.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, final

from echelon.errors import ArgumentError

if TYPE_CHECKING:
    from echelon.testing import Fault

WORLDS = ("threads", "processes")
TIMEOUT_S = 60.0
TIMEOUT_WITH_FAULT_S = 5.0  # most faults end at once, some only by the timeout
_MOST_RANKS = 1 << 12  # of one test


class MarkArguments(Protocol):
    """A mark of pytest, as it stands over a test."""

    @property
    def args(self) -> tuple[Any, ...]: ...

    @property
    def kwargs(self) -> Mapping[str, Any]: ...


@final
@dataclass(frozen=True)
class FaultyRank:
    """A rank that misbehaves once.

    Attributes:
        fault: how.
        rank: which one.
        at: its first call that the fault may replace, from 0.
    """

    fault: Fault
    rank: int
    at: int


@final
@dataclass(frozen=True)
class RankCase:
    """One way in which the body of a test runs.

    Attributes:
        ranks: on how many ranks.
        world: ``"threads"`` or ``"processes"``.
        timeout: seconds that a rank waits for others in one call.
        faulty: the rank that misbehaves, if any.
    """

    ranks: int
    world: str
    timeout: float
    faulty: FaultyRank | None = None

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks != 1 else ''} ({self.world})"
        return f"{ranks}, {self.faulty.fault}" if self.faulty else ranks


def rank_cases(
    ranks: MarkArguments,
    faults: MarkArguments | None = None,
    *,
    world: str | None = None,
    timeout: float | None = None,
) -> list[RankCase]:
    """All ways in which a test with these marks runs, of which there is at least one.

    Args:
        world: the world of all tests, whatever the mark says; None: that of the mark.
        timeout: the timeout of marks that have none.

    Raises:
        ArgumentError: a mark that cannot be followed.
    """
    options = _options("ranks", ranks, ("ranks", "world", "timeout"))
    sizes = [_size(size) for size in _sequence("ranks", options.get("ranks"), int)]
    worlds = [_world(name) for name in _sequence("world", options.get("world", "threads"), str)]
    if world is not None:
        worlds = [_world(world)]
    if timeout is None:
        timeout = TIMEOUT_S if faults is None else TIMEOUT_WITH_FAULT_S
    seconds = _seconds(options.get("timeout", timeout))
    return [
        RankCase(size, name, seconds, faulty)
        for size in dict.fromkeys(sizes)
        for name in dict.fromkeys(worlds)
        for faulty in _faulty_ranks(faults, size, name)
    ]


def case_ids(cases: Sequence[RankCase]) -> list[str]:
    """The part of the name of each case, by what differs between them."""
    sizes, worlds = ({getattr(case, name) for case in cases} for name in ("ranks", "world"))
    ids = []
    for case in cases:
        parts = [f"{case.ranks}rank{'s' if case.ranks != 1 else ''}"] if len(sizes) > 1 else []
        parts += [case.world] if len(worlds) > 1 else []
        parts += [str(case.faulty.fault).replace(" ", "_")] if case.faulty else []
        ids.append("-".join(parts))
    return ids


def _options(name: str, mark: MarkArguments, names: Sequence[str]) -> dict[str, Any]:
    """The arguments of a mark by name; one may stand first without a name."""
    options = dict(mark.kwargs)
    if len(mark.args) > 1:
        _refuse(name, mark, f"has {len(mark.args)} arguments without a name, more than one")
    if mark.args and names[0] in options:
        _refuse(name, mark, f"says {names[0]} twice")
    options |= dict(zip(names, mark.args, strict=False))
    if unknown := sorted(options.keys() - set(names)):
        _refuse(name, mark, f"has the unknown argument {unknown[0]!r}; it has {', '.join(names)}")
    return options


def _refuse(name: str, mark: MarkArguments, problem: str) -> NoReturn:
    arguments = [repr(value) for value in mark.args]
    arguments += [f"{key}={value!r}" for key, value in mark.kwargs.items()]
    raise ArgumentError(f"@pytest.mark.{name}({', '.join(arguments):.200}) {problem}")


def _sequence(name: str, value: Any, kind: type) -> list[Any]:
    """One value, or several in a list or tuple."""
    if isinstance(value, kind):
        return [value]
    if isinstance(value, list | tuple) and value:
        return list(value)
    example = "4, or [1, 2, 4]" if kind is int else "'threads', 'processes', or a list of both"
    raise ArgumentError(f"{name} of @pytest.mark.ranks is {value!r:.80}: give {example}")


def _size(size: Any) -> int:
    if type(size) is not int or not 1 <= size <= _MOST_RANKS:
        raise ArgumentError(
            f"ranks of @pytest.mark.ranks is {size!r:.80}: give a number from 1 to {_MOST_RANKS}"
        )
    return size


def _world(name: Any) -> str:
    if name not in WORLDS:
        raise ArgumentError(
            f"world of @pytest.mark.ranks is {name!r:.80}: use 'threads' or 'processes'"
        )
    return str(name)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ArgumentError(
            f"timeout of @pytest.mark.ranks is {value!r:.80}: give seconds, more than 0"
        )
    return float(value)


def _faulty_ranks(mark: MarkArguments | None, size: int, world: str) -> Iterable[FaultyRank | None]:
    """The faults that ranks of this world can have; only None without a mark."""
    if mark is None:
        return [None]
    from echelon.testing import FAULTS, Fault  # which brings torch

    by_name = {fault.name: fault for fault in FAULTS}
    if unknown := sorted(mark.kwargs.keys() - {"rank", "at"}):
        _refuse("faults", mark, f"has the unknown argument {unknown[0]!r}; it has rank and at")
    faults = []
    for name in mark.args or FAULTS:
        fault = by_name.get(name, name) if isinstance(name, str) else name
        if not isinstance(fault, Fault):
            names = ", ".join(map(repr, by_name))
            _refuse(
                "faults", mark, f"names the unknown fault {name!r:.80}: use a Fault, or {names}"
            )
        if fault.needs_process and world == "threads":
            if mark.args:
                _refuse("faults", mark, f"needs world='processes': {fault} ends a whole process")
            continue
        faults.append(fault)
    rank, at = mark.kwargs.get("rank", 0), mark.kwargs.get("at", 0)
    if type(rank) is not int or not 0 <= rank < size:
        _refuse("faults", mark, f"names rank {rank!r}, which is not one of {size} ranks")
    if type(at) is not int or at < 0:
        _refuse("faults", mark, f"has at={at!r:.40}: give the number of a call, from 0")
    return [FaultyRank(fault, rank, at) for fault in faults]
