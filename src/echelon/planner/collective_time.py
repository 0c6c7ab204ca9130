"""How long collectives take inside of a host and between hosts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from echelon.planner.cluster import Cluster
from echelon.planner.software_stack import Rates

# Each further rank of a ring adds this part of the latency inside of a host: an all-reduce of 1 to
# 16 MiB on 2, 4 and 8 A100 takes 42, 52 and 80 us besides its bytes (VIA-Research/vTrain,
# trace/a100), 2 * 17.5 us * (1 + (n - 1) / 5).
_FURTHER_RANK = 0.2
_TREE_RATE = 0.92  # of a ring's, where a tree spans hosts (NCCL, src/graph/tuning.cc)


@final
@dataclass(frozen=True, kw_only=True)
class Ring:
    """The ranks of one axis and what connects them.

    Attributes:
        size: number of ranks.
        rate: bytes/s of the bus between them.
        latency: seconds of one pass besides the bytes.
        tree_latency: seconds of an all-reduce by a tree besides the bytes; infinite inside of a
            host.
        between_hosts: whether it leaves a host.
    """

    size: int
    rate: float
    latency: float
    tree_latency: float = math.inf
    between_hosts: bool

    def one_pass(self, nbytes: float) -> float:
        """Of an all-gather or a reduce-scatter of so many bytes in all: (n - 1) / n of them pass.

        Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
        MPICH", 2005, sections 4.1 and 4.3, of rings.
        """
        if self.size == 1:
            return 0.0
        return (self.size - 1) / self.size * nbytes / self.rate + self.latency

    def all_reduce(self, nbytes: float) -> float:
        """A reduce-scatter and an all-gather, or up and down a tree, if that is faster.

        A tree sends every byte twice, and its latency grows with the logarithm of the hosts (NCCL,
        src/graph/tuning.cc).

        Example:
            >>> Ring(size=4, rate=100e9, latency=0.0, between_hosts=False).all_reduce(1e9)
            0.015
        """
        if self.size == 1:
            return 0.0
        tree = 2 * nbytes / (_TREE_RATE * self.rate) + self.tree_latency
        return min(2 * self.one_pass(nbytes), tree)


def ring(size: int, stride: int, cluster: Cluster, rates: Rates) -> Ring:
    """The ring of an axis whose neighbours are ``stride`` ranks apart.

    Inside of a host it has the bus. Between hosts, all rings that cross at the same time share the
    network of a host: a ring with k of its ranks in a host gets k / devices of it, at most that of
    the bus. Bytes go through all ranks one after the other, so the latency of a pass grows with
    their number.
    """
    devices = cluster.devices_per_host
    bus = cluster.device.bus * rates.bus
    if size * stride <= devices:
        latency = rates.latency_s * (1 + _FURTHER_RANK * (size - 1))
        return Ring(size=size, rate=bus, latency=latency, between_hosts=False)
    in_host = max(1, min(size, devices // stride))
    hosts = size / in_host
    share = cluster.network * rates.network * in_host / devices
    inside = rates.latency_s * _FURTHER_RANK
    return Ring(
        size=size,
        rate=min(bus, share),
        latency=rates.latency_s + inside * (size - hosts) + rates.network_latency_s * (hosts - 1),
        tree_latency=2 * rates.latency_s
        + 2 * inside * (in_host - 1)
        + 2 * rates.network_latency_s * math.log2(hosts),
        between_hosts=True,
    )


@final
@dataclass(frozen=True, kw_only=True)
class Rings:
    """The rings of all axes of a layout.

    Attributes:
        tp: of tensor parallelism.
        cp: of context parallelism.
        ep: of the experts.
        shard: of what is sharded.
        dp: of the replicas.
        message: of two neighbours on ``pp``, which send each other activations and gradients.
    """

    tp: Ring
    cp: Ring
    ep: Ring
    shard: Ring
    dp: Ring
    message: Ring
