"""One stage while it runs: what it saves for each microbatch between forward and backward.

Outputs are not saved, only the edges of the graph at which their gradients enter. So the memory of
an output is free as soon as the next stage has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from echelon.errors import ArgumentError
from echelon.modules.autograd import run_backward
from echelon.modules.compiled import keep_order_of_graphs
from echelon.modules.nested import tensors as tensors_in
from echelon.pipeline.boundary import BoundaryValue, flatten
from echelon.pipeline.data_parallel import ReduceEvery, StageDataParallel
from echelon.pipeline.recomputed_buffers import RecomputedBuffers
from echelon.pipeline.weight_gradients import DeferredGradients, WeightGradients, patch_layers


@final
@dataclass(slots=True)
class _ForwardCache:
    """What the backward of a microbatch needs besides the graph.

    Attributes:
        inputs: the leaves whose gradients go to the previous stage, in order.
        edges: the edge of each tensor of the output that needs a gradient.
    """

    inputs: list[Tensor]
    edges: list[GradientEdge]


@final
class Stage:
    """The module of a stage on this rank, and what its microbatches hold.

    With ``splits`` the schedule has split backwards, so linear layers must be able to defer their
    weight gradients. With ``recomputes`` only inputs are saved, and backward runs the module again.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        *,
        splits: bool = False,
        recomputes: bool = False,
        reduce_every: ReduceEvery = "step",
    ) -> None:
        self.module, self.index = module, index
        self._recomputed_buffers = RecomputedBuffers(module) if recomputes else None
        if recomputes:
            keep_order_of_graphs()
        self.data_parallel = StageDataParallel(module, reduce_every)
        self._weights = WeightGradients(is_local=self.data_parallel.is_local)
        if splits or self.data_parallel.is_local:
            patch_layers(module, self._weights, all_sizes=splits)
        self._forwards: dict[int, _ForwardCache] = {}  # by microbatch, until its B or I
        self._deferred: dict[int, DeferredGradients] = {}  # by microbatch, from its I to its W

    @property
    def num_alive(self) -> int:
        """Microbatches whose activations are held."""
        return len(self._forwards) + len(self._deferred)

    def forward(self, microbatch: int, value: Any, kwargs: Mapping[str, Any]) -> BoundaryValue:
        """Run the module, and save what backward needs.

        A ``value`` that is a tuple has all positional arguments, any other value is the only one.
        """
        inputs = _leaves(value)
        output = self._call(value, kwargs)
        spec, tensors = flatten(output, f"stage {self.index}")
        edges = [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]
        if edges:
            self._forwards[microbatch] = _ForwardCache(inputs, edges)
        return BoundaryValue(spec, [tensor.detach() for tensor in tensors])

    def loss(
        self,
        microbatch: int,
        value: Any,
        kwargs: Mapping[str, Any],
        loss_fn: Callable[[Any], Tensor],
    ) -> Tensor:
        """Run the last module and the loss."""
        inputs = _leaves(value)
        loss = loss_fn(self._call(value, kwargs))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ArgumentError(f"loss_fn gave {loss!r:.80}; it must give a tensor with one number")
        if loss.requires_grad:
            self._forwards[microbatch] = _ForwardCache(inputs, [get_gradient_edge(loss)])
        return loss

    def _call(self, value: Any, kwargs: Mapping[str, Any]) -> Any:
        args = value if isinstance(value, tuple) else (value,)
        if self._recomputed_buffers is not None and torch.is_grad_enabled():
            contexts = self._recomputed_buffers.contexts
            return checkpoint(
                self.module, *args, use_reentrant=False, context_fn=contexts, **kwargs
            )
        return self.module(*args, **kwargs)

    def backward(self, microbatch: int, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Backward with the gradients of the output; returns those of the inputs."""
        with self.data_parallel.during_backward(), self._weights.adding():
            input_grads, has_run = self._run_backward(microbatch, grads)
        if not has_run:  # other replicas may have gradients to reduce
            self.data_parallel.end_microbatch()
        return input_grads

    def backward_input(
        self, microbatch: int, grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The first half of ``backward``, which defers gradients of weights."""
        with self._weights.deferring() as deferred, self.data_parallel.during_backward_input():
            input_grads, _ = self._run_backward(microbatch, grads)
        self._deferred[microbatch] = deferred
        return input_grads

    def backward_weight(self, microbatch: int) -> None:
        """The second half of ``backward``: the deferred gradients of weights."""
        self._deferred.pop(microbatch).run(self.data_parallel.add_weight_gradient)
        self.data_parallel.end_microbatch()

    def _run_backward(
        self, microbatch: int, grads: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], bool]:
        """The gradients of the inputs, and whether there was anything to run."""
        cache = self._forwards.pop(microbatch, None)
        if cache is None:
            return [], False
        pairs = zip(cache.edges, grads, strict=True)
        used = [(edge, grad) for edge, grad in pairs if grad is not None]
        if used:
            run_backward([edge for edge, _ in used], [grad for _, grad in used])
        input_grads = [leaf.grad for leaf in cache.inputs]
        for leaf in cache.inputs:
            leaf.grad = None
        return input_grads, bool(used)

    def forget(self) -> None:
        """Drop what a failed step has left.

        Unsharded parameters stay until the next step unshards them again: releasing them might wait
        for a rank that has failed.
        """
        self._forwards.clear()
        self._deferred.clear()


def _leaves(value: Any) -> list[Tensor]:
    """The tensors whose gradients go to the previous stage."""
    return [leaf for leaf in tensors_in(value) if leaf.is_leaf and leaf.requires_grad]
