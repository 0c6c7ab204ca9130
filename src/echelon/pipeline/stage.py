"""One stage while it runs: what it saves for each microbatch between forward and backward.

Outputs are not saved: only the edges of the graph at which their gradients come in. So the memory
of an output is free as soon as the next stage has it.
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
from echelon.pipeline.weight_gradients import DeferredGradients, WeightGradients, patch_layers


@final
@dataclass(slots=True)
class _ForwardCache:
    """What backward needs of one microbatch, besides the graph.

    Attributes:
        inputs: the leaves whose gradients go to the stage before, in order.
        edges: where gradients come in, one for each tensor of the output that needs one.
    """

    inputs: list[Tensor]
    edges: list[GradientEdge]


@final
class Stage:
    """A part of the model on this rank.

    Args:
        module: what runs.
        index: the number of the stage in the model.
        splits: whether the schedule splits backwards, so that linear layers must be able to defer.
        recomputes: whether only inputs are saved, and backward runs the module again.
        reduce_every: when gradients are reduced, if the module is replicated or sharded.

    Attributes:
        data_parallel: how the module is replicated or sharded.
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
        self.module, self.index, self._recomputes = module, index, recomputes
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
        return len({*self._forwards, *self._deferred})

    def forward(self, microbatch: int, value: Any, kwargs: Mapping[str, Any]) -> BoundaryValue:
        """Run the module on what the stage before gave, and save what backward needs.

        Args:
            value: a tuple is the positional arguments, anything else the only one.
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
        """Run the last module and the loss, which is returned without graph."""
        inputs = _leaves(value)
        loss = loss_fn(self._call(value, kwargs))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ArgumentError(f"loss_fn gave {loss!r:.80}; it must give a tensor with one number")
        if loss.requires_grad:
            self._forwards[microbatch] = _ForwardCache(inputs, [get_gradient_edge(loss)])
        return loss.detach()

    def _call(self, value: Any, kwargs: Mapping[str, Any]) -> Any:
        args = value if isinstance(value, tuple) else (value,)
        if self._recomputes and torch.is_grad_enabled():
            return checkpoint(self.module, *args, use_reentrant=False, **kwargs)
        return self.module(*args, **kwargs)

    def backward(self, microbatch: int, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs; those of parameters are added to ``.grad``.

        Args:
            grads: of the tensors of the output that need one.
        """
        with self.data_parallel.during_backward(), self._weights.adding():
            input_grads, has_run = self._run_backward(microbatch, grads)
        if not has_run:  # replicas may have gradients, which their backwards reduce
            self.data_parallel.end_microbatch()
        return input_grads

    def backward_input(
        self, microbatch: int, grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The first half of ``backward``; ``backward_weight`` is the second."""
        with self._weights.deferring() as deferred, self.data_parallel.during_backward_input():
            input_grads, _ = self._run_backward(microbatch, grads)
        self._deferred[microbatch] = deferred
        return input_grads

    def backward_weight(self, microbatch: int) -> None:
        """The second half: the gradients of weights that were deferred."""
        self._deferred.pop(microbatch).run(self.data_parallel.add_weight_gradient)
        self.data_parallel.end_microbatch()

    def _run_backward(
        self, microbatch: int, grads: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], bool]:
        """The gradients of the inputs, and whether there was anything to run."""
        cache = self._forwards.pop(microbatch, None)
        if cache is None:
            return [], False
        given = [(edge, g) for edge, g in zip(cache.edges, grads, strict=True) if g is not None]
        if given:
            run_backward([edge for edge, _ in given], [g for _, g in given])
        input_grads = [leaf.grad for leaf in cache.inputs]
        for leaf in cache.inputs:
            leaf.grad = None
        return input_grads, bool(given)

    def forget(self) -> None:
        """Drop what a failed step has left.

        Unsharded parameters stay so until the next step unshards them anew: to release them might
        wait for a rank that is gone.
        """
        self._forwards.clear()
        self._deferred.clear()


def _leaves(value: Any) -> list[Tensor]:
    """The tensors whose gradients go to the stage before."""
    return [leaf for leaf in tensors_in(value) if leaf.is_leaf and leaf.requires_grad]
