"""How ranks of a new process group meet: simulated ones in memory, processes in shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, final

from torch._C import _distributed_c10d as c10d

from echelon.c10d import simulated_rank
from echelon.c10d.process_watch import begin, process_watch
from echelon.c10d.simulated_store import hub_of, wait_for_members
from echelon.comm.group import Group
from echelon.comm.threads.clocks import Clocks
from echelon.comm.threads.group import ThreadGroup
from echelon.diagnosis.collective_call import CallSignature
from echelon.diagnosis.flight_recorder import Phase
from echelon.errors import ArgumentError, CommTimeout
from echelon.process.operating_system import require_linux

if TYPE_CHECKING:
    from echelon.comm.shm import ShmGroup

# How often a receive from any rank looks for a message: often at first, later to spare the core.
_LOOK_S = (0.00005, 0.001)


@final
@dataclass(frozen=True, kw_only=True)
class Connection:
    """A group, and what a process group needs of it that not all groups have in the same way.

    Attributes:
        group: does the work.
        probe: a rank that has sent a message with a tag whose receive is not posted yet, or None.
        await_message: returns when there is such a message; raises ``CommTimeout`` after seconds,
            or those of the group.
        await_key: returns when a store has a key that a rank of the group sets, within seconds;
            raises ``RankFailed`` or ``DeadlockError`` if that rank has ended, or ``CommTimeout``.
        wake: lets ranks that wait for a key look, after it was set.
        close: leaves the group; a text says what this rank did instead of leaving in good order.
        batch: a context; messages that are issued in its body are one operation.
        is_simulated: the ranks are threads that take turns, so nothing may wait outside of groups.
        clock: shows the seconds that limits of time count.
    """

    group: Group
    probe: Callable[[int], int | None]
    await_message: Callable[[CallSignature, int, float | None], None]
    await_key: Callable[[c10d.Store, str, int, CallSignature, float], None]
    wake: Callable[[], None]
    close: Callable[[str | None], None]
    is_simulated: bool
    batch: Callable[[], AbstractContextManager[None]] = nullcontext
    clock: Callable[[], float] = time.monotonic


def connect(
    options: c10d._DistributedBackendOptions, *, is_beside_nccl: bool = False
) -> Connection:
    """Connect the ranks of a new process group; each of them calls it.

    Args:
        is_beside_nccl: whether the group is of another backend in a job over NCCL, so that it has
            tags whatever the rules of simulated ranks are.
    """
    world = simulated_rank.world_group()
    if world is not None:
        return _connect_threads(options, world, is_beside_nccl=is_beside_nccl)
    require_linux("process groups of processes")
    from echelon.comm import shm

    rank, size, seconds = options.group_rank, options.group_size, options.timeout.total_seconds()
    ranks = _members(options)
    is_world = _is_world(options)
    watch = begin(rank, size) if is_world else process_watch(ranks[rank], ranks[-1] + 1)
    call = watch.call(_meeting(options))
    store = _own_store(options)
    keys = {member: f"here/{member}" for member in ranks}
    store.set(keys[ranks[rank]], "here")
    if store.add("count", 1) == size:
        store.set("all", "here")
    watch.await_keys(store, "all", keys, call, seconds)
    if is_world:
        watch.share(store)
    group = shm.connect(
        rank,
        size,
        store,
        timeout=seconds,
        name=_name(options),
        monitor=watch.monitor,
        job_ranks=None if is_world and watch.monitor.rank == rank else ranks,
    )
    watch.add(group)
    if is_world:
        watch.monitor.set_phase(Phase.RUNNING)
    return of_processes(group)


def of_processes(group: ShmGroup) -> Connection:
    """The connection of a group of processes, which closes the group with it."""
    return Connection(
        group=group,
        probe=group.probe,
        await_message=partial(_look_for_message, group),
        await_key=partial(_look_for_key, group),
        wake=group.wake,
        close=group.close,
        is_simulated=False,
    )


def _members(options: c10d._DistributedBackendOptions) -> tuple[int, ...]:
    """The ranks of the group in the job."""
    return tuple(options.global_ranks_in_group) or tuple(range(options.group_size))


def _is_world(options: c10d._DistributedBackendOptions) -> bool:
    return not options.global_ranks_in_group


def _meeting(options: c10d._DistributedBackendOptions) -> CallSignature:
    """The call of the program in which the members meet."""
    if _is_world(options):
        return CallSignature("init_process_group")
    return CallSignature("new_group", shape=_members(options))


def _own_store(options: c10d._DistributedBackendOptions) -> c10d.Store:
    """A store of these members alone, each time that they make the group.

    torch names some groups by a count, so groups of other members may have the same name.
    """
    ranks = ",".join(map(str, _members(options)))
    store = c10d.PrefixStore(ranks, options.store)
    times = store.add(f"times/{options.group_rank}", 1)
    return c10d.PrefixStore(str(times), store)


def _name(options: c10d._DistributedBackendOptions) -> str:
    return f"c10d {options.group_id}"


def _look_for_message(
    group: ShmGroup, call: CallSignature, tag: int, timeout: float | None
) -> None:
    seconds = group.timeout if timeout is None else timeout
    start_s = time.monotonic()
    while group.probe(tag) is None:
        waited_s = time.monotonic() - start_s
        if waited_s > seconds:
            others = [rank for place, rank in enumerate(group.ranks) if place != group.rank]
            raise CommTimeout(str(call), others, seconds)
        time.sleep(min(max(waited_s / 10, _LOOK_S[0]), _LOOK_S[1]))


def _look_for_key(
    group: ShmGroup, store: c10d.Store, key: str, rank: int, call: CallSignature, seconds: float
) -> None:
    group.wait_until(call, lambda: store.check([key]), rank, seconds)


def _connect_threads(
    options: c10d._DistributedBackendOptions, world: ThreadGroup, *, is_beside_nccl: bool
) -> Connection:
    """Learn through the store which simulated rank is which rank of the group."""
    store, rank, size = _own_store(options), options.group_rank, options.group_size
    if size > world.size:
        raise ArgumentError(
            f"a group of {size} ranks was asked for (world_size), and this job has {world.size}: "
            f"start it with --ranks {size}, or leave world_size and rank out"
        )
    keys = [str(member) for member in range(size)]
    if rank == 0:
        store.set("name", hub_of(world).unused_name(_name(options)))
    store.set(keys[rank], str(world.rank))
    seconds = options.timeout.total_seconds()
    wait_for_members(store, [*keys, "name"], _meeting(options), seconds)
    group = ThreadGroup(
        world.thread_world,
        rank,
        [int(store.get(key)) for key in keys],
        name=store.get("name").decode(),
        device=world.device,
        rules=world.thread_world.rules.of_host() if is_beside_nccl else None,
    )
    group.timeout = seconds
    world.thread_world.tells_last_calls = True  # the program has no other line of such a rank
    return Connection(
        group=group,
        probe=partial(_probe_in_turn, group),
        await_message=partial(_await_message, group),
        await_key=partial(_await_key, group),
        wake=lambda: None,  # a store of simulated ranks does it
        close=partial(_leave_group, group),
        is_simulated=True,
        batch=group.batch,
        clock=partial(_clock, group.thread_world.order.clocks, world.rank),
    )


def _clock(clocks: Clocks, rank: int) -> float:
    """The clock of a rank, which does not run while it waits and no other rank can run."""
    return 1e-9 * (clocks.read(rank) + clocks.idle_ns())


def _leave_group(group: ThreadGroup, failure: str | None) -> None:
    group.note(CallSignature("destroy_process_group" if failure is None else "abort"))
    if failure is not None:
        group.abort(failure)


def _probe_in_turn(group: ThreadGroup, tag: int) -> int | None:
    if group.probe(tag) is None:  # or a rank that asks in a loop would ask for ever
        group.thread_world.order.yield_turn(group.ranks[group.rank], group.timeout)
    return group.probe(tag)


def _await_message(
    group: ThreadGroup, call: CallSignature, tag: int, timeout: float | None
) -> None:
    group.wait_until(call, lambda: group.probe(tag) is not None, timeout)


def _await_key(
    group: ThreadGroup, store: c10d.Store, key: str, rank: int, call: CallSignature, seconds: float
) -> None:
    wait_for_members(store, [key], call, seconds, lambda: {group.ranks[rank]})
