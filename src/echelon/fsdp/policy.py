"""What can be chosen: which parts of the state are sharded, how, and in which precision."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Literal, final, get_args

import torch
from torch import nn

from echelon import checks
from echelon.checks import Reduction
from echelon.errors import ArgumentError
from echelon.modules.model_agreement import Init

Layout = Literal["flat", "rows"]


class Strategy(Enum):
    """Which state is sharded; ``StrategyTraits`` says what follows from it.

    The stages are those of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models", 2020, section 5.
    """

    FULL_SHARD = "parameters, gradients and optimizer state (ZeRO-3)"
    SHARD_GRAD_OP = (
        "gradients and optimizer state; parameters between backward and forward (ZeRO-2)"
    )
    SHARD_OPTIMIZER = "optimizer state; every unit has a buffer of unsharded gradients (ZeRO-1)"
    NO_SHARD = "nothing: every rank keeps everything, as in DDP"
    HYBRID_SHARD = "as FULL_SHARD inside the group, whose shards other groups replicate"
    HYBRID_SHARD_ZERO2 = "as SHARD_GRAD_OP inside the group, whose shards other groups replicate"

    @property
    def hybrid(self) -> bool:
        """Whether several groups have the same shards."""
        return _TRAITS[self].hybrid

    @property
    def regathers(self) -> bool:
        """Whether a unit is resharded between its forward and its backward."""
        return _TRAITS[self].reshards_after_forward


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyTraits:
    """One row of the table of strategies: all that the package asks of a strategy.

    Attributes:
        shards: whether parameters are sharded; if not, all storages are replicated.
        reshards_after_forward: whether a unit is resharded between its forward and its backward.
        keeps_gradient_buffers: whether every storage has a slot for its gradients.
        hybrid: whether several groups have the same shards.
    """

    shards: bool = True
    reshards_after_forward: bool = False
    keeps_gradient_buffers: bool = False
    hybrid: bool = False


_TRAITS = {
    Strategy.FULL_SHARD: StrategyTraits(reshards_after_forward=True),
    Strategy.SHARD_GRAD_OP: StrategyTraits(),
    Strategy.SHARD_OPTIMIZER: StrategyTraits(keeps_gradient_buffers=True),
    Strategy.NO_SHARD: StrategyTraits(shards=False),
    Strategy.HYBRID_SHARD: StrategyTraits(reshards_after_forward=True, hybrid=True),
    Strategy.HYBRID_SHARD_ZERO2: StrategyTraits(hybrid=True),
}


class Offload(Enum):
    """What lies in the memory of the host instead of the device.

    Where the group is on the CPU the two are one, and every choice means the first.

    Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021, section 4.
    """

    NONE = "nothing"
    OPTIMIZER = "shards, gradients and optimizer state; the device has shards in the compute dtype"
    ALL = "the same, and the device keeps nothing of a unit that is sharded"


class BackwardPrefetch(Enum):
    """When the next unit of backward is unsharded. Where ranks share memory that is free.

    The names are those of Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
    Parallel", 2023, section 3.3.2.
    """

    PRE = "before the gradients of the unit before it: most overlap, one unit more is unsharded"
    POST = "after them"
    NONE = "when backward reaches it"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPrecision:
    """The dtypes of one training step. ``.grad`` and optimizer states have that of the shards.

    Attributes:
        compute: the dtype of floating-point parameters in forward and backward, and in all-gathers
            (FSDP2's ``param_dtype``); None: that of the parameter.
        reduce: the dtype in which gradients are reduced over ranks, and accumulated over backwards
            (FSDP2's ``reduce_dtype``); None: that of the shard.
        master: the dtype of the shards of floating-point parameters, which the optimizer updates,
            and of the state dict; None: that of the parameter. It is not narrower than ``compute``.
        buffers: the dtype of floating-point buffers; None: their own.
        keep: module classes whose parameters compute in their own dtype, such as norms.
        keep_low_precision_grads: leave ``.grad`` in the dtype of the reduction, for an optimizer
            that casts it itself; the optimizers of torch require the dtype of the parameter.
        cast_forward_inputs: whether floating-point inputs of the model are cast to ``compute``.
            False: they arrive as they are, and the model casts them itself.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None
    buffers: torch.dtype | None = None
    keep: tuple[type[nn.Module], ...] = ()
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "master", "buffers"):
            checks.floating(f"MixedPrecision {name}", getattr(self, name))
        checks.flag("MixedPrecision keep_low_precision_grads", self.keep_low_precision_grads)
        checks.flag("MixedPrecision cast_forward_inputs", self.cast_forward_inputs)
        compute, master = self.compute, self.master
        if compute is not None and master is not None and master.itemsize < compute.itemsize:
            raise ArgumentError(
                f"MixedPrecision master {master} is narrower than compute {compute}: the optimizer "
                "would lose bits that the model uses"
            )
        known = isinstance(self.keep, tuple)
        if not known or not all(
            isinstance(c, type) and issubclass(c, nn.Module) for c in self.keep
        ):
            raise ArgumentError(
                f"MixedPrecision keep is {self.keep!r:.80}; give a tuple of module classes, "
                "such as (nn.LayerNorm,)"
            )
        if self.keep and compute is None:
            raise ArgumentError(
                f"MixedPrecision keep is {self.keep!r:.80} without compute: all modules compute in "
                "their own dtype already. Give compute=torch.bfloat16, or leave keep out"
            )
        if self.keep_low_precision_grads and self.reduce is None:
            raise ArgumentError(
                "MixedPrecision keep_low_precision_grads is True without reduce: gradients are "
                "reduced in the dtype of the shard already. Give reduce=torch.bfloat16, or leave "
                "it out"
            )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPOptions:
    """The options of ``FSDP``; the same on all ranks of its group.

    Law: the constructor of ``FSDP`` has an argument of the same name, type and default for each.

    Attributes:
        strategy: what is sharded.
        layout: how a unit is sharded: by element, or every parameter by rows of dim 0.
        precision: dtypes of a step.
        min_num_params: a unit with fewer parameters is replicated.
        init: how parameters become equal at the start.
        reduction: ``"mean"``, ``"sum"``, or the number that a sum is divided by.
        backward_prefetch: when the next unit of backward is unsharded, one at a time.
        forward_prefetch: how many units of forward are unsharded before they are needed.
        limit_all_gathers: at most two units of forward are unsharded before they are needed.
        use_orig_params: whether optimizers see the parameters of the model, or flat ones.
        offload: what lies in the memory of the host.
        check_replicas: after how many reductions ranks compare what they replicate; 0: never.
    """

    strategy: Strategy = Strategy.FULL_SHARD
    layout: Layout = "flat"
    precision: MixedPrecision = MixedPrecision()
    min_num_params: int = 1000
    init: Init = "broadcast"
    reduction: Reduction = "mean"
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.PRE
    forward_prefetch: int = 1
    limit_all_gathers: bool = True
    use_orig_params: bool = True
    offload: Offload = Offload.NONE
    check_replicas: int = 64

    def __post_init__(self) -> None:
        checks.one_of("strategy", self.strategy, tuple(Strategy))
        checks.one_of("layout", self.layout, get_args(Layout))
        checks.one_of("init", self.init, get_args(Init))
        checks.instance("precision", self.precision, MixedPrecision)
        checks.integer("min_num_params", self.min_num_params)
        checks.one_of("backward_prefetch", self.backward_prefetch, tuple(BackwardPrefetch))
        checks.integer("forward_prefetch", self.forward_prefetch)
        checks.integer("check_replicas", self.check_replicas)
        checks.flag("limit_all_gathers", self.limit_all_gathers)
        checks.flag("use_orig_params", self.use_orig_params)
        checks.reduction(self.reduction)
        checks.one_of("offload", self.offload, tuple(Offload))
        if not self.traits.shards and self.offload is Offload.ALL:
            raise ArgumentError(
                f"{self.strategy} keeps all parameters whole on the device, and {self.offload} "
                "keeps none there between uses: use Offload.OPTIMIZER, or another strategy"
            )
        self._refuse_what_does_nothing()

    def _refuse_what_does_nothing(self) -> None:
        """Refuse an option that the strategy leaves nothing to decide, unless it is off."""
        default = {field.name: field.default for field in fields(self)}
        inert: dict[str, tuple[object, ...]] = {}  # by name, the values that ask for nothing
        reason = "parameters stay unsharded between forward and backward"
        if not self.traits.reshards_after_forward:
            inert["backward_prefetch"] = (BackwardPrefetch.NONE,)
        if not self.traits.shards:
            reason = "nothing is sharded"
            inert |= {"layout": (), "min_num_params": (0,), "forward_prefetch": ()}
        for name, off in inert.items():
            value = getattr(self, name)
            if value != default[name] and value not in off:
                raise ArgumentError(
                    f"{name} is {value!r} with {self.strategy}, which leaves it nothing to decide, "
                    f"because {reason}: leave {name} out, or use another strategy"
                )

    @property
    def traits(self) -> StrategyTraits:
        """What follows from the strategy."""
        return _TRAITS[self.strategy]

    def divisor(self) -> float:
        """The user's divisor of the sums of gradients; 1 if the collective takes their mean."""
        return 1.0 if self.reduction in ("mean", "sum") else float(self.reduction)

    @property
    def op(self) -> str:
        """The operation of the reduction over the ranks."""
        return "mean" if self.reduction == "mean" else "sum"
