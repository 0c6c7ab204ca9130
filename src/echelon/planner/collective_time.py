"""How long collectives take inside of a host and between hosts, and where each axis lies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from echelon.planner.cluster import Cluster
from echelon.planner.layout import Layout
from echelon.planner.software_stack import Rates


@final
@dataclass(frozen=True, kw_only=True)
class Ring:
    """The ranks of one axis and what connects them.

    Attributes:
        size: number of ranks.
        rate: bytes/s of the bus between them.
        latency: seconds of one pass besides the bytes.
        between_hosts: whether it leaves a host.
    """

    size: int
    rate: float
    latency: float
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
        """A reduce-scatter and an all-gather.

        Example:
            >>> Ring(size=4, rate=100e9, latency=0.0, between_hosts=False).all_reduce(1e9)
            0.015
        """
        return 2 * self.one_pass(nbytes)


def ring(size: int, stride: int, cluster: Cluster, rates: Rates) -> Ring:
    """The ring of an axis whose neighbours are ``stride`` ranks apart.

    Inside of a host it has the bus. Between hosts, all rings that cross at the same time share the
    network of a host: a ring with k of its ranks in a host gets k / devices of it, at most that of
    the bus.
    """
    devices = cluster.devices_per_host
    bus = cluster.device.bus * rates.bus
    if size * stride <= devices:
        return Ring(size=size, rate=bus, latency=rates.latency_s, between_hosts=False)
    in_host = max(1, min(size, devices // stride))
    share = cluster.network * rates.network * in_host / devices
    latency = rates.network_latency_s * math.log2(size)
    return Ring(size=size, rate=min(bus, share), latency=latency, between_hosts=True)


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


def rings_of(layout: Layout, cluster: Cluster, rates: Rates) -> Rings:
    """Where the axes lie: ``tp`` fastest, then ``cp``, ``shard``, ``dp``, and ``pp`` slowest."""
    strides = {}
    stride = 1
    for axis in ("tp", "cp", "shard", "dp", "pp"):
        strides[axis] = stride
        stride *= getattr(layout, axis)
    return Rings(
        tp=ring(layout.tp, strides["tp"], cluster, rates),
        cp=ring(layout.cp, strides["cp"], cluster, rates),
        ep=ring(layout.ep, strides["shard"], cluster, rates),
        shard=ring(layout.shard, strides["shard"], cluster, rates),
        dp=ring(layout.dp, strides["dp"], cluster, rates),
        message=ring(min(2, layout.pp), strides["pp"], cluster, rates),
    )
