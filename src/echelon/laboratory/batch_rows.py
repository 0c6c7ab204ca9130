"""What a batch of a comparison is made of, and how a model is called with it.

::

    (inputs, target)     model(inputs)                       loss_fn(output, target)
                         inputs may be a tuple: model(*inputs), or a dict: model(**inputs)
    a dict               model(**batch)                      loss_fn(output, batch)
    a tensor             model(batch)                        loss_fn(output, batch)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.errors import ArgumentError
from echelon.modules.nested import cast_floats
from echelon.pipeline.microbatch import join_microbatches

Loss = Callable[[Any, Any], Tensor]
Row = tuple[int, int]  # the index of a batch, and of a row in it

_FORMS = "a pair (inputs, target), a dict or a tensor"


@final
@dataclass(frozen=True, slots=True)
class ModelCall:
    """The arguments of one call of a model, and the target of the loss."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any


def model_call(batch: Any) -> ModelCall:
    """How a model is called with a batch."""
    if isinstance(batch, Mapping):
        return ModelCall((), batch, batch)
    if isinstance(batch, Tensor):
        return ModelCall((batch,), {}, batch)
    inputs, target = batch
    if isinstance(inputs, Mapping):
        return ModelCall((), inputs, target)
    args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    return ModelCall(args, {}, target)


def batch_tensors(value: Any) -> list[Tensor]:
    """The tensors of a batch, or of the arguments of a call, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def num_rows(batch: Any) -> int:
    """The length of dim 0, which all tensors of a batch share."""
    return batch_tensors(batch)[0].shape[0]


def checked_batches(batches: Any, steps: int) -> list[Any]:
    """The batches of the first ``steps`` steps, with floating-point values in float64.

    Raises:
        ArgumentError: there are fewer, or one of them cannot be cut by rows, or is of another
            structure than the first.
    """
    if isinstance(batches, str | Tensor | Mapping) or not isinstance(batches, Iterable):
        raise ArgumentError(
            f"batches is {type(batches).__name__}; give a list with one batch for each step, each "
            f"{_FORMS}"
        )
    chosen = [batch for _, batch in zip(range(steps), batches, strict=False)]
    if len(chosen) < steps:
        raise ArgumentError(
            f"batches has {len(chosen)} of them for {steps} steps: give one for each step, or a "
            "smaller steps"
        )
    for index, batch in enumerate(chosen):
        _check_form(index, batch)
        _check_like_first(index, batch, chosen[0])
    return [cast_floats(batch, lambda tensor: tensor.detach().double()) for batch in chosen]


def _check_form(index: int, batch: Any) -> None:
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    if not (is_pair or isinstance(batch, Mapping | Tensor)):
        raise ArgumentError(f"batch {index} is a {type(batch).__name__}; give {_FORMS}")
    inside = batch_tensors(batch)
    if not inside:
        raise ArgumentError(f"batch {index} has no tensor, so it has no rows that ranks can share")
    lengths = sorted({tensor.shape[0] if tensor.dim() else 0 for tensor in inside})
    if len(lengths) > 1 or not lengths[0]:
        raise ArgumentError(
            f"tensors of batch {index} have {lengths} rows in dim 0: give tensors of one length, "
            "which ranks cut by rows, and plain Python values for everything else"
        )


def _check_like_first(index: int, batch: Any, first: Any) -> None:
    forms = [
        (pytree.tree_structure(value), [t.dtype for t in batch_tensors(value)])
        for value in (first, batch)
    ]
    if forms[0] != forms[1]:
        raise ArgumentError(
            f"batch {index} has another structure than batch 0: {_form_text(batch)} instead of "
            f"{_form_text(first)}. Give batches of equal structure and dtypes"
        )


def _form_text(batch: Any) -> str:
    def text(leaf: Any) -> str:
        return str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__

    return str(pytree.tree_map(text, batch)).replace("'", "")


def select_rows(batch: Any, rows: Sequence[int]) -> Any:
    """Those rows of a batch, in that order."""
    index = torch.tensor(rows, dtype=torch.long, device="cpu")

    def select(leaf: Any) -> Any:
        return leaf.index_select(0, index.to(leaf.device)) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(select, batch)


def select_from(batches: Sequence[Any], rows: Sequence[Row]) -> Any:
    """A batch of rows of several batches, in that order."""
    if len({index for index, _ in rows}) == 1:
        return select_rows(batches[rows[0][0]], [row for _, row in rows])
    return join_microbatches([select_rows(batches[index], [row]) for index, row in rows])
