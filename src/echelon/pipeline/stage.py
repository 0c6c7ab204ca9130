"""One stage while it runs: what it keeps of each microbatch between forward and backward.

Outputs are not kept: only the edges of the graph at which their gradients come in. So the memory of
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
from echelon.pipeline.boundary import BoundarySpec, take_apart
from echelon.pipeline.deferred import Deferred, WeightGradients
from echelon.pipeline.shardable import ReduceEvery, Sharing
from echelon.pipeline.weighted import take_over


@final
@dataclass(frozen=True, slots=True)
class Output:
    """What a stage gave for one microbatch.

    Attributes:
        form: of the value.
        tensors: without graph.
    """

    form: BoundarySpec
    tensors: list[Tensor]


@final
@dataclass(slots=True)
class _Kept:
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
        module: that part.
        index: of all stages.
        splits: whether the schedule splits backwards, so that linear layers must be able to defer.
        recomputes: whether only inputs are kept, and backward runs the module again.
        reduce_every: when gradients are reduced, if replicas of the module have some, too.

    Attributes:
        sharing: with whom, and how.
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
        self.sharing = Sharing(module, reduce_every)
        self._weights = WeightGradients(local=self.sharing.is_local)
        if splits or self.sharing.is_local:
            take_over(module, self._weights, every=splits)
        self._kept: dict[int, _Kept] = {}
        self._later: dict[int, Deferred] = {}

    @property
    def num_alive(self) -> int:
        """Microbatches whose activations are held."""
        return len({*self._kept, *self._later})

    def forward(self, microbatch: int, value: Any, kwargs: Mapping[str, Any]) -> Output:
        """Run the module on what the stage before gave, and keep what backward needs.

        Args:
            value: a tuple is the positional arguments, anything else the only one.
        """
        inputs = _leaves(value)
        output = self._call(value, kwargs)
        form, tensors = take_apart(output, f"stage {self.index}")
        edges = [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]
        if edges:
            self._kept[microbatch] = _Kept(inputs, edges)
        return Output(form, [tensor.detach() for tensor in tensors])

    def loss(
        self,
        microbatch: int,
        value: Any,
        kwargs: Mapping[str, Any],
        loss_fn: Callable[[Any], Tensor],
    ) -> Tensor:
        """Run the last module and the loss, which comes back without graph."""
        inputs = _leaves(value)
        loss = loss_fn(self._call(value, kwargs))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ArgumentError(f"loss_fn gave {loss!r:.80}; it must give a tensor with one number")
        if loss.requires_grad:
            self._kept[microbatch] = _Kept(inputs, [get_gradient_edge(loss)])
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
        with self.sharing.whole_backward(), self._weights.added():
            found, has_run = self._back(microbatch, grads)
        if not has_run:
            self.sharing.end_microbatch()  # replicas may have gradients, which backward reduces
        return found

    def _back(
        self, microbatch: int, grads: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], bool]:
        """The gradients of the inputs, and whether there was anything to run."""
        kept = self._kept.pop(microbatch, None)
        if kept is None:
            return [], False
        given = [(edge, g) for edge, g in zip(kept.edges, grads, strict=True) if g is not None]
        if given:
            run_backward([edge for edge, _ in given], [g for _, g in given])
        found = [leaf.grad for leaf in kept.inputs]
        for leaf in kept.inputs:
            leaf.grad = None
        return found, bool(given)

    def backward_input(
        self, microbatch: int, grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The first half of ``backward``; ``backward_weight`` is the second."""
        with self._weights.deferred() as later, self.sharing.first_half():
            found, _ = self._back(microbatch, grads)
        self._later[microbatch] = later
        return found

    def backward_weight(self, microbatch: int) -> None:
        """The second half: gradients of weights that were put off."""
        self._later.pop(microbatch).run(self.sharing.add_product)
        self.sharing.end_microbatch()

    def forget(self) -> None:
        """Leave nothing of a step that failed.

        Parameters that are whole stay so until the next step gathers them anew: to release them
        might wait for a rank that is gone.
        """
        self._kept.clear()
        self._later.clear()


def _leaves(value: Any) -> list[Tensor]:
    """The tensors whose gradients go to the stage before."""
    return [leaf for leaf in tensors_in(value) if leaf.is_leaf and leaf.requires_grad]
