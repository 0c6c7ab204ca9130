"""The store in which the ranks of a job find one another."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, final

from torch._C import _distributed_c10d as c10d

from echelon.comm import secret as secrets
from echelon.comm.secret import Secret
from echelon.comm.start_facts import difference, encode
from echelon.comm.torch_dist import private_store
from echelon.comm.torch_dist.sealed_store import SealedStore
from echelon.diagnosis.rank_monitor import RankMonitor
from echelon.errors import CommTimeout, StartMismatch, WorldError
from echelon.errors.message_text import printable
from echelon.process.environment import JobEnvironment, environment
from echelon.process.listeners import announced

LOOPBACK = "127.0.0.1"
_START = "the start of the world"
_GRACE_S = 2.0  # beyond its own limit, for a store that keeps to it
_SLICE_S = 0.1  # how soon a rank that waits hears that the job cannot start


@final
@dataclass(frozen=True)
class Rendezvous:
    """What ranks that have met go on with.

    Attributes:
        store: in which they trust what they read.
        secret: that they share; None where there is no way to have one.
        is_kept: whether the store lives as long as any rank, whoever has opened it.
    """

    store: c10d.Store
    secret: Secret | None
    is_kept: bool


def open_store(env: JobEnvironment, timeout: float) -> c10d.Store:
    """The store in which ranks meet.

    That of ``echelon run`` is open to processes of this user alone. Else it is the one that
    torchrun's agent holds, or else one that rank 0 holds: torch's, which asks nobody who they are.
    If all ranks are on one host, rank 0's listens on the loopback interface only, otherwise on the
    interface of ``env.master_addr``, and says so. Where the user has given a secret, what ranks
    write is sealed with it.

    Args:
        timeout: seconds to wait for rank 0 to open it.

    Raises:
        WorldError: the port is in use, or the store cannot be reached in time.
    """
    # The agent's store outlives the job when the number of hosts changes.
    name = f"echelon/{env.attempt}" + (f"/{env.size}" if env.agent_store else "")
    if env.private_store:
        return c10d.PrefixStore(name, private_store.open_existing(env.private_store))
    given = Secret.of(os.environ)
    host = LOOPBACK if env.one_host and not env.agent_store else env.master_addr
    if env.rank == 0 and not env.agent_store:
        with announced(env.rank, "the store", one_host=env.one_host):
            listener = _listen(host, env.master_port)
        store: c10d.Store = serve_store(listener, timeout)
    else:
        store = _reach(env, host, timeout)
    store = c10d.PrefixStore(name, store)
    return store if given is None else SealedStore(store, given, name)


def serve_store(listener: socket.socket, timeout: float) -> c10d.TCPStore:
    """A store in this process, which answers on ``listener`` and nowhere else.

    Args:
        listener: a socket that listens; it belongs to the store from here on, also when that
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
    """The store at the master's port. A port where something else listens may never answer."""
    found: list[c10d.Store] = []

    def connect() -> None:
        with suppress(RuntimeError):  # told below, with what to do
            found.append(
                c10d.TCPStore(
                    host,
                    env.master_port,
                    is_master=False,
                    timeout=timedelta(seconds=timeout),
                    wait_for_workers=False,
                )
            )

    thread = threading.Thread(target=connect, name="echelon rendezvous", daemon=True)
    thread.start()
    thread.join(timeout + _GRACE_S)
    if not found:
        holder = "torchrun's agent" if env.agent_store else "rank 0"
        raise WorldError(
            f"rank {env.rank} could not reach the store of {holder} at "
            f"{host}:{env.master_port} within {timeout:.0f} s: check that rank 0 has "
            "started, that MASTER_ADDR and MASTER_PORT are right, that nothing else listens "
            "there, and that no firewall is between the hosts"
        )
    return found[0]


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens on the interface of ``host``, or on all if it is no address of ours."""
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
    """Return when all ranks have come, and were told the same about their job.

    Args:
        backend: that this rank is going to use.
        timeout: seconds to wait for the others.
        monitor: of this rank; afterwards it sees those of its host.

    Raises:
        AuthenticationError: somebody else has written into the store of a job with a secret.
        WorldError: two processes have one rank, or ranks know of different sizes or backends; the
            same on every rank that has come.
        RankFailed: a rank has ended, as the launcher knows.
        CommTimeout: names the ranks that have not come.
    """
    monitor = RankMonitor.alone(env.rank) if monitor is None else monitor
    try:
        rendezvous = _meet(store, env, backend, timeout, monitor)
    except WorldError as error:
        store.set("refused", str(error))  # or the others would wait for this one
        raise
    monitor.share(env, rendezvous.store)
    return rendezvous


def _meet(
    store: c10d.Store, env: JobEnvironment, backend: str, timeout: float, monitor: RankMonitor
) -> Rendezvous:
    end = time.monotonic() + timeout
    fresh = secrets.nonce().hex()
    # torchrun gives ranks out itself, and may use its store again after a restart.
    if not env.agent_store and store.compare_set(f"came/{env.rank}", "", fresh) != fresh.encode():
        raise WorldError(f"RANK={env.rank} was given to two processes; each needs its own")
    mine = f"WORLD_SIZE={env.size}, backend {backend!r}"
    if env.rank == 0:
        store.set("plan", mine)

    def is_planned() -> bool:
        monitor.check(_START)
        return store.check(["plan"])

    _await(store, is_planned, end, lambda: (0,), timeout)
    plan = store.get("plan").decode(errors="replace")
    if plan != mine:
        raise WorldError(
            f"the ranks were told different things: rank 0 of {printable(plan)}; rank {env.rank} "
            f"of {mine}. WORLD_SIZE and the backend must be the same for all ranks of a job, and "
            "LOCAL_WORLD_SIZE for all ranks of a host",
        )
    keys = [f"here/{rank}" for rank in range(env.size)]
    store.set(keys[env.rank], fresh)

    def missing() -> tuple[int, ...]:
        return tuple(rank for rank, key in enumerate(keys) if not store.check([key]))

    def all_here() -> bool:
        monitor.check(_START)
        return store.check(keys)

    _await(store, all_here, end, missing, timeout)
    return _trusted(store, env, keys, end, timeout)


def _trusted(
    store: c10d.Store, env: JobEnvironment, keys: list[str], end: float, timeout: float
) -> Rendezvous:
    """From the store in which ranks met to one in which they trust what they read."""
    if isinstance(store, SealedStore):
        # With words that each rank has just made up, so that nothing can be replayed to it.
        secret = store.secret.derived(*store.multi_get(keys))
        return Rendezvous(store.rekeyed(secret), secret, is_kept=env.agent_store)
    if env.private_store:
        return Rendezvous(store, _shared_secret(store, env, end, timeout), is_kept=True)
    if env.size == 1:
        return Rendezvous(store, None, is_kept=True)
    # All that ranks of one host take from a store that anybody can write to is a path, and the
    # kernel says whose memory it leads to.
    private = None
    if env.rank == 0:
        path, private = private_store.create() if env.one_host else ("", None)
        store.set("private store", path)
    else:
        _await(store, lambda: store.check(["private store"]), end, lambda: (0,), timeout)
        path = store.get("private store").decode(errors="replace")
        if bool(path) != env.one_host:
            raise WorldError(
                f"rank 0 says that {'all' if path else 'not all'} ranks are on one host, and rank "
                f"{env.rank} that {'all' if env.one_host else 'not all'} are: LOCAL_WORLD_SIZE "
                "must be the number of ranks of the host, on all of its ranks",
            )
        private = private_store.open_existing(path) if path else None
    if private is None:
        return Rendezvous(store, None, is_kept=env.agent_store)
    secret = _shared_secret(private, env, end, timeout)
    inside = [f"inside/{rank}" for rank in range(env.size)]
    private.set(inside[env.rank], "")
    if env.rank == 0:  # one that could not open it has said so where all have met
        _await(store, lambda: private.check(inside), end, tuple, timeout)
    return Rendezvous(private, secret, is_kept=True)


def store_beside(
    theirs: c10d.Store, group: str, ranks: Sequence[int], dist_rank: int, timeout: float
) -> tuple[c10d.Store, Secret | None]:
    """A store and a secret for the ranks of a process group that the script has made itself.

    Args:
        theirs: its store.
        group: its name.
        ranks: in the default process group; this one is among them.
        dist_rank: this one.
        timeout: seconds to wait for the others.
    """
    job, given = environment(os.environ), Secret.of(os.environ)
    if job is not None and job.private_store and job.size >= len(ranks) > 1:
        private = private_store.open_existing(job.private_store)
        own = _numbered(private, f"echelon/{job.attempt}/beside/{group}", dist_rank)
        first = replace(job, rank=ranks.index(dist_rank))
        end = time.monotonic() + timeout
        return own, _shared_secret(own, first, end, timeout)
    store = _numbered(theirs, "echelon", dist_rank)
    return (store, None) if given is None else (SealedStore(store, given, group), given)


def _numbered(store: c10d.Store, name: str, rank: int) -> c10d.Store:
    """A part of ``store`` that nobody has used before, however often a group is taken over."""
    times = store.add(f"{name}/times/{rank}", 1)
    return c10d.PrefixStore(f"{name}/{times}", store)


def _shared_secret(store: c10d.Store, env: JobEnvironment, end: float, timeout: float) -> Secret:
    """The secret that rank 0 has put into a store that only this user can read."""
    if env.rank == 0:
        store.set("secret", Secret.create().to_hex())
    _await(store, lambda: store.check(["secret"]), end, lambda: (0,), timeout)
    return Secret.from_hex(store.get("secret").decode())


def check_start(
    store: c10d.Store, env: JobEnvironment, facts: Mapping[str, Any], timeout: float
) -> None:
    """Refuse ranks that were started differently. All ranks call it, after ``meet``.

    Rank 0 reads what all bring, and the others read what it found: so a large job does not send
    everything to everyone.

    Args:
        facts: of this rank.
        timeout: seconds to wait for the others.

    Raises:
        StartMismatch: on every rank, the first field that differs.
        CommTimeout: names a rank that did not come.
    """
    end = time.monotonic() + timeout
    keys = [f"facts/{rank}" for rank in range(env.size)]
    store.set(keys[env.rank], encode(facts).decode())
    if env.rank == 0:

        def missing() -> tuple[int, ...]:
            return tuple(rank for rank, key in enumerate(keys) if not store.check([key]))

        _await(store, lambda: store.check(keys), end, missing, timeout)
        store.set("difference", json.dumps(difference(store.multi_get(keys))))
    _await(store, lambda: store.check(["difference"]), end, lambda: (0,), timeout)
    if (found := json.loads(store.get("difference"))) is None:
        return
    told = [f"told/{rank}" for rank in range(env.size)]
    store.set(told[env.rank], "")
    if env.rank == 0:  # which may hold the store, and the others have yet to read it
        end = time.monotonic() + min(timeout, _GRACE_S)
        with suppress(CommTimeout):
            _await(store, lambda: store.check(told), end, tuple, timeout)
    field, values = found
    raise StartMismatch(
        printable(field), {int(rank): printable(value) for rank, value in values.items()}
    )


def _await(
    store: c10d.Store,
    ready: Callable[[], bool],
    end: float,
    missing: Callable[[], tuple[int, ...]],
    timeout: float,
) -> None:
    """Ask until ``ready``, or until the news comes that the job cannot start."""
    pause_s = 0.001
    while not ready():
        if store.check(["refused"]):
            raise WorldError(printable(store.get("refused").decode(errors="replace")))
        if time.monotonic() > end:
            raise CommTimeout(_START, missing(), timeout)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _SLICE_S)
