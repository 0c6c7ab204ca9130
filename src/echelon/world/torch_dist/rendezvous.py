"""The store in which the ranks of a job find one another."""

from __future__ import annotations

import errno
import socket
import time
from contextlib import suppress
from datetime import timedelta

from torch._C import _distributed_c10d as c10d
from torch.distributed import DistStoreError

from echelon.errors import CommTimeout, WorldError
from echelon.world.environment import JobEnvironment

__all__ = ["missing_ranks", "open_store", "report_here"]

_LOOPBACK = "127.0.0.1"


def open_store(env: JobEnvironment, timeout: float) -> c10d.Store:
    """The store of a job: the one that torchrun's agent holds, or else one that rank 0 holds.

    A store has no authentication. If all ranks are on one host, rank 0's listens on the
    loopback interface only, otherwise on the interface of ``env.master_addr``.

    Args:
        timeout: seconds to wait for rank 0 to open it.

    Raises:
        WorldError: the port is in use, or the store cannot be reached in time.
    """
    host = _LOOPBACK if env.one_host and not env.agent_store else env.master_addr
    limit = timedelta(seconds=timeout)
    if env.rank == 0 and not env.agent_store:
        listener = _listen(host, env.master_port)
        # The store owns the socket from here on, also when it fails to start.
        store = c10d.TCPStore(
            host,
            env.master_port,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
    else:
        try:
            store = c10d.TCPStore(
                host, env.master_port, is_master=False, timeout=limit, wait_for_workers=False
            )
        except RuntimeError as error:
            holder = "torchrun's agent" if env.agent_store else "rank 0"
            raise WorldError(
                f"rank {env.rank} could not reach the store of {holder} at "
                f"{host}:{env.master_port} within {timeout:.0f} s: check that rank 0 has "
                "started, that MASTER_ADDR and MASTER_PORT are right, and that no firewall is "
                "between the hosts"
            ) from error
    return c10d.PrefixStore(f"echelon/{env.attempt}", store)


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


def report_here(store: c10d.Store, rank: int) -> None:
    """Tell the others that this rank has started."""
    store.set(f"here/{rank}", "")


def missing_ranks(store: c10d.Store, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Those of ``ranks`` that have not started."""
    return tuple(rank for rank in ranks if not store.check([f"here/{rank}"]))


def await_all(store: c10d.Store, ranks: tuple[int, ...], timeout: float) -> None:
    """Return when all ranks have started.

    Raises:
        CommTimeout: names those that have not.
    """
    end = time.monotonic() + timeout
    with suppress(DistStoreError):
        store.wait([f"here/{rank}" for rank in ranks], timedelta(seconds=timeout))
        return
    raise CommTimeout(
        "the start of the world",
        missing_ranks(store, ranks) or ranks,
        timeout - max(0.0, end - time.monotonic()),
    )
