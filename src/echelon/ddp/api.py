"""``DDP``: a module whose gradients are reduced over all ranks of a group."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from echelon import checks
from echelon.checks import Reduction
from echelon.comm.group import Group
from echelon.ddp.join import JoinStep, Rounds
from echelon.ddp.options import DDPOptions, Sync
from echelon.ddp.reducer import Reducer
from echelon.ddp.replicas import (
    ReplicaWatch,
    TrackedBuffers,
    broadcast_buffers,
    broadcast_parameters,
)
from echelon.ddp.replicated_module import ReplicatedModule
from echelon.ddp.reports import BucketInfo, Unused
from echelon.errors import StateError
from echelon.modules.autograd import in_transform
from echelon.modules.compiled import keep_plain_names, plain_name
from echelon.modules.data_watch import DataWatch
from echelon.modules.model_agreement import (
    Init,
    check_agreement,
    check_model,
    has_plain_memory,
    option_facts,
)
from echelon.modules.nested import tensors
from echelon.modules.parameters import (
    ParameterGuard,
    check_not_wrapped,
    claim,
    disclaim,
    ignored_parameters,
)
from echelon.modules.wrapper import prefix_loader
from echelon.page import html_of


class DDP(ReplicatedModule):
    """Replicates ``module`` on the ranks of ``group``; reduces gradients while backward runs.

    Law: after ``loss.backward()`` every rank holds the same gradients, bit for bit: with
    ``reduction="mean"`` and a mean loss over batches of equal size, those of one process on all
    batches together.

    - ``.grad`` of every parameter is a view of a bucket, also after ``zero_grad()``. Gradients
      that you keep over ``zero_grad()`` keep their values; the next ones then get other memory.
    - A parameter without a gradient on this rank counts as zero; one that no rank used keeps its
      ``.grad`` (None).
    - Hooks of ``param.register_post_accumulate_grad_hook`` run when ``.grad`` is reduced, after the
      last bucket, in one order on all ranks; an optimizer may step there. So under ``no_sync`` and
      with ``sync="manual"`` they run in ``sync_gradients`` alone.
    - After a backward that raised and was caught, on all ranks, ``.grad`` is what it was before; to
      local gradients of ``no_sync`` autograd may have added some, as in one process.
    - ``torch.autograd.grad`` returns local gradients, also with ``create_graph=True``, so a penalty
      on them can be part of a loss. Like derivatives of ``torch.func``, it does not communicate.
    - ``state_dict``, ``named_parameters`` and ``named_modules`` have the names of the plain
      module, and the wrapper has the attributes of the module, which it also sets and deletes. What
      is registered in the wrapper is registered in the module: add parameters before you wrap it.
    - ``copy.deepcopy`` gives a DDP on the same group that shares nothing with this one. It
      communicates only when it is trained, so ranks may copy (or average) the model on their own.

    Args:
        module: the same on all ranks. Its parameters keep their identity, so an optimizer may be
            made before or after. A parameter that is frozen now is not reduced and must stay
            frozen; others may be frozen and unfrozen between steps, the same on all ranks. All may
            be frozen, as in a teacher: values and buffers are those of rank 0.
        group: the ranks that hold a copy.
        bucket_bytes: the cap of every bucket; a larger gradient has a bucket of its own.
        first_bucket_bytes: one more cap of the first bucket, so that communication begins early.
        sync: ``"overlap"`` reduces during backward, ``"manual"`` in ``sync_gradients()``.
        broadcast_buffers: send rank 0's buffers before a forward in training mode, when a buffer
            changed on some rank before the last reduction.
        init: ``"broadcast"`` rank 0's parameters and buffers, ``"verify"`` that all are equal, or
            ``"trust"`` that they are. Names, shapes and dtypes are compared always.
        gradient_dtype: the dtype in which gradients are reduced; None: the parameter's own.
        reduction: ``"mean"``, ``"sum"``, or a number that the sum is divided by. A tensor that you
            set as ``.grad`` is a gradient of this rank, and joins the next reduction.
        check_replicas: after how many reductions the ranks compare their parameters; at first they
            do so more often. 0: never. Ranks that differ raise a ModelMismatch.
        ignored: modules or parameters whose gradients are not reduced; their values are sent at
            the start like all others, but those of classes with operations of their own, such as
            quantised weights and DTensors, which each rank keeps.

    Raises:
        ArgumentError: an option, the group or the module cannot be used; nothing was done.
        ModelMismatch: the modules or options differ between ranks; the message says how.

    Example:
        >>> def main(world):
        ...     torch.manual_seed(world.rank)
        ...     model = DDP(nn.Linear(2, 1), world.group)
        ...     model(torch.full((1, 2), float(world.rank))).sum().backward()
        ...     return model.weight.grad.tolist()
        >>> from echelon.launch.run import run
        >>> run(main, ranks=3)
        [[[1.0, 1.0]], [[1.0, 1.0]], [[1.0, 1.0]]]
    """

    _repr_html_ = html_of

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        bucket_bytes: int = 25 * 2**20,
        first_bucket_bytes: int = 2**20,
        sync: Sync = "overlap",
        broadcast_buffers: bool = True,
        init: Init = "broadcast",
        gradient_dtype: torch.dtype | None = None,
        reduction: Reduction = "mean",
        check_replicas: int = 64,
        ignored: Sequence[nn.Module | nn.Parameter] = (),
    ) -> None:
        super().__init__()
        options = DDPOptions(
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            sync=sync,
            broadcast_buffers=broadcast_buffers,
            init=init,
            gradient_dtype=gradient_dtype,
            reduction=reduction,
            check_replicas=check_replicas,
        )
        _check_arguments(module, group)
        skip = ignored_parameters(module, ignored)
        check_model(module, group.device, size=group.size, ignored=skip)
        choices = {**option_facts(options), "ignored": str(len(skip))}
        check_agreement(module, choices, group, values=init == "verify")
        self._attach(module, group, options, skip)
        self._reducer.allocate()
        if init == "broadcast":
            self.broadcast_parameters(0)

    def _attach(
        self,
        module: nn.Module,
        group: Group,
        options: DDPOptions,
        ignored: Collection[nn.Parameter],
    ) -> None:
        """Do the part of the construction that needs no communication."""
        self.module = module
        self.training = module.training
        self._group, self._options = group, options
        self._data_watch = DataWatch(group)
        skip = {id(param) for param in ignored}
        reduced = [(name, p) for name, p in module.named_parameters() if id(p) not in skip]
        self._ignored = [name for name, p in module.named_parameters() if id(p) in skip]
        named = [(name, p) for name, p in reduced if p.requires_grad]
        keep_plain_names(module)
        self._guard = ParameterGuard(module, "DDP")
        claim([param for _, param in reduced], self, outlives_owner=False)
        buffers = self._tracked_buffers = TrackedBuffers(module)
        is_watched = options.broadcast_buffers and group.size > 1 and len(buffers) > 0
        self._names = [plain_name(name) for name, _ in named]
        self._replicas = ReplicaWatch(reduced, group, options.check_replicas)
        changed_buffers = buffers.changed if is_watched else None
        self._reducer = Reducer(named, group, options, self._replicas, changed_buffers)
        self._begin: Callable[[Tensor], None] = lambda _: self._reducer.prepare_for_backward()
        self._attached = True
        hook = prefix_loader("DDP reduces")
        self.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
        self._wear_forward()

    # Training --------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; the backward of what it returns reduces gradients.

        Tensors are found in tuples, lists, dicts, dataclasses and registered pytrees.

        Raises:
            StateError: the wrapper was taken off, or the module has other parameters now.
        """
        self._check_attached()
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if not torch.compiler.is_compiling():
            self._data_watch.begin_forward(args, kwargs)
        self._guard.check()
        if in_transform():  # torch.func gives gradients of this rank, and adds to no ``.grad``
            return self.module(*args, **kwargs)
        self._reducer.defer_hooks()
        if self._reducer.buffers_changed and self.module.training:
            self._send_buffers()
        if is_watched := self._replicas.check.is_on and not torch.compiler.is_compiling():
            self._replicas.begin_forward()
        output = self.module(*args, **kwargs)
        if is_watched:
            self._replicas.end_forward()
        self.reduce_in_backward_of(output)
        return output

    def reduce_in_backward_of(self, output: Any) -> None:
        """Reduce in a backward of ``output`` too, which begins before forward has returned."""
        for tensor in tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._begin)
            elif tensor.requires_grad:
                self._reduce_in_next_backward_of(tensor)

    def _reduce_in_next_backward_of(self, leaf: Tensor) -> None:
        """The same of an input or a parameter that forward has returned as it is, once.

        A hook on a leaf outlives the graph.
        """

        def begin(grad: Tensor) -> None:
            handle.remove()
            self._begin(grad)

        handle = leaf.register_hook(begin)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication: a ``backward`` inside the block stays local.

        The next backward outside reduces the whole sum. Only backward need be inside.
        With ``sync="manual"`` it keeps ``sync_gradients()`` from being called.
        """
        self._check_attached()
        with self._reducer.no_sync():
            yield

    @torch.inference_mode(mode=False)  # gradients outlive the caller's mode
    def sync_gradients(self, *, may_be_none: bool = False) -> None:
        """Reduce what ``.grad`` of every parameter holds now. All ranks call it.

        With ``sync="manual"`` call it after the backwards of a step. With ``sync="overlap"`` it is
        only for gradients that ``no_sync`` left local, or that were written by hand. A gradient
        that is reduced already is not reduced again: the new one is added to it.

        Args:
            may_be_none: whether this rank may have no local gradients, as for a stage that no
                microbatch has trained; it then takes part with zeros.

        Raises:
            StateError: inside ``no_sync`` or backward, or there are no local gradients and
                ``may_be_none`` is False.
        """
        self._check_attached()
        self._reducer.reduce_now(may_be_none=may_be_none)

    def accumulate_gradient(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient to ``param.grad`` as a backward under ``no_sync`` does.

        It is for gradients that are made outside of a backward; ``sync_gradients`` reduces them.

        Raises:
            StateError: the wrapper was taken off.
        """
        self._check_attached()
        self._reducer.add(param, gradient)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks have different numbers of batches: put the loop over batches inside.

        A rank that leaves the block early takes part in the others' communication, with zeros,
        until all have left; ``reduction="mean"`` is then the mean over the ranks that still have a
        batch. At the end the parameters and buffers of a rank that ran longest are sent to all
        ranks; optimizer states and gradients are not.

        Raises:
            StateError: ``join`` inside ``join``, or the ranks are at different points of a step.
        """
        self._check_attached()
        if self._reducer.rounds is not None:
            raise StateError("join() inside join(): one block goes around the whole loop")
        rounds = self._reducer.rounds = Rounds(self._group)
        try:
            yield
            actions = {
                JoinStep.BACKWARD: self._reducer.shadow_backward,
                JoinStep.BUFFERS: self._copy_buffers,
            }
            rounds.shadow(actions)
        finally:
            self._reducer.rounds = None
        if rounds.active:
            self.broadcast_parameters(rounds.first_active)

    def broadcast_parameters(self, src: int) -> None:
        """Copy all parameters and buffers of rank ``src`` to all ranks, in place.

        All ranks call it. An optimizer keeps its parameters.

        Raises:
            RankError: there is no such rank in the group.
        """
        self._check_attached()
        checks.rank("src", src, self._group.size)
        if self._group.size > 1:
            cap = self._options.bucket_bytes
            params = filter(has_plain_memory, self.module.parameters())
            broadcast_parameters(params, self._group, src, cap)
            broadcast_buffers(self._tracked_buffers.named(), self._group, src, cap)
        self._tracked_buffers.remember()
        self._reducer.buffers_changed = False

    def _send_buffers(self) -> None:
        if self._reducer.rounds is not None:
            self._reducer.rounds.announce(JoinStep.BUFFERS)
        self._copy_buffers()

    def _copy_buffers(self) -> None:
        rounds = self._reducer.rounds
        source = 0 if rounds is None else rounds.first_active
        self._reducer.buffers_changed = False
        cap = self._options.bucket_bytes
        broadcast_buffers(self._tracked_buffers.named(), self._group, source, cap)
        self._tracked_buffers.remember()

    # Looking at it ---------------------------------------------------------------------------

    @property
    def buckets(self) -> tuple[BucketInfo, ...]:
        """The buckets, in the order in which they are launched; empty in an untrained copy.

        They are replaced once, before the second reduction, and then follow the order in which
        gradients were ready in the first.
        """
        return tuple(
            BucketInfo(bucket.names, bucket.wire.dtype, bucket.nbytes)
            for bucket in self._reducer.buckets
        )

    def unused_parameters(self) -> Unused:
        """The parameters that got no gradient in the last reduction."""
        names, unused = self._names, self._reducer.unused
        everywhere = tuple(names[i] for i in unused.everywhere)
        return Unused(here=tuple(names[i] for i in unused.here), everywhere=everywhere)

    @torch.inference_mode(mode=False)  # gradients outlive the caller's mode
    def unwrap(self) -> nn.Module:
        """Take the wrapper off and return the module, which keeps its gradients.

        The wrapper cannot be used afterwards; the module can be wrapped again.
        """
        self._check_attached()
        self._attached = False
        self._reducer.close()
        disclaim(p for name, p in self.module.named_parameters() if name not in self._ignored)
        return self.module

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        nn.Module.__init__(clone)
        module = copy.deepcopy(self.module, memo)
        ignored = [module.get_parameter(name) for name in self._ignored]
        clone._attach(module, self._group, self._options, ignored)
        clone._attached = self._attached
        return clone


def _check_arguments(module: nn.Module, group: Group) -> None:
    checks.instance("module", module, nn.Module)
    checks.instance("group", group, Group)
    check_not_wrapped(module)
