"""A data set that one rank of each host builds, in memory that all ranks of the host map.

::

    builder of a host   [1] calls ``build``; the other ranks wait, however long it takes
                        [2] copies arrays and columns into one memory, and tells the others
                            where each of them lies
    each rank           [3] maps that memory

``mapped_values`` does the second and the third.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from echelon import checks
from echelon.comm.group import Group
from echelon.errors import ArgumentError, EchelonError, StateError
from echelon.launch.run import entered
from echelon.process.background_threads import run_in_background
from echelon.train.mapped_values import MappedValues

Data = TypeVar("Data")


def shared_dataset(build: Callable[[], Data], group: Group | None = None) -> Data:
    """The result of ``build``, which one rank of each host calls, in memory that all of them read.

    All ranks of the group call it. On a host with eight ranks the data are built once and take
    their memory once; while they are copied, the builder has them twice.

    Law: every rank gets equal values, and no rank can change those of another.

    Args:
        build: returns nested dicts, lists and tuples of tensors, arrays of NumPy, lists of str or
            bytes, and values. It may take longer than the timeout of the group.
        group: the ranks; None: all ranks of the job, or this process alone if there is no job.

    Returns:
        The same structure. Tensors and arrays lie in the shared memory; arrays are read-only, and a
        write to a tensor changes the copy of this rank only. A list whose items are all str, or
        all bytes, is a ``SharedColumn``. Everything else is a copy.

    Raises:
        ArgumentError: the result holds something else, such as an object of a class.
        SharedMemoryError: there is not enough memory.
        StateError: on the other ranks, if ``build`` raised; the builder raises what it raised.

    Example:
        >>> data = shared_dataset(lambda: {"x": torch.arange(3), "names": ["a", "b", "c"]})
        >>> data["x"], data["names"][-1], len(data["names"])
        (tensor([0, 1, 2]), 'c', 3)
    """
    if not callable(build):
        raise ArgumentError(f"build is {build!r:.80}; give a function that returns the data")
    checks.instance("group", group, Group, or_none=True)
    world = entered()
    if group is None and world is not None:
        group = world.group
    if group is None or group.size == 1:
        with MappedValues() as memory:
            memory.fill(build())
            return cast(Data, memory.value)
    hosts = group.all_gather_object(_host())
    builder = hosts.index(hosts[group.rank])
    with MappedValues() as memory:
        if builder == group.rank:
            error = _build(build, memory, group)
        else:
            error = None
            _wait(group)
        descriptions = _agree(group, error, memory.description)
        if builder != group.rank:
            try:
                memory.map(descriptions[builder])
            except Exception as raised:
                error = raised
        _agree(group, error, None)  # the builder keeps the memory open until all have mapped it
        return cast(Data, memory.value)


def _host() -> tuple[object, ...]:
    """What ranks have in common that reach the memory of each other."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip(), os.stat("/proc/self/ns/pid").st_ino, os.geteuid()
    except OSError:  # only simulated ranks share memory there
        return platform.node(), os.getpid()


def _build(build: Callable[[], Any], memory: MappedValues, group: Group) -> Exception | None:
    """Build on this thread, while another one tells the ranks that wait that this one works."""
    done = threading.Event()
    waiting = _group_for_waiting(group)
    errors: list[BaseException] = []

    def stay() -> None:
        try:
            _stay(waiting, done)
        except BaseException as error:  # another rank has failed
            errors.append(error)

    thread = run_in_background("echelon shared data", stay)
    try:
        memory.fill(build())
        error: Exception | None = None
    except Exception as raised:
        error = raised
    finally:
        done.set()
    thread.join()
    if errors:
        raise errors[0] from error
    return error


def _wait(group: Group) -> None:
    done = threading.Event()
    done.set()
    _stay(_group_for_waiting(group), done)


def _stay(waiting: Group, done: threading.Event) -> None:
    """Return when all ranks are done. A rank that died is noticed in the next round."""
    while True:
        flag = torch.tensor([float(done.wait(waiting.timeout / 4))], device=waiting.device)
        waiting.all_reduce(flag, "min", label="shared data are built")
        if flag.item():
            return


def _group_for_waiting(group: Group) -> Group:
    """A group of the same ranks, because the thread that builds may communicate, too."""
    waiting = group.belongings.get(shared_dataset)
    if waiting is None:
        waiting = group.belongings[shared_dataset] = group.subgroup(range(group.size))
    return cast(Group, waiting)


def _agree(group: Group, error: Exception | None, fact: Any) -> list[Any]:
    """The fact of each rank, or the first error of any."""
    report = None if error is None else (type(error).__name__, str(error))
    reports = group.all_gather_object((report, fact))
    if error is not None:
        raise error
    for rank, (problem, _) in zip(group.ranks, reports, strict=True):
        if problem is not None:
            kind, text = problem
            what = f"rank {rank} could not make the shared data of its host: {kind}: {text}"
            raise EchelonError.revived(kind, what, {}) or StateError(what)
    return [fact for _, fact in reports]
