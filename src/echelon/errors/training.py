"""Models and steps that went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.errors.echelon_error import MOST_ROWS, EchelonError, by_value, rows_text


class ModelMismatch(EchelonError):
    """The ranks of one group hold different models.

    Attributes:
        found: what each rank has, by rank.
    """

    def __init__(
        self,
        what: str,
        found: Mapping[int, str],
        do: str = "Build the same model on every rank.",
    ) -> None:
        self.found = dict(found)
        super().__init__(
            f"the models of the ranks differ in {what}:\n{rows_text(self.found)}\n{do}"
        )


class StageError(EchelonError):
    """A stage of a pipeline, or the loss, raised.

    Attributes:
        stage: which.
        microbatch: of which part of the batch; None for what is done for the whole stage.
    """

    def __init__(
        self,
        stage: int,
        microbatch: int | None,
        action: str,
        recent: Sequence[str],
        cause: BaseException,
    ) -> None:
        of = "" if microbatch is None else f" for microbatch {microbatch}"
        super().__init__(
            f"stage {stage} raised {type(cause).__name__}{of}, in action {action}: {cause}. "
            f"Its last actions: {' '.join(recent) or 'none'}"
        )
        self.stage, self.microbatch = stage, microbatch


class NonFiniteError(EchelonError, FloatingPointError):
    """A step whose loss or gradients have NaN or Inf on some rank.

    Attributes:
        step: its number.
        losses: the losses that are not finite, by rank in the job.
        gradients: what is not finite in them, by name of the parameter and rank in the job.
        norms: the norms of all gradients that are not finite although each gradient is, by rank.
        skipped: how many steps in a row before this one were not finite either, and left out.
    """

    def __init__(
        self,
        step: int,
        losses: Mapping[int, str],
        gradients: Mapping[str, Mapping[int, str]],
        norms: Mapping[int, str] | None = None,
        *,
        skipped: int = 0,
    ) -> None:
        self.step, self.skipped = step, skipped
        self.losses, self.norms = dict(losses), dict(norms or {})
        self.gradients = {name: dict(found) for name, found in gradients.items()}
        rows = [f"  loss: {by_value(self.losses)}"] if losses else []
        shown = list(self.gradients.items())[:MOST_ROWS]
        rows += [f"  gradient of {name!r}: {by_value(found)}" for name, found in shown]
        if more := len(self.gradients) - len(shown):
            rows.append(f"  and the gradients of {more} more parameters")
        if self.norms:
            rows.append(f"  norm of the gradients: {by_value(self.norms)}")
        before = f", after {skipped} steps in a row that were skipped" if skipped else ""
        super().__init__(
            f"step {step} is not finite{before}:\n" + "\n".join(rows) + "\n"
            "No rank has taken it. Look at the batches of the ranks whose loss is named, or else "
            "at the learning rate and at divisions, logarithms and roots of the model."
        )
