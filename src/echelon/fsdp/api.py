"""``FSDP``: a module of which each rank keeps its part only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from echelon.agreement import check_agreement, check_model, option_facts
from echelon.arguments import Reduction
from echelon.errors import ArgumentError, StateError
from echelon.fsdp.build import build_units, ignored_parameters
from echelon.fsdp.cuts import ShardInfo
from echelon.fsdp.facts import MemoryStats, UnitInfo
from echelon.fsdp.grads import norm_over_shards
from echelon.fsdp.hooks import Hooks
from echelon.fsdp.policy import Init, Layout, MixedPrecision, Options, Strategy
from echelon.fsdp.prefetch import BackwardPrefetch
from echelon.fsdp.ranks import Ranks
from echelon.fsdp.state import copy_parameters, load_state, whole_state
from echelon.fsdp.storage import Storage
from echelon.fsdp.units import Rule, whole
from echelon.nested import cast_floats
from echelon.world.group import Group
from echelon.wrapper import Wrapper

__all__ = ["FSDP"]


class FSDP(Wrapper):
    """Shards parameters, gradients and optimizer state of ``module`` over the ranks of ``group``.

    Law: after k steps the weights are those of one process on all batches together.

    A *unit* is gathered before its forward, released after it, gathered again for its backward, and
    its gradients are reduced while backward goes on. Parameter objects keep their identity: outside
    of a unit's forward and backward, ``.data`` is this rank's part and ``.grad`` the reduced
    gradient of it. So an optimizer over ``parameters()`` steps the part of this rank, and may be
    made before or after wrapping. Units, in the sense of Zhao et al., "PyTorch FSDP: Experiences on
    Scaling Fully Sharded Data Parallel", 2023, section 3.

    Where ranks share memory, the whole parameters of a unit are one piece of memory for all of them
    and the parts are views of it: an optimizer step is a gather, and nothing is copied.

    Args:
        module: the same on all ranks.
        group: the ranks that share it.
        units: which modules are units: ``ec.units.by_size``, ``by_type``, ``by_function``,
            ``whole``.
        strategy: what is sharded.
        layout: ``"flat"`` cuts a unit by element, ``"rows"`` every parameter by rows of dim 0.
        precision: dtypes of a step.
        min_num_params: a unit with fewer parameters is kept whole on every rank, and its gradients
            are averaged as in DDP.
        ignored: modules or parameters that stay whole and local; nobody reduces their gradients.
        init: ``"broadcast"`` rank 0's parameters and buffers, ``"verify"`` that all are equal, or
            ``"trust"`` that they are. Names, shapes and dtypes are compared always.
        reduction: ``"mean"``, ``"sum"``, or a number that the sum is divided by.
        replicate: for ``HYBRID_SHARD``: the ranks that hold the same parts as this one, each in a
            group of its own; another axis of the mesh that ``group`` is an axis of.
        backward_prefetch: when the next unit of backward is gathered, in the order of the last
            step. This and the next two matter where memory is not shared: elsewhere nothing moves.
        forward_prefetch: how many units of forward are gathered before they are needed.
        limit_all_gathers: at most two units are gathered before they are needed, whatever
            ``forward_prefetch`` is.

    Raises:
        ArgumentError: an option, the group or the module cannot be used; nothing was done.
        ModelMismatch: the modules or options differ between ranks; names what, and who has what.

    Example:
        >>> def main(world):
        ...     torch.manual_seed(0)
        ...     model = FSDP(nn.Linear(4, 2), world.group, min_num_params=0)
        ...     model(torch.full((1, 4), float(world.rank))).sum().backward()
        ...     return model.weight.grad.tolist()
        >>> from echelon.world.run import run
        >>> run(main, ranks=2)
        [[0.5, 0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        units: Rule | None = None,
        strategy: Strategy = Strategy.FULL_SHARD,
        layout: Layout = "flat",
        precision: MixedPrecision | None = None,
        min_num_params: int = 1000,
        ignored: Sequence[nn.Module | nn.Parameter] = (),
        init: Init = "broadcast",
        reduction: Reduction = "mean",
        replicate: Group | None = None,
        backward_prefetch: BackwardPrefetch = BackwardPrefetch.PRE,
        forward_prefetch: int = 0,
        limit_all_gathers: bool = True,
    ) -> None:
        super().__init__()
        options = Options(
            strategy=strategy,
            layout=layout,
            precision=MixedPrecision() if precision is None else precision,
            min_num_params=min_num_params,
            init=init,
            reduction=reduction,
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
        )
        _check_arguments(module, group, strategy, replicate)
        ranks = Ranks(group, replicate)
        check_model(module, group.device)
        skip = ignored_parameters(module, ignored)
        rule = whole() if units is None else units
        facts = {**option_facts(options), "units": repr(rule), "ignored": str(len(skip))}
        for one in ranks.groups:
            check_agreement(module, facts, one, values=init == "verify")
        if init == "broadcast":
            _broadcast(module, ranks)
        self.module = module
        self.training = module.training
        self._ranks = ranks
        self._group = group
        self._options = options
        built = build_units(module, group, rule, options, skip)
        self._units, self._slots = built
        self._hooks = Hooks(self._units, ranks, options)
        module._echelon_fsdp = True  # type: ignore[assignment]

    # Training --------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Call it on all ranks."""
        precision = self._options.precision
        if precision.compute is not None:
            args, kwargs = cast_floats((args, kwargs), lambda t: t.to(precision.compute))
        with self._hooks.forward():
            output = self.module(*args, **kwargs)
        if not self._hooks.depth:
            self._hooks.after_forward(0, output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the whole gradients of a ``backward`` inside the block, without communication.

        The next backward outside reduces the sum of all.
        """
        before, self._hooks.syncing = self._hooks.syncing, False
        try:
            yield
        finally:
            self._hooks.syncing = before

    def sync_gradients(self) -> None:
        """Reduce the gradients that ``no_sync`` kept. All ranks call it.

        Raises:
            StateError: inside ``no_sync`` or backward, or there are none.
        """
        self._hooks.reduce_now()

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of the whole model; a plain scalar tensor, equal on all ranks.

        All ranks call it. ``ec.clip_grad_norm_`` does.
        """
        return norm_over_shards(self._storages(), self._group, norm_type)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name == "module" or hasattr(nn.Module, name):
            return value
        if getattr(value, "__self__", None) is not self.module:
            return value

        @wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            if not self._units[0].gathered:
                raise StateError(
                    f"{name}() of a sharded model needs whole parameters: call it inside "
                    "`with model.full_parameters():`, which all ranks enter"
                )
            return value(*args, **kwargs)

        return method

    # Parameters ------------------------------------------------------------------------------

    @contextmanager
    def full_parameters(self, *, writeback: bool = False) -> Iterator[None]:
        """Make all parameters whole inside the block. All ranks enter it.

        Args:
            writeback: keep what the block wrote; each rank keeps its own part.

        Raises:
            StateError: inside a forward or a backward.
        """
        if self._hooks.busy:
            raise StateError(
                "full_parameters() inside a forward, a backward or another full_parameters(): "
                "call it outside"
            )
        self._hooks.prepare()
        for unit in self._units:
            unit.gather()
        self._hooks.pinned = True
        try:
            yield
            if writeback:
                with torch.no_grad():
                    for storage in self._storages():
                        storage.keep()
        finally:
            self._hooks.pinned = False
            for unit in self._units:
                unit.release()
            self._ranks.meet("whole parameters are released")

    def update_shards(self, flat: Tensor) -> None:
        """Write this rank's parts from one tensor, in the order of ``parameters()``, in place.

        Raises:
            ArgumentError: ``flat`` has another number of elements than the parts.
        """
        parts = [param.data for param in self.parameters()]
        numel = sum(part.numel() for part in parts)
        if flat.numel() != numel:
            raise ArgumentError(f"update_shards: expected {numel} elements but got {flat.numel()}")
        with torch.no_grad():
            for part, value in zip(
                parts, flat.reshape(-1).split([part.numel() for part in parts]), strict=True
            ):
                part.copy_(value.view(part.shape))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The whole state, with the plain module's keys and shapes, as copies. All ranks call it.

        One unit is gathered at a time.
        """
        self._hooks.prepare()
        copies = copy_parameters(self._units)
        self._ranks.meet("the state was copied")
        return whole_state(self.module, copies, args, kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a whole state; every rank takes its parts, in place. Nothing is communicated.

        Raises:
            ArgumentError: keys (if ``strict``), shapes or ``assign`` do not fit; nothing was
                loaded.
        """
        if assign:
            raise ArgumentError(
                "load_state_dict(assign=True) would replace the parameters that FSDP shards: "
                "use assign=False"
            )
        return load_state(self.module, self._storages(), state_dict, strict=strict)

    # What is where ---------------------------------------------------------------------------

    @property
    def group(self) -> Group:
        """The ranks that share the model."""
        return self._group

    @property
    def units(self) -> tuple[UnitInfo, ...]:
        """The units, the root first."""
        return tuple(
            UnitInfo(
                unit.name,
                tuple(member.name for one in unit.storages for member in one.members),
                sum(one.cut.numel for one in unit.storages),
                any(one.sharded for one in unit.storages),
                unit.gathered,
            )
            for unit in self._units
        )

    def shard_info(self, name: str) -> list[ShardInfo]:
        """Which part of a parameter every rank owns, in rank order.

        Raises:
            ArgumentError: no unit has a parameter of that name.
        """
        for storage in self._storages():
            for i, member in enumerate(storage.members):
                if member.name == name:
                    if storage.sharded:
                        return storage.cut.info(i)
                    shape, numel = storage.cut.shapes[i], storage.own[i].numel
                    return [ShardInfo(r, 0, numel, shape) for r in range(self._group.size)]
        raise ArgumentError(f"Parameter {name!r} is in no unit of this model")

    def num_parameters(self) -> int:
        """Elements of all parameters of the model, the same on every rank."""
        whole_ones = sum(storage.cut.numel for storage in self._storages())
        ids = {id(param) for storage in self._storages() for param in storage.params}
        return whole_ones + sum(p.numel() for p in self.module.parameters() if id(p) not in ids)

    def local_sharding_ratio(self) -> float:
        """The fraction of the model's parameters that this rank keeps."""
        kept = sum(p.numel() for p in self.module.parameters())
        total = self.num_parameters()
        return kept / total if total else 1.0

    def memory_stats(self) -> MemoryStats:
        """Bytes by category, and counts."""
        storages = self._storages()
        shards = sum(storage.nbytes for storage in storages)
        everything = sum(storage.cut.numel * storage.dtype.itemsize for storage in storages)
        gradients = sum(shard.nbytes for unit in self._units for shard in unit.shards)
        trainable = sum(
            shard.storage.cut.numel * shard.storage.dtype.itemsize
            for unit in self._units
            for shard in unit.shards
        )
        return MemoryStats(
            shards=shards,
            gathered=sum(storage.whole_nbytes for storage in storages),
            gradients=gradients,
            slots=sum(slots.nbytes for slots in self._slots),
            saved=everything - shards + trainable - gradients,
            num_all_gathers=sum(unit.num_gathers for unit in self._units),
            num_reduce_scatters=self._hooks.num_reductions,
        )

    def _storages(self) -> list[Storage]:
        return [storage for unit in self._units for storage in unit.storages]


def _broadcast(module: nn.Module, ranks: Ranks) -> None:
    """Give the first rank's parameters and buffers to all, one at a time."""
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            ranks.broadcast(tensor.data, f"initial {name}")


def _check_arguments(
    module: nn.Module, group: Group, strategy: Strategy, replicate: Group | None
) -> None:
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"module is {module!r}; give a torch.nn.Module")
    if not isinstance(group, Group):
        raise ArgumentError(f"group is {group!r}; give a Group, such as world.group")
    if strategy.hybrid != isinstance(replicate, Group):
        raise ArgumentError(
            f"replicate is {replicate!r:.80} with {strategy}: a hybrid strategy, and no other, "
            "needs a group of replicas. Make mesh = world.mesh(replicate=-1, shard=8); give "
            "mesh['shard'] as the group, and replicate=mesh['replicate']"
        )
    if replicate is not None and len({*group.ranks} & {*replicate.ranks}) != 1:
        raise ArgumentError(
            f"group has ranks {list(group.ranks)} and replicate {list(replicate.ranks)}, which "
            "share more than this rank, or not even that: give two axes of one mesh"
        )
    for submodule in module.modules():
        if isinstance(submodule, Wrapper) or getattr(submodule, "_echelon_fsdp", False):
            raise ArgumentError(
                f"{type(submodule).__name__} is wrapped already: wrap the plain module once, and "
                "say with units=... what is gathered together"
            )
