"""``SoftwareStack``: constants of the software that trains, which a script has fitted to runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import resources
from typing import final

from echelon.errors import ArgumentError
from echelon.planner.cluster import Cluster


class Attention(Enum):
    """How attention is computed."""

    FUSED = "fused"  # in one kernel that keeps no matrix of scores
    SOFTMAX = "fused softmax"  # two multiplications, and one kernel between them
    UNFUSED = "unfused"  # two multiplications, and one kernel for each operation between them


@final
@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a software stack makes of the rates of a device and a network.

    Attributes:
        matmul: of ``Device.matmul`` in large multiplications.
        waves: how much of the loss in a multiplication's last wave of tiles remains, as a power.
        kernel_s: seconds that a multiplication takes besides its work.
        launch_s: seconds that the host takes for one kernel, with all that Python does around it.
        memory: of ``Device.bandwidth`` in work that is bound by memory.
        attention: of ``Device.attention`` in fused attention.
        scores: of ``Device.matmul`` in the multiplications of attention that is not fused.
        score_passes: how often unfused attention reads or writes its scores in a forward.
        block_passes: how often a block's forward reads or writes a value of the residual stream.
        ffn_passes: how often it reads or writes an inner value of the feed-forward part.
        logit_bytes: bytes that are read or written for one logit in a forward.
        bus: of ``Device.bus`` in collectives inside of a host.
        latency_s: seconds of a collective inside of a host besides its bytes.
        network: of ``Cluster.network`` in collectives between hosts.
        network_latency_s: seconds of such a collective besides its bytes, for each doubling of the
            ranks.
        message: the part of a message between stages that no computation hides.
        contention: by which part of the shorter one a computation and a collective at the same time
            take longer than the longer one.
        optimizer: of ``Device.bandwidth`` in the optimizer.
        drift: by which part a step takes longer for each doubling of the hosts.
        step_s: seconds of a step besides all that.
    """

    matmul: float
    waves: float
    kernel_s: float
    launch_s: float
    memory: float
    attention: float
    scores: float
    score_passes: float
    block_passes: float
    ffn_passes: float
    logit_bytes: float
    bus: float
    latency_s: float
    network: float
    network_latency_s: float
    message: float
    contention: float
    optimizer: float
    drift: float
    step_s: float


@final
@dataclass(frozen=True, kw_only=True)
class SoftwareStack:
    """A way to train: what is fused, what overlaps, and how fast it is.

    Attributes:
        name: what it is called.
        rates: its constants.
        attention: how attention is computed.
        compiled: whether operations between multiplications are fused by a compiler.
        parameter_bytes: of one element when parameters are gathered and activations are sent.
        gradient_bytes: of one element when gradients are reduced.
        overlaps_reduction: whether gradients are reduced while the backward runs.
    """

    name: str
    rates: Rates
    attention: Attention = Attention.FUSED
    compiled: bool = False
    parameter_bytes: int = 2
    gradient_bytes: int = 2
    overlaps_reduction: bool = True

    @property
    def in_16_bits(self) -> bool:
        """Whether parameters are gathered and activations are sent in 16 bits."""
        return self.parameter_bytes == 2


@cache
def fitted_rates() -> Mapping[str, Rates]:
    """The fitted constants by the name of the stack."""
    text = resources.files("echelon.planner").joinpath("rates.json").read_text("utf-8")
    return {name: Rates(**values) for name, values in json.loads(text)["stacks"].items()}


def rates_of(name: str) -> Rates:
    """The constants of one stack.

    Raises:
        ArgumentError: there is no stack of this name.
    """
    known = fitted_rates()
    if name not in known:
        raise ArgumentError(f"stack is {name!r:.80}; give one of {', '.join(known)}")
    return known[name]


@final
@dataclass(frozen=True, kw_only=True)
class MeasuredCluster:
    """What ``step_time`` asks of the machine at hand and of the wrappers of echelon.

    Attributes:
        cluster: one host with a device for each rank.
        stack: its constants; elements have 4 bytes.
    """

    cluster: Cluster
    stack: SoftwareStack
