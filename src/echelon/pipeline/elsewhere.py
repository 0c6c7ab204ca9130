"""What a user is told whose error comes of what a pipeline gave: None, or no gradients.

Python and torch raise such errors themselves, so they get a note when they end the rank.
"""

from __future__ import annotations

from echelon.launch.run import entered

_NO_GRADIENT = "does not require grad and does not have a grad_fn"  # torch's own words

_TRAIN = (
    "To train, let all ranks call loss = pipe.step(x, target=y), which runs backward itself, with "
    "the loss as Pipeline(..., loss_fn=...); loss_everywhere=True gives it to all ranks"
)


def explain_none(call: str, rank: int) -> None:
    """Have an error that comes of a None, which ``call`` returned on this rank, say why it did.

    Args:
        call: ``"step"`` or ``"eval_step"``.
        rank: which has the last stage.
    """
    _explain(
        f"pipe.{call}(...) gave None on this rank: the loss is on rank {rank} of the pipeline, "
        f"which has the last stage. pipe.{call}(..., loss_everywhere=True) gives it to all ranks"
    )


def explain_forward(rank: int) -> None:
    """Have an error that comes of the output of ``pipe(x)``, or of none, say what to do.

    Args:
        rank: which has the last stage.
    """
    _explain(
        f"pipe(...) gives the output of the model on rank {rank} of the pipeline, which has the "
        f"last stage, and None elsewhere; it has no gradients. {_TRAIN}"
    )


def _explain(text: str) -> None:
    world = entered()
    if world is None:
        return

    def hint(error: BaseException) -> str | None:
        is_of_none = isinstance(error, AttributeError | TypeError) and "NoneType" in str(error)
        is_of_graph = isinstance(error, RuntimeError) and _NO_GRADIENT in str(error)
        return text if is_of_none or is_of_graph else None

    world.hints["Pipeline"] = hint
