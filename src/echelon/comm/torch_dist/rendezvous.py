"""The rendezvous of a job: its ranks open a store, meet in it, and agree on a secret."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from echelon.comm import secret as secrets
from echelon.comm.secret import Secret
from echelon.comm.start_facts import difference, encode
from echelon.comm.torch_dist.engines import LOOPBACK
from echelon.comm.torch_dist.stores import (
    SealedStore,
    await_keys,
    create_memory_store,
    open_memory_store,
)
from echelon.diagnosis.rank_monitor import RankMonitor
from echelon.errors import CommTimeout, StartMismatch, WorldError
from echelon.errors.message_text import printable
from echelon.process.background_threads import run_in_background
from echelon.process.environment import JobEnvironment, environment
from echelon.process.listeners import announced

_START = "the start of the world"
_GRACE_S = 2.0  # beyond a time limit that the store itself should keep


@final
@dataclass(frozen=True)
class Rendezvous:
    """The store and the secret of ranks that have met.

    Attributes:
        store: in which ranks trust what they read.
        secret: that only the ranks know; None where there is no way to share one.
        is_kept: whether the store lives as long as any rank, whoever has opened it.
    """

    store: c10d.Store
    secret: Secret | None
    is_kept: bool


def open_store(env: JobEnvironment, timeout: float) -> c10d.Store:
    """The store in which ranks meet.

    Under ``echelon run`` this is a store that only processes of this user can open. Otherwise it is
    the TCP store of torchrun's agent, that of the default process group if the script or its
    launcher has made it, or one that rank 0 opens; these authenticate nobody. If all ranks are on
    one host, rank 0's store listens on the loopback interface only, otherwise on the
    interface of ``env.master_addr``, which is announced. If the user has set a secret, the values
    that ranks write are sealed with it.

    Args:
        timeout: seconds to wait for rank 0 to open it.

    Raises:
        WorldError: the port is in use, or the store cannot be reached in time.
    """
    # The agent's store outlives the job when the number of hosts changes.
    name = f"echelon/{env.attempt}" + (f"/{env.size}" if env.agent_store else "")
    if env.private_store:
        return c10d.PrefixStore(name, open_memory_store(env.private_store))
    secret = Secret.of(os.environ)
    if dist.is_initialized() and dist.get_world_size() == env.size:
        # Its store has the port of MASTER_PORT; a launcher such as Ray Train has made both.
        numbered = _numbered(dist.distributed_c10d._get_default_store(), name, env.rank)
        return numbered if secret is None else SealedStore(numbered, secret, name)
    host = LOOPBACK if env.one_host and not env.agent_store else env.master_addr
    if env.rank == 0 and not env.agent_store:
        with announced(env.rank, "the store", one_host=env.one_host):
            listener = _listen(host, env.master_port)
        store: c10d.Store = serve_store(listener, timeout)
    else:
        store = _reach(env, host, timeout)
    store = c10d.PrefixStore(name, store)
    return store if secret is None else SealedStore(store, secret, name)


def serve_store(listener: socket.socket, timeout: float) -> c10d.TCPStore:
    """A store in this process, which answers on ``listener`` and nowhere else.

    Args:
        listener: a socket that listens; from here on it belongs to the store, even if the store
            fails to start.
        timeout: seconds that a call to the store waits.
    """
    host, port = listener.getsockname()
    return c10d.TCPStore(
        LOOPBACK if host == "0.0.0.0" else host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def _reach(env: JobEnvironment, host: str, timeout: float) -> c10d.Store:
    """The store at the master's port. If something else listens there, it may never answer."""
    stores: list[c10d.Store] = []

    def connect() -> None:
        with suppress(RuntimeError):  # is raised below, with advice
            stores.append(
                c10d.TCPStore(
                    host,
                    env.master_port,
                    is_master=False,
                    timeout=timedelta(seconds=timeout),
                    wait_for_workers=False,
                )
            )

    run_in_background("echelon rendezvous", connect).join(timeout + _GRACE_S)
    if not stores:
        holder = "torchrun's agent" if env.agent_store else "rank 0"
        raise WorldError(
            f"rank {env.rank} could not reach the store of {holder} at "
            f"{host}:{env.master_port} within {timeout:.0f} s: check that rank 0 has "
            "started, that MASTER_ADDR and MASTER_PORT are right, that nothing else listens "
            "there, and that no firewall is between the hosts"
        )
    return stores[0]


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens on the interface of ``host``, or on all if no interface has it."""
    for address in (host, ""):
        try:
            return socket.create_server((address, port), backlog=2048)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise WorldError(
                    f"port {port} of {host} is in use: choose another one in MASTER_PORT "
                    "(torchrun: --master-port), or end the job that holds it"
                ) from error
            if error.errno != errno.EADDRNOTAVAIL or not address:
                raise WorldError(f"rank 0 cannot listen on {host}:{port}: {error}") from error
    raise AssertionError("the loop returns or raises")


def meet(
    store: c10d.Store,
    env: JobEnvironment,
    backend: str,
    timeout: float,
    monitor: RankMonitor | None = None,
) -> Rendezvous:
    """Return when all ranks are here and agree on the size of the job and on the backend.

    Args:
        backend: that this rank is going to use.
        timeout: seconds to wait for the others.
        monitor: of this rank; afterwards it sees the ranks of its host.

    Raises:
        AuthenticationError: somebody else has written into the store of a job with a secret.
        WorldError: two processes have one rank, or ranks know of different sizes or backends; the
            same on every rank that is here.
        RankFailed: a rank has ended, as the launcher knows.
        CommTimeout: names the ranks that are missing.
    """
    monitor = RankMonitor.alone(env.rank) if monitor is None else monitor
    try:
        rendezvous = _meet(store, env, backend, timeout, monitor)
    except WorldError as error:
        store.set("refused", str(error))  # or the others would wait for this rank
        raise
    monitor.share(env, rendezvous.store)
    return rendezvous


def _meet(
    store: c10d.Store, env: JobEnvironment, backend: str, timeout: float, monitor: RankMonitor
) -> Rendezvous:
    end = time.monotonic() + timeout
    fresh = secrets.nonce().hex()
    # torchrun assigns ranks itself, and may use its store again after a restart.
    if not env.agent_store and store.compare_set(f"came/{env.rank}", "", fresh) != fresh.encode():
        raise WorldError(f"RANK={env.rank} was given to two processes; each needs its own")
    plan = f"WORLD_SIZE={env.size}, backend {backend!r}"
    if env.rank == 0:
        store.set("plan", plan)
    monitor.check(_START)
    _await_ranks(store, ["plan"], end, timeout, monitor=monitor)
    plan_of_0 = store.get("plan").decode(errors="replace")
    if plan_of_0 != plan:
        raise WorldError(
            f"the ranks were told different things: rank 0 of {printable(plan_of_0)}; rank "
            f"{env.rank} of {plan}. WORLD_SIZE and the backend must be the same for all ranks of a "
            "job, and LOCAL_WORLD_SIZE for all ranks of a host",
        )
    keys = [f"here/{rank}" for rank in range(env.size)]
    store.set(keys[env.rank], fresh)
    monitor.check(_START)
    _await_ranks(store, keys, end, timeout, monitor=monitor)
    return _trusted(store, env, keys, end, timeout)


def _trusted(
    store: c10d.Store, env: JobEnvironment, keys: list[str], end: float, timeout: float
) -> Rendezvous:
    """Go from the store in which ranks met to a store in which they trust what they read."""
    if isinstance(store, SealedStore):
        # The nonces that the ranks have just written keep an earlier job from being replayed.
        secret = store.secret.derived(*store.multi_get(keys))
        return Rendezvous(store.rekeyed(secret), secret, is_kept=env.agent_store)
    if env.private_store:
        return Rendezvous(store, _shared_secret(store, env, end, timeout), is_kept=True)
    if env.size == 1:
        return Rendezvous(store, None, is_kept=True)
    # From a store that anybody can write to, ranks of one host take a path and nothing else, and
    # the kernel says whose memory it leads to.
    if sys.platform != "linux":  # a secret is the user's, as on several hosts
        return Rendezvous(store, None, is_kept=env.agent_store)
    private = None
    if env.rank == 0:
        path, private = create_memory_store() if env.one_host else ("", None)
        store.set("private store", path)
    else:
        _await_ranks(store, ["private store"], end, timeout)
        path = store.get("private store").decode(errors="replace")
        if bool(path) != env.one_host:
            raise WorldError(
                f"rank 0 says that {'all' if path else 'not all'} ranks are on one host, and rank "
                f"{env.rank} that {'all' if env.one_host else 'not all'} are: LOCAL_WORLD_SIZE "
                "must be the number of ranks of the host, on all of its ranks",
            )
        private = open_memory_store(path) if path else None
    if private is None:
        return Rendezvous(store, None, is_kept=env.agent_store)
    secret = _shared_secret(private, env, end, timeout)
    inside = [f"inside/{rank}" for rank in range(env.size)]
    private.set(inside[env.rank], "")
    if env.rank == 0:
        _await_ranks(private, inside, end, timeout, refusals=store)
    return Rendezvous(private, secret, is_kept=True)


def store_beside(
    group_store: c10d.Store, group: str, ranks: Sequence[int], dist_rank: int, timeout: float
) -> tuple[c10d.Store, Secret | None]:
    """A store and a secret for the ranks of a process group that the script has made itself.

    Args:
        group_store: torch's store of the process group.
        group: the name of the process group.
        ranks: its ranks in the default process group.
        dist_rank: this rank in the default process group.
    """
    job, secret = environment(os.environ), Secret.of(os.environ)
    if job is not None and job.private_store and job.size >= len(ranks) > 1:
        private = open_memory_store(job.private_store)
        store = _numbered(private, f"echelon/{job.attempt}/beside/{group}", dist_rank)
        first = replace(job, rank=ranks.index(dist_rank))
        end = time.monotonic() + timeout
        return store, _shared_secret(store, first, end, timeout)
    store = _numbered(group_store, "echelon", dist_rank)
    return (store, None) if secret is None else (SealedStore(store, secret, group), secret)


def _numbered(store: c10d.Store, name: str, rank: int) -> c10d.Store:
    """A part of ``store`` that nobody has used before, however often a group is taken over."""
    times = store.add(f"{name}/times/{rank}", 1)
    return c10d.PrefixStore(f"{name}/{times}", store)


def _shared_secret(store: c10d.Store, env: JobEnvironment, end: float, timeout: float) -> Secret:
    """The secret that rank 0 has put into a store that only this user can read."""
    if env.rank == 0:
        store.set("secret", Secret.create().to_hex())
    _await_ranks(store, ["secret"], end, timeout)
    return Secret.from_hex(store.get("secret").decode())


def check_start(
    store: c10d.Store, env: JobEnvironment, facts: Mapping[str, Any], timeout: float
) -> None:
    """Refuse ranks that were started differently. All ranks call it, after ``meet``.

    Rank 0 compares the facts of all ranks and the others read its result, so that a large job does
    not send everything to everyone.

    Raises:
        StartMismatch: on every rank, the first field that differs.
        CommTimeout: names a rank that is missing.
    """
    end = time.monotonic() + timeout
    keys = [f"facts/{rank}" for rank in range(env.size)]
    store.set(keys[env.rank], encode(facts).decode())
    if env.rank == 0:
        _await_ranks(store, keys, end, timeout)
        store.set("difference", json.dumps(difference(store.multi_get(keys))))
    _await_ranks(store, ["difference"], end, timeout)
    if (first_difference := json.loads(store.get("difference"))) is None:
        return
    receipts = [f"told/{rank}" for rank in range(env.size)]
    store.set(receipts[env.rank], "")
    if env.rank == 0:  # it may hold the store, which the others have yet to read
        end = time.monotonic() + min(timeout, _GRACE_S)
        with suppress(CommTimeout):
            _await_ranks(store, receipts, end, timeout)
    field, values = first_difference
    raise StartMismatch(
        printable(field), {int(rank): printable(value) for rank, value in values.items()}
    )


def _await_ranks(
    store: c10d.Store,
    keys: Sequence[str],
    deadline: float,
    timeout: float,
    *,
    monitor: RankMonitor | None = None,
    refusals: c10d.Store | None = None,
) -> None:
    """Wait for keys, of which key ``i`` is written by rank ``i``, or for news that the job failed.

    Refusals are read from ``refusals``; None: from the same store.

    Raises:
        WorldError: another rank has refused to start, and says why.
        CommTimeout: names the ranks whose keys are missing at the deadline.
    """

    board = store if refusals is None else refusals

    def check(missing: tuple[int, ...]) -> None:
        if monitor is not None:
            monitor.check(_START)
        if board.check(["refused"]):
            raise WorldError(printable(board.get("refused").decode(errors="replace")))

    await_keys(
        store,
        keys,
        deadline,
        check=check,
        time_out=lambda missing: CommTimeout(_START, missing, timeout),
    )
