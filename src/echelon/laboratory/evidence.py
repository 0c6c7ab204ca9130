"""What one process would compute on the rows of each rank, in the step in which a value differs.

The weights before that step are those of one process, so each rank's part of the step can be
computed again: its outputs, and the gradient that its own backwards gave, from its rows, its random
stream and the gradient of its output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.laboratory.batch_rows import model_call, select_from
from echelon.laboratory.causes import equal
from echelon.laboratory.gradient_causes import GradientParts, clip_scale
from echelon.laboratory.one_process import OneProcess
from echelon.laboratory.pieces import Piece
from echelon.laboratory.seen_rows import Forward
from echelon.laboratory.value_recorder import (
    RootCall,
    StepValues,
    TrainingValues,
    ValueRecorder,
    float_tensors,
)

Gradients = Mapping[str, Tensor]


@final
class StepAgain:
    """One step of a training on one process, again, with other rows.

    Args:
        training: how one process trains.
        expected: what it computed.
        step: the index of the step.
    """

    def __init__(self, training: OneProcess, expected: TrainingValues, step: int) -> None:
        self._training = training
        self._step = step
        self._parameters = expected.steps[step].parameters
        self._buffers = expected.steps[step - 1].buffers if step else []

    def _model(self) -> nn.Module:
        """The model as it was before the step."""
        model = self._training.make()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for piece in (*self._parameters, *self._buffers):
                if piece.values is not None and piece.name in tensors:
                    tensors[piece.name].copy_(piece.values)
        return model

    def whole_gradients(self) -> Gradients:
        """The gradients of the whole batch, before they are clipped."""
        model = self._model()
        with torch.random.fork_rng(devices=[]):
            self._training.loss(model, self._step).backward()
        return _gradients(model)

    def gradients(self, forward: Forward, *, with_own_loss: bool = False) -> Gradients:
        """The gradients of the loss of some rows.

        Args:
            with_own_loss: whether backward starts from the gradients that the rank's output had,
                instead of ``loss_fn``.
        """
        assert forward.rows is not None, "rows are known"
        model = self._model()
        batch = select_from(self._training.batches, forward.rows)
        with torch.random.fork_rng(devices=[]):
            if forward.root is not None:
                torch.set_rng_state(forward.root.stream)
            if with_own_loss and forward.root is not None:
                _backward(model, batch, forward.root)
            else:
                self._training.loss_of(model, batch).backward()
        return _gradients(model)

    def forward(self, forward: Forward) -> tuple[StepValues, Mapping[str, Tensor]]:
        """The outputs of all modules for some rows, and the buffers after them."""
        assert forward.rows is not None, "rows are known"
        model = self._model()
        recorder = ValueRecorder(model)
        call = model_call(select_from(self._training.batches, forward.rows))
        with torch.random.fork_rng(devices=[]), recorder.recording():
            if forward.root is not None:
                torch.set_rng_state(forward.root.stream)
            model(*call.args, **call.kwargs)
        return recorder.current, dict(model.named_buffers())


def _gradients(model: nn.Module) -> Gradients:
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in model.named_parameters()
    }


def _backward(model: nn.Module, batch: Any, root: RootCall) -> None:
    """Run the model, and backward from the gradients that its outputs had on a rank."""
    call = model_call(batch)
    outputs = float_tensors(model(*call.args, **call.kwargs))
    pairs = [
        (output, gradient.to(output.dtype))
        for output, gradient in zip(outputs, root.output_gradients, strict=False)
        if gradient is not None and gradient.shape == output.shape
    ]
    torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


# The gradients of all ranks ------------------------------------------------------------------


@final
class GradientEvidence:
    """What the gradients of a step would be for one reason or another.

    Args:
        again: the step.
        shares: the forwards of each data-parallel rank.
        share_of: which of the shares each rank has.
        clip: the largest norm of the gradient; None for any.
    """

    def __init__(
        self,
        again: StepAgain,
        shares: Sequence[Sequence[Forward]],
        share_of: Sequence[int],
        clip: float | None,
    ) -> None:
        self._share_of, self._clip = share_of, clip
        self.whole = again.whole_gradients()
        self.local: list[Gradients] = []
        self.mean_of_means: Gradients | None = None
        self.is_known = all(share and _all_known(share) for share in shares)
        self.by_rows = False
        if self.is_known:
            means = [[again.gradients(forward) for forward in share] for share in shares]
            self.local = [
                _own_gradients(again, share, mean)
                for share, mean in zip(shares, means, strict=True)
            ]
            self.mean_of_means = _combined([_combined(share) for share in means])
            self.by_rows = self._is_mean_by_rows(shares, means)

    def _is_mean_by_rows(
        self, shares: Sequence[Sequence[Forward]], means: Sequence[Sequence[Gradients]]
    ) -> bool:
        lengths = [len(forward.rows or ()) for share in shares for forward in share]
        each = [mean for share in means for mean in share]
        weights = [length / sum(lengths) for length in lengths]
        if len(set(lengths)) == 1:
            return False
        combined = _combined(each, weights)
        names = list(self.whole)
        return equal([combined[name] for name in names], [self.whole[name] for name in names])

    def parts(
        self,
        name: str,
        pieces: Sequence[tuple[int, Piece]],
        expected: Piece,
        before: Mapping[int, Piece],
    ) -> list[GradientParts]:
        """The parts of a gradient that the ranks have, by rank.

        Args:
            before: the parts that they had in the step before.
        """
        full = expected.flat.reshape(expected.shape)
        total, apart = self._total, self.clipped_apart
        parts = []
        for rank, piece in pieces:
            local = self.local[self._share_of[rank]] if self.is_known else None

            def range_of(gradients: Gradients | None, piece: Piece = piece) -> Tensor | None:
                return None if gradients is None else piece.of(gradients[name])

            old = before.get(rank)
            parts.append(
                GradientParts(
                    rank=rank,
                    observed=piece.flat,
                    expected=piece.of(full),
                    whole=piece.of(self.whole[name]),
                    local=range_of(local),
                    total=range_of(total),
                    mean_of_means=range_of(self.mean_of_means),
                    clipped_apart=range_of(apart),
                    before=old.flat if old is not None and old.numel == piece.numel else None,
                )
            )
        return parts

    @cached_property
    def _total(self) -> Gradients | None:
        return _combined(self.local, [1.0] * len(self.local)) if self.is_known else None

    @cached_property
    def clipped_apart(self) -> Gradients | None:
        """What the ranks' own gradients give that are clipped one by one; None if not known."""
        if not self.is_known:
            return None
        norms, clip = self.local_norms(), self._clip
        if clip is None and not all(norms):
            return None
        scales = [1 / (norm + 1e-6) if clip is None else clip_scale(norm, clip) for norm in norms]
        return _combined(self.local, [scale / len(norms) for scale in scales])

    def local_norms(self) -> tuple[float, ...]:
        """The norm of the gradient that each share's own backwards gave."""
        return tuple(norm_of(list(local.values())) for local in self.local)


def part_norms(gradients: Gradients | None, ranks: Sequence[StepValues]) -> tuple[float, ...]:
    """The norm of gradients over the ranges of each rank; empty if they are not known."""
    if gradients is None:
        return ()
    return tuple(
        norm_of([piece.of(gradients[piece.name]) for piece in values.gradients]) for values in ranks
    )


def observed_norms(ranks: Sequence[StepValues]) -> tuple[float, ...]:
    """The norm of what the optimizer of each rank got."""
    return tuple(norm_of([piece.flat for piece in values.gradients]) for values in ranks)


def _own_gradients(
    again: StepAgain, share: Sequence[Forward], means: Sequence[Gradients]
) -> Gradients:
    """What the backwards of a rank gave: exactly, if the gradients of its outputs are known."""
    is_recorded = all(
        forward.root is not None
        and any(gradient is not None for gradient in forward.root.output_gradients)
        for forward in share
    )
    if not is_recorded:
        return _combined(means)
    each = [again.gradients(forward, with_own_loss=True) for forward in share]
    return _combined(each, [1.0] * len(each))


def _all_known(share: Sequence[Forward]) -> bool:
    return all(forward.rows for forward in share)


def _combined(each: Sequence[Gradients], weights: Sequence[float] | None = None) -> Gradients:
    """The weighted sum of gradients; their mean without weights."""
    weights = [1 / len(each)] * len(each) if weights is None else weights
    return {
        name: torch.stack([w * g[name] for w, g in zip(weights, each, strict=True)]).sum(0)
        for name in each[0]
    }


def norm_of(tensors: Sequence[Tensor]) -> float:
    """The norm of several tensors together."""
    return float(torch.cat([t.double().reshape(-1) for t in tensors]).norm()) if tensors else 0.0
