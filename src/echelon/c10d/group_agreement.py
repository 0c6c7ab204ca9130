"""Whether all ranks make the same group, which torch takes for granted and does not check.

Every rank calls ``new_group`` for every group, in one order, members or not: torch names a group by
the number of groups that a rank has made. A rank that makes only its own groups, or makes them in
another order, meets ranks of another group under the same name. So all ranks compare their groups
before any of them is made. Groups with ``use_local_synchronization=True`` are named by their ranks,
and only their members make them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial

from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from echelon.c10d.process_watch import process_watch
from echelon.c10d.simulated_rank import world_group
from echelon.c10d.simulated_store import wait_for_members
from echelon.diagnosis.collective_call import CallSignature, caller
from echelon.errors import CollectiveMismatch


def is_made_by_all(group_name: str) -> bool:
    """Whether torch named a group by a count, and not by its ranks.

    Example:
        >>> is_made_by_all("3"), is_made_by_all("8cb2237d0679ca88db6464eac60da96345513964")
        (True, False)
    """
    return group_name.isdecimal() and len(group_name) < 10


def agree_on_group(
    store: c10d.Store, group_name: str, ranks: Sequence[int], seconds: float
) -> None:
    """Return when all ranks make this group now; all of them call it.

    Args:
        store: of all ranks.
        ranks: of the group, in the job.
        seconds: how long a rank waits for the others.

    Raises:
        CollectiveMismatch: on all ranks, if they make different groups.
        CommTimeout: a rank does not make it in time.
        DeadlockError: a simulated rank makes it no more.
        RankFailed: a rank has ended.
    """
    world = distributed_c10d._get_default_group()
    rank, size = world.rank(), world.size()
    agreement = c10d.PrefixStore(f"echelon/group {group_name}", store)
    agreement = c10d.PrefixStore(str(agreement.add(f"times/{rank}", 1)), agreement)
    members = tuple(sorted(ranks))
    content = json.dumps(members)
    keys = {other: f"rank/{other}" for other in range(size)}
    agreement.set(keys[rank], json.dumps([content, str(caller())]))
    # Groups of one rank may be other ones: nothing is ever paired in them. Parts of a group may
    # each be parted further by ranks of their own.
    compared = content if len(members) > 1 else "one rank"
    if agreement.compare_set("first", "", compared) != compared.encode():
        agreement.set("differs", "1")
    if agreement.add("count", 1) == size:
        agreement.set("all", "1")
    signature = CallSignature("new_group", shape=members)
    if world_group() is not None:
        missing = partial(_missing, agreement, keys)
        wait_for_members(agreement, ["all"], signature, seconds, missing)
    else:
        watch = process_watch(rank, size)
        watch.await_keys(agreement, "all", keys, watch.call(signature), seconds)
    if agreement.check(["differs"]):
        calls = {other: json.loads(agreement.get(key)) for other, key in keys.items()}
        texts = {other: f"new_group({made}) at {place}" for other, (made, place) in calls.items()}
        raise CollectiveMismatch.of_groups(group_name, texts)


def _missing(store: c10d.Store, keys: Mapping[int, str]) -> set[int]:
    return {rank for rank, key in keys.items() if not store.check([key])}
