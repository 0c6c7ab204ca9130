"""``trace_model`` runs a model once without its values and counts what its blocks do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mkldnn
from torch.utils._pytree import tree_leaves, tree_map

from echelon import checks
from echelon.errors import ArgumentError, EchelonError
from echelon.pipeline.splitting.split import blocks_of
from echelon.planner.dry_run import with_memory
from echelon.planner.operation_counter import OperationCounter
from echelon.planner.shapes_only import ShapesOnly
from echelon.planner.traced_model import TracedModel, TracedPart, TracedStep

_BEFORE, _AFTER = -1, -2


def trace_model(
    model: nn.Module,
    inputs: Any,
    target: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    rounding: int = 1,
) -> TracedModel:
    """What the blocks of a model compute, move and keep, as ``split`` would cut it.

    The model runs a forward and a backward of one and of two sequences without computing what is
    large. A model that cannot be cut is one block.

    Args:
        model: may be on the meta device.
        inputs: a batch, or a tuple of arguments, whose tensors have a row for each sequence; may be
            on the meta device.
        target: what ``loss_fn`` takes beside the output.
        loss_fn: None: the mean of the output.
        dtype: of the weights and activations; None: those of the model.
        rounding: an allocation takes a multiple of so many bytes; PyTorch's of CUDA takes 512.

    Raises:
        UnsupportedError: the model looks at values of large tensors, which are not computed.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
        >>> traced = trace_model(model, torch.zeros(8, 300))
        >>> traced.layers, traced.num_parameters, traced.block_parameters
        (4, 361200, 90300.0)
        >>> traced.flops()  # of one row; the input needs no gradient
        1980000.0
    """
    checks.instance("model", model, nn.Module)
    checks.integer("rounding", rounding, low=1)
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    seq = _tokens_of(given)
    steps = []
    with ShapesOnly():
        copied, given, target = with_memory((model, given, target))
        copied = copied if dtype is None else copied.to(dtype)
        for sequences in (1, 2):
            rows = partial(_rows, sequences=sequences, dtype=dtype)
            batch, wanted = tree_map(rows, given), tree_map(rows, target)
            steps.append(_traced(copied, batch, wanted, loss_fn))
    (once, sizes), (twice, _) = steps
    params = [param for param in copied.parameters() if param.requires_grad]
    num_parameters = sum(param.numel() for param in copied.parameters())
    num_trained = sum(param.numel() for param in params)
    return TracedModel(
        once=once,
        twice=twice,
        **sizes,
        num_parameters=num_parameters,
        seq=seq,
        trained_share=num_trained / num_parameters if num_parameters else 1.0,
        width=params[0].itemsize if params else 4,
        rounding=rounding,
    )


def _tokens_of(given: tuple[Any, ...]) -> int:
    """The tokens of a sequence; a row of anything but whole numbers counts as one."""
    leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.ndim]
    if not leaves or any(len(leaf) == 0 for leaf in leaves):
        raise ArgumentError(
            f"inputs is {given!r:.80}, which has no tensor with a row for each sequence"
        )
    first = leaves[0]
    return first.shape[1] if first.ndim > 1 and not first.is_floating_point() else 1


def _rows(leaf: Any, sequences: int, dtype: torch.dtype | None) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.ndim:
        return leaf
    taken = leaf[:1].expand(sequences, *leaf.shape[1:])
    return taken.to(dtype) if dtype is not None and leaf.is_floating_point() else taken.clone()


def _traced(
    model: nn.Module,
    batch: Sequence[Any],
    target: Any,
    loss_fn: Callable[[Any, Any], Tensor] | None,
) -> tuple[TracedStep, dict[str, Any]]:
    """The operations of a step, and the numbers of parameters."""
    blocks = _block_modules(model)
    constants = [*model.parameters(), *model.buffers()]
    counter = OperationCounter(constants)
    outputs = dict[int, float]()
    for param in model.parameters():  # a backward adds to the gradients of earlier microbatches
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    handles = [
        handle
        for index, block in enumerate(blocks)
        for handle in _hooks(block, index, len(blocks), counter, outputs)
    ]
    try:
        with _without_mkldnn(), counter, torch.enable_grad():
            counter.place = _BEFORE
            result = _output_of(model, batch)
            counter.place = _AFTER
            outputs[_AFTER] = sum(map(Tensor.numel, _with_gradients(result)))
            loss = _mean_of(result) if loss_fn is None else loss_fn(result, target)
            counter.direction = "backward"
            loss.backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()
    step = TracedStep(
        embedding=_part(counter, _BEFORE, outputs),
        blocks=tuple(_part(counter, index, outputs) for index in range(len(blocks))),
        head=_part(counter, _AFTER, outputs),
    )
    return step, _sizes(model, blocks, counter)


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    """In it, a recurrent layer is one operation that hides its multiplications."""
    (enabled, *_) = mkldnn.set_flags(False)
    try:
        yield
    finally:
        mkldnn.set_flags(enabled)


def _output_of(model: nn.Module, batch: Sequence[Any]) -> Any:
    try:
        return model(*batch)
    except EchelonError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"{type(model).__name__} cannot run with one sequence of its example: "
            f"{type(error).__name__}: {error}. Give what the module takes: a tuple where it takes "
            "several arguments, whose tensors have a row for each sequence"
        ) from error


def _block_modules(model: nn.Module) -> list[nn.Module]:
    try:
        modules = blocks_of(model).modules
    except ArgumentError:  # a model that cannot be cut can still be replicated and sharded
        return [model]
    return modules or [model]


def _hooks(
    block: nn.Module, index: int, count: int, counter: OperationCounter, outputs: dict[int, float]
) -> list[Any]:
    """Hooks that keep the counter's place; a backward leaves a block where its input gets one."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        counter.place = index
        if index == 0:
            for tensor in _with_gradients((args, kwargs)):
                tensor.register_hook(partial(_move_to, counter, _BEFORE))

    def after(_: nn.Module, args: Any, output: Any) -> None:
        tensors = _with_gradients(output)
        outputs[index] = sum(map(Tensor.numel, tensors))
        for tensor in tensors:
            tensor.register_hook(partial(_move_to, counter, index))
        if index == count - 1:
            counter.place = _AFTER

    return [
        block.register_forward_pre_hook(before, with_kwargs=True),
        block.register_forward_hook(after),
    ]


def _move_to(counter: OperationCounter, place: int, _: Tensor) -> None:
    counter.place = place


def _with_gradients(value: Any) -> list[Tensor]:
    leaves = tree_leaves(dict(value) if isinstance(value, dict) else value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _mean_of(result: Any) -> Tensor:
    """The mean of the first tensor that has a gradient."""
    tensors = _with_gradients(result)
    if not tensors:
        raise ArgumentError(
            "no output of the model has a gradient: give loss_fn, or a model with parameters that "
            "are trained"
        )
    return tensors[0].float().mean()


def _part(counter: OperationCounter, place: int, outputs: dict[int, float]) -> TracedPart:
    forward = counter.at(place, "forward")
    return TracedPart(
        forward=forward.of_rank(),
        backward=counter.at(place, "backward").of_rank(),
        kept=tuple(map(float, forward.kept)),
        output=outputs.get(place, 0.0),
    )


def _sizes(
    model: nn.Module, blocks: Sequence[nn.Module], counter: OperationCounter
) -> dict[str, Any]:
    """Elements of the parameters of each block, before the blocks, after them, and in both."""
    in_blocks = {param for block in blocks for param in block.parameters()}
    around = [
        (param, counter.uses.get(i, {_BEFORE}))
        for i, param in enumerate(model.parameters())
        if param not in in_blocks
    ]
    last = {param for param, places in around if places == {_AFTER}}
    return {
        "parameters": tuple(sum(param.numel() for param in block.parameters()) for block in blocks),
        "embedding_parameters": sum(p.numel() for p, _ in around if p not in last),
        "head_parameters": sum(param.numel() for param in last),
        "shared_parameters": sum(p.numel() for p, places in around if {_BEFORE, _AFTER} <= places),
    }
