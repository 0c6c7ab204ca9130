"""What the calls of a pipeline return: on the rank of the last stage, or on every rank.

Elsewhere they return None. Python and torch raise the errors that a None, or an output without
gradients, causes in a script; those get a note when they end the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from echelon.comm.group import Group
from echelon.launch.run import entered
from echelon.pipeline.boundary import BoundarySpec, flatten
from echelon.pipeline.microbatch import Batch, join_microbatches


@final
@dataclass(frozen=True, slots=True)
class LastStage:
    """Where the results are: the ranks of a pipeline, and the one that has the last stage."""

    group: Group
    rank: int


def loss_of(batch: Batch, last: LastStage, *, everywhere: bool, call: str) -> Tensor | None:
    """The loss of a batch, which ``pipe.call`` returns. With ``everywhere`` all ranks call it."""
    loss = None
    if batch.losses:
        loss = torch.stack([batch.losses[i] for i in sorted(batch.losses)]).sum()
    _explain_loss(call, last.rank)
    if not everywhere:
        return loss
    loss_on_cpu: Tensor = last.group.broadcast_object(
        None if loss is None else loss.cpu(), last.rank
    )
    return loss_on_cpu.to(last.group.device)


def output_of(batch: Batch, last: LastStage, *, everywhere: bool) -> Any:
    """The output of a batch. With ``everywhere`` all ranks call it."""
    outputs = batch.outputs
    output = join_microbatches([outputs[i] for i in sorted(outputs)]) if outputs else None
    _explain_forward(last.rank)
    return _on_all_ranks(output, last) if everywhere and last.group.size > 1 else output


def _on_all_ranks(output: Any, last: LastStage) -> Any:
    """The nested tensors and plain values that the last rank has."""
    group, has_it = last.group, last.group.rank == last.rank
    spec, tensors = flatten(output, "the last stage") if has_it else (None, [])
    data = group.broadcast_object(None if spec is None else spec.to_bytes(), last.rank)
    if spec is None:
        spec = BoundarySpec.from_bytes(data, group.ranks[last.rank])
        tensors = [tensor.empty(group.device) for tensor in spec.tensors]
    else:
        tensors = [tensor.detach().contiguous() for tensor in tensors]
    for tensor in tensors:
        if tensor.numel():
            group.broadcast(tensor, last.rank, label="outputs of the pipeline")
    return spec.unflatten(tensors)


# Python and torch raise these errors themselves, so they get a note when they end the rank.

_NO_GRADIENT = "does not require grad and does not have a grad_fn"  # torch's own words

_NO_PARAMETERS = "optimizer got an empty parameter list"  # torch's own words
_OF_OTHER_STAGES = (
    "in a pipeline a rank has the parameters of its stages, and a rule may find none among them: "
    "make one optimizer with param_groups, in which an empty group is right"
)

_TRAIN = (
    "To train, let all ranks call loss = pipe.step(x, target=y), which runs backward itself, with "
    "the loss as Pipeline(..., loss_fn=...); loss_everywhere=True gives it to all ranks"
)


def _explain_loss(call: str, rank: int) -> None:
    """Add a note to errors that the result of ``call`` causes; ``rank`` has the last stage."""
    backward = "step() has run backward already" if call == "step" else _TRAIN
    _explain(
        f"pipe.{call}(...) gives the loss on rank {rank} of the pipeline, which has the last "
        f"stage, and None elsewhere; pipe.{call}(..., loss_everywhere=True) gives it to all ranks. "
        f"It has no gradients: {backward}"
    )


def _explain_forward(rank: int) -> None:
    """Add a note to errors that the result of ``pipe(x)`` causes; ``rank`` has the last stage."""
    _explain(
        f"pipe(...) gives the output of the model on rank {rank} of the pipeline, which has the "
        f"last stage, and None elsewhere; it has no gradients. {_TRAIN}"
    )


def explain_no_parameters() -> None:
    """Add a note to the error of an optimizer that gets no parameter of this rank's stages."""
    world = entered()
    if world is None:
        return

    def hint(error: BaseException) -> str | None:
        is_empty = isinstance(error, ValueError) and _NO_PARAMETERS in str(error)
        return _OF_OTHER_STAGES if is_empty else None

    world.hints["parameters of a Pipeline"] = hint


def _explain(text: str) -> None:
    world = entered()
    if world is None:
        return

    def hint(error: BaseException) -> str | None:
        is_of_none = isinstance(error, AttributeError | TypeError) and "NoneType" in str(error)
        is_of_graph = isinstance(error, RuntimeError) and _NO_GRADIENT in str(error)
        return text if is_of_none or is_of_graph else None

    world.hints["Pipeline"] = hint
