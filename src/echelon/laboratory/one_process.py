"""The training on one process that a comparison takes as right: each step on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from echelon.errors import ArgumentError, UnsupportedError
from echelon.laboratory.batch_rows import Loss, Row, batch_tensors, model_call, select_from
from echelon.laboratory.value_recorder import TrainingValues, ValueRecorder
from echelon.modules.nested import cast_floats
from echelon.pipeline.microbatch import join_microbatches

SEED = 0  # of the model, and of each process before it trains
# How far weights are moved to see what rounding does: more than float64 rounds, so that float32
# inside of a model rounds to other numbers, and far less than what counts as a difference.
_ROUNDING = 2.0**-42
# By how much backward is scaled to see the same: ranks divide by fewer rows than one process, so
# float32 inside of a model rounds their gradients to other numbers, unless by a power of 2.
_SCALE = 1.7
MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def initial_stream() -> Tensor:
    """The state of the random stream that every process and rank starts to train with."""
    return torch.Generator().manual_seed(SEED).get_state()


@final
@dataclass(frozen=True, slots=True)
class BatchPart:
    """Rows of a batch that one forward takes, and the state of the random stream before it."""

    rows: tuple[Row, ...]
    stream: Tensor


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class OneProcess:
    """How one process trains.

    Attributes:
        make_model: the model, in any dtype; it is converted to float64.
        batches: one for each step.
        loss_fn: of an output and a target.
        optimizer: makes one of parameters.
        clip: the largest norm of the gradient; None for any.
        parts: for each step, the parts of its batch that go through the model one by one. That is
            how the random numbers of several ranks are drawn again. None: the batch at once.
        is_perturbed: whether weights start one rounding error away, and the rows of a batch come
            in another order; what then differs is rounding.
    """

    make_model: MakeModel
    batches: Sequence[Any]
    loss_fn: Loss
    optimizer: MakeOptimizer
    clip: float | None = None
    parts: Sequence[Sequence[BatchPart]] | None = None
    is_perturbed: bool = False

    def perturbed(self) -> OneProcess:
        """The same training, in which only rounding differs."""
        return replace(self, is_perturbed=True)

    def make(self) -> nn.Module:
        """The model as every training starts from it, in float64.

        Raises:
            ArgumentError: ``make_model`` returns no module.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model: object = self.make_model()
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"make_model returned {model!r:.80}; return a new nn.Module")
        return model.double()

    def train(self) -> TrainingValues:
        """What one process computes.

        Raises:
            ArgumentError: the loss is no scalar that depends on the parameters.
            UnsupportedError: the model does not run in float64.
        """
        model = self.make()
        if self.is_perturbed:
            _perturb(model)
        recorder = ValueRecorder(model)
        optimizer = self._optimizer_of(model)
        with recorder.recording(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            for step in range(len(self.batches)):
                self._backward(model, self.loss(model, step))
                if self.clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
                optimizer.step()
                optimizer.zero_grad()
        return recorder.finish(None)

    def _optimizer_of(self, model: nn.Module) -> Optimizer:
        optimizer: object = self.optimizer(list(model.parameters()))
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(
                f"optimizer returned {optimizer!r:.80}; return a new torch.optim.Optimizer of the "
                "parameters that it gets"
            )
        return optimizer

    def _backward(self, model: nn.Module, loss: Tensor) -> None:
        """Compute gradients; with others along the way, if what differs is to be rounding."""
        if not self.is_perturbed:
            loss.backward()
            return
        (loss * _SCALE).backward()
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= _SCALE

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """The loss of the whole batch of a step."""
        batch = self.batches[step]
        if self.parts is None:
            if self.is_perturbed:
                batch = _reversed(batch)
            return self.loss_of(model, batch)
        outputs: list[Any] = []
        rows: list[Row] = []
        for part in self.parts[step]:
            torch.set_rng_state(part.stream)
            call = model_call(select_from(self.batches, part.rows))
            outputs.append(model(*call.args, **call.kwargs))
            rows += part.rows
        target = model_call(select_from(self.batches, rows)).target
        return self._checked(self.loss_fn(_joined(outputs), target))

    def loss_of(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch that goes through the model at once."""
        call = model_call(batch)
        try:
            output = model(*call.args, **call.kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise self._explained(error, batch) from error
        return self._checked(self.loss_fn(output, call.target))

    def _explained(self, error: Exception, batch: Any) -> Exception:
        """What to say of a model that fails in float64: whether it runs in float32."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = self.make_model().float()
            call = model_call(cast_floats(batch, Tensor.float))
            try:
                model(*call.args, **call.kwargs)
            except Exception:  # it does not run at all: the model's own error says why
                return error
        return UnsupportedError(
            f"the model runs in float32 and not in float64, in which trainings are compared: "
            f"{error}. Let its operators take float64, for instance without a fixed dtype in "
            "forward"
        )

    def _checked(self, loss: object) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else loss
            raise ArgumentError(
                f"loss_fn returned {what!s:.80}; return one number for the batch, such as a mean"
            )
        if not loss.requires_grad:
            raise ArgumentError(
                "loss_fn returned a number that does not depend on the parameters of the model: "
                "compute it from the output, without detach() or item()"
            )
        return loss.reshape(())


def _reversed(batch: Any) -> Any:
    """The rows of a batch in the other order."""
    return pytree.tree_map(lambda leaf: leaf.flip(0) if isinstance(leaf, Tensor) else leaf, batch)


@torch.no_grad()
def _perturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(SEED)
    for param in model.parameters():
        if param.is_floating_point():
            drawn = torch.randint(-1, 2, param.shape, generator=generator, device="cpu")
            signs = drawn.to(param.device)
            param.mul_(1 + signs * _ROUNDING)


def _joined(outputs: Sequence[Any]) -> Any:
    """The output of a batch from those of its parts."""
    if any(not tensor.dim() for tensor in batch_tensors(outputs[0])):
        raise UnsupportedError(
            "the model draws random numbers and returns a number for a whole batch, which "
            "cannot be put together from those of ranks: return outputs by rows, and compute "
            "the loss in loss_fn"
        )
    return join_microbatches(outputs)
