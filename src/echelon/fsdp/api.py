"""``FSDP``: a wrapper of which each rank keeps a shard of the module's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce, wraps
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from echelon import checks
from echelon.checks import Reduction
from echelon.comm.compiler_bypass import bypass_compiler
from echelon.comm.group import Group
from echelon.comm.streams import device_of
from echelon.errors import ArgumentError, StateError, UnsupportedError
from echelon.fsdp.build import InitialValues, build_units, check_batch_norms
from echelon.fsdp.evaluation_rounds import EvaluationRounds
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.policy import (
    BackwardPrefetch,
    FSDPOptions,
    Layout,
    MixedPrecision,
    Offload,
    Strategy,
)
from echelon.fsdp.sharded_module import ShardedModule
from echelon.fsdp.units import Rule, plan_units, whole
from echelon.modules.autograd import in_backward, in_other_differentiation
from echelon.modules.compiled import captures_graphs
from echelon.modules.memory_overlap import check_memory_of
from echelon.modules.model_agreement import Init, check_agreement, check_model, option_facts
from echelon.modules.nested import cast_floats, tensors
from echelon.modules.norms import check_order, norm_over_shards
from echelon.modules.parameters import check_not_wrapped, ignored_parameters
from echelon.modules.sharded_tensor import local_shard
from echelon.page import html_of


@bypass_compiler
class FSDP(ShardedModule):
    """Shards parameters, gradients and optimizer state of ``module`` over the ranks of ``group``.

    Law: after k steps the weights are those of one process on all batches together.

    A *unit* is unsharded before its forward, resharded after it, unsharded again for its backward,
    and its gradients are reduced while backward goes on. Parameter objects keep their identity:
    outside of a unit's forward and backward, ``.data`` is this rank's shard and ``.grad`` the
    reduced gradient of it. So an optimizer over ``parameters()`` steps the shard of this rank, and
    may be made before or after wrapping. Units are those of Zhao et al., "PyTorch FSDP: Experiences
    on Scaling Fully Sharded Data Parallel", 2023, section 3.

    Where ranks share memory, the unsharded parameters of a unit are one shared buffer, and the
    shards are views of it: an optimizer step writes that buffer, and nothing is copied.

    ``copy.deepcopy``, which all ranks call, gives an FSDP on the same group, in memory of its own.

    Args:
        module: the same on all ranks.
        group: the ranks that share it.
        units: which modules are units: ``ec.units.by_size``, ``by_type``, ``by_function``,
            ``whole``.
        strategy: what is sharded.
        layout: ``"flat"`` shards a unit by element, ``"rows"`` every parameter by rows of dim 0.
        precision: dtypes of a step.
        min_num_params: a unit with fewer parameters is replicated on every rank, and its gradients
            are averaged as in DDP.
        ignored: modules or parameters that stay unsharded; their gradients are not reduced.
        init: ``"broadcast"`` rank 0's parameters and buffers, ``"verify"`` that all are equal, or
            ``"trust"`` that they are. Names, shapes and dtypes are compared always. To broadcast,
            only rank 0 needs values: the others may have the model on the meta device.
        reduction: ``"mean"``, ``"sum"``, or a number that the sum is divided by.
        replicate: for ``HYBRID_SHARD``: the ranks with the same shards as this one, each in a
            group of its own; another axis of the mesh that ``group`` is an axis of.
        backward_prefetch: when the next unit of backward is unsharded, in the order of the last
            step. This and the next two matter where memory is not shared: elsewhere nothing moves.
        forward_prefetch: how many units of forward are unsharded before they are needed, while the
            ones before compute. 0: none, which hides no unshard and takes the memory of one unit
            less in an evaluation; a backward with ``PRE`` takes as much as 1.
        limit_all_gathers: at most two units of forward are unsharded before they are needed,
            whatever ``forward_prefetch`` is.
        use_orig_params: whether ``parameters()`` gives the parameters of the model. False: one
            flat parameter, 1D, for each unit and combination of dtypes and ``requires_grad``, named
            ``blocks.0.flat_0``, in the root ``flat_0``; it is this rank's shard. Fewer tensors for
            the optimizer, which must then be made after wrapping. States keep the plain names.
        offload: what lies in the memory of the host and not of the device. On the CPU the two are
            one, and nothing changes.
        check_replicas: after how many reductions the ranks compare the parameters and shards that
            several of them keep equal: units below ``min_num_params``, shards of hybrid strategies,
            all with ``NO_SHARD``. At first they do so more often. 0: never. Ranks that differ raise
            a ModelMismatch.
        materialize: called with each module that has parameters or buffers of its own which are on
            meta on all ranks, when they have memory; it writes their values and does not
            communicate. None: the module's ``reset_parameters()``. Either is seeded, so that
            ``torch.manual_seed`` on rank 0 gives the same values on any number of ranks.

    Raises:
        ArgumentError: an option, the group or the module cannot be used; nothing was done.
        ModelMismatch: the modules or options differ between ranks, or a value is needed of a rank
            that has it on meta; names what, and who has what.
        StateError: a parameter on meta cannot be given memory in place.
        UnsupportedError: ``use_orig_params=False`` with ``layout="rows"`` where ranks share memory.

    Example:
        >>> import torch
        >>> def main(world):
        ...     torch.manual_seed(0)
        ...     model = FSDP(nn.Linear(4, 2), world.group, min_num_params=0)
        ...     model(torch.full((1, 4), float(world.rank))).sum().backward()
        ...     return local_shard(model.weight.grad).tolist()
        >>> from echelon.launch.run import run
        >>> run(main, ranks=2)
        [[0.5, 0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
    """

    _repr_html_ = html_of
    _rounds: EvaluationRounds | None = None  # of the ``join`` that is entered

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
        forward_prefetch: int = 1,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        offload: Offload = Offload.NONE,
        check_replicas: int = 64,
        materialize: Callable[[nn.Module], None] | None = None,
    ) -> None:
        super().__init__()
        options = FSDPOptions(
            strategy=strategy,
            layout=layout,
            precision=MixedPrecision() if precision is None else precision,
            min_num_params=min_num_params,
            init=init,
            reduction=reduction,
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            offload=offload,
            check_replicas=check_replicas,
        )
        _check_arguments(module, group, strategy, replicate)
        _check_flat(options, group)
        _check_queues(group)
        _check_graphs(module, group, options)
        checks.function("materialize", materialize, "a module", or_none=True)
        groups = HybridGroups.of(group, replicate)
        skipped = ignored_parameters(module, ignored)
        size = prod(axis.size for axis in groups.groups)
        check_model(module, group.device, size=size, ignored=skipped, meta=True)
        check_memory_of(module, skipped, "FSDP")
        check_batch_norms(module, options.precision, skipped)
        rule = whole() if units is None else units
        plans = plan_units(module, rule, skipped)
        choices = {**option_facts(options), "units": repr(rule), "ignored": str(len(skipped))}
        choices["materialize"] = "none" if materialize is None else "given"
        facts = {"unit": {plan.name or "root": plan.text for plan in plans}}
        on_meta = check_agreement(module, choices, groups, values=init == "verify", more=facts)
        if not group.shares_memory or offload is Offload.ALL:
            groups = groups.separated()
        values = InitialValues(module, groups, init, on_meta, materialize)
        built = build_units(module, groups, plans, options, values)
        self._attach(module, groups, options, built)

    # Training --------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Call it on all ranks.

        Raises:
            StateError: it used a parameter of a unit that is sharded; names both.
            UnsupportedError: inside of ``torch.func``, of forward-mode differentiation, or of the
                capture of a CUDA graph.
        """
        _check_transforms((args, kwargs))
        _check_capture(self._group)
        if self._compiled_call_impl is not None:
            _check_graphs(self, self._group, self._options)
        precision = self._options.precision
        if precision.compute is not None and precision.cast_forward_inputs:
            args, kwargs = cast_floats((args, kwargs), lambda t: t.to(precision.compute))
        if not self._hooks.depth:
            if self._rounds is not None:
                self._rounds.announce_forward()
            is_nested = in_backward()
            if not is_nested:
                self._hooks.backward.discard_aborted()
            if not self._options.use_orig_params:
                for storage in self._storages():
                    storage.follow_flat_parameter()
            with DisableTorchFunctionSubclass():
                self._parameter_guard.check()
            if not is_nested:
                self._take_replaced()
        return self._hooks.forward(self.module, args, kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the unsharded gradients of a ``backward`` inside the block, without communication.

        The next backward outside reduces the sum of all. Until then ``.grad`` has no values:
        ``zero_grad()`` drops what was kept, and a use of the values is a StateError.
        """
        backward = self._hooks.backward
        before, backward.requires_gradient_sync = backward.requires_gradient_sync, False
        try:
            yield
        finally:
            backward.requires_gradient_sync = before

    def sync_gradients(self, *, may_be_none: bool = False) -> None:
        """Reduce the gradients that ``no_sync`` kept. All ranks call it.

        Args:
            may_be_none: whether it is right that this rank has none, such as of a stage that no
                microbatch has trained: it takes part with zeros.

        Raises:
            StateError: inside ``no_sync`` or backward, or there are none and ``may_be_none`` is
                False.
        """
        self._hooks.backward.reduce_now(may_be_none=may_be_none)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks evaluate different numbers of batches: put their forwards inside.

        A rank that leaves the block early takes part in the others' unshards, until all have left.
        All ranks enter it, under ``torch.no_grad()``, around one batch or around all of them.

        Raises:
            StateError: on all ranks, if a forward makes a graph; ``join`` inside ``join``, a
                forward, a backward or ``full_parameters()``.
        """
        if self._rounds is not None:
            raise StateError("join() inside join(): one block goes around the forwards")
        self._check_idle("join()", "call it outside")
        rounds = self._rounds = EvaluationRounds(self._groups)
        try:
            yield
            with torch.no_grad():
                rounds.shadow(lambda: self._hooks.forward(lambda: None, (), {}))
        finally:
            self._rounds = None

    # For schedules that run a model many times before an optimizer step ----------------------

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the parameters when they are unsharded."""
        sharded = [storage for storage in self._storages() if storage.sharded]
        return sum(storage.layout.numel * storage.compute_dtype.itemsize for storage in sharded)

    def gather_parameters(self) -> None:
        """Begin to unshard all units; forwards and backwards leave them so. All ranks call it.

        Outside of forwards and backwards, parameters are the shards of this rank nevertheless.

        Raises:
            StateError: inside a forward or a backward.
        """
        if self._hooks.busy:
            raise StateError("gather_parameters() inside a forward or a backward: call it outside")
        self._take_replaced()
        self._hooks.unsharder.unshard_all()

    def release_parameters(self) -> None:
        """Give the memory of unsharded parameters back. Does not communicate."""
        self._hooks.unsharder.reshard_all()

    def await_readers(self) -> None:
        """Return when no rank reads the shards of this one, so that they may be written.

        All ranks call it, after parameters were resharded and nothing was reduced.
        """
        self._hooks.unsharder.wait_for_readers("parameters are resharded")

    def accumulate_gradient(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Add an unsharded gradient to those that ``no_sync`` keeps until ``sync_gradients``.

        Args:
            param: one of this model that needs a gradient.
            gradient: in the shape of the unsharded parameter.
        """
        self._hooks.reducer.add(param, gradient)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients of the model; a plain scalar tensor, equal on all ranks.

        All ranks call it. ``ec.clip_grad_norm_`` does.
        """
        storages = self._storages()
        sharded, replicated = (
            [
                gradient
                for storage in storages
                for param in storage.optimizer_params
                if storage.sharded is is_sharded
                if param.grad is not None and (gradient := local_shard(param.grad)).numel()
            ]
            for is_sharded in (True, False)
        )
        norm = norm_over_shards(sharded, replicated, check_order(norm_type), self._group)
        dtypes = [storage.dtype.to_real() for storage in storages]
        return norm.to(reduce(torch.promote_types, dtypes)) if dtypes else norm

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name == "module" or hasattr(nn.Module, name):
            return value
        if getattr(value, "__self__", None) is not self.module:
            return value

        @wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            if not self._units[0].is_unsharded:
                raise StateError(
                    f"{name}() of a sharded model needs whole parameters: call it inside "
                    "`with model.full_parameters():`, which all ranks enter"
                )
            return value(*args, **kwargs)

        return method


def _check_transforms(inputs: Any) -> None:
    if in_other_differentiation(tensors(inputs)):
        raise UnsupportedError(
            "an FSDP inside of torch.func (grad, jvp, vmap, ...) or of forward-mode "
            "differentiation: its gathers and reductions take no part in such derivatives. Take "
            "them of the plain model, or of a model in ec.DDP, where they are of this rank's batch"
        )


def _check_capture(group: Group) -> None:
    if device_of(group.device).is_capturing():
        raise UnsupportedError(
            "an FSDP while a CUDA graph is captured: a graph keeps the addresses of what it was "
            "captured with, and the memory of a unit is allocated anew at each unshard. Run the "
            "step without a graph; torch.compile makes none unless its mode asks for them"
        )


def _check_graphs(module: nn.Module, group: Group, options: FSDPOptions) -> None:
    """Refuse compiled modules that record CUDA graphs, on a device that has them."""
    if device_of(group.device).is_host or not options.traits.shards:
        return
    for name, submodule in module.named_modules():
        if captures_graphs(submodule):
            raise UnsupportedError(
                f"{name or 'the model'} is compiled in a mode that records CUDA graphs, such as "
                "reduce-overhead or max-autotune: a graph keeps the addresses of its parameters, "
                "and FSDP allocates those anew at each unshard. Compile it in the default mode, or "
                "in max-autotune-no-cudagraphs"
            )


def _check_queues(group: Group) -> None:
    """Refuse one queue for the streams of gathers and of reductions, which overtake each other."""
    if group.size > 1 and not group.shares_memory and device_of(group.device).has_one_queue():
        raise UnsupportedError(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1, so all streams of a device share a queue. FSDP "
            "gathers and reduces on streams of their own, which then hide nothing, and wait for "
            "each other for ever where ranks use different units: unset it, or set it to 8"
        )


def _check_flat(options: FSDPOptions, group: Group) -> None:
    has_views = options.layout == "rows" and group.shares_memory  # shards are views of the buffer
    if has_views and not options.use_orig_params and options.traits.shards:
        raise UnsupportedError(
            "use_orig_params=False with layout='rows' where ranks share memory: the rows of a rank "
            "do not lie end to end there, so they cannot be one flat parameter. Use layout='flat', "
            "or use_orig_params=True"
        )


def _check_arguments(
    module: nn.Module, group: Group, strategy: Strategy, replicate: Group | None
) -> None:
    checks.instance("module", module, nn.Module)
    checks.instance("group", group, Group)
    has_replicas = replicate is not None
    if strategy.hybrid != has_replicas or not isinstance(replicate, Group | None):
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
    if replicate is not None:
        world_rank, same_rank = (ranks.ranks[ranks.rank] for ranks in (group, replicate))
        if world_rank != same_rank or type(group) is not type(replicate):
            raise ArgumentError(
                f"group is {group!r} and replicate is {replicate!r}, of another world: give two "
                "axes of one mesh"
            )
    check_not_wrapped(module)
