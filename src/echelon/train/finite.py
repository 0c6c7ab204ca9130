"""A check of the loss and the gradients of each step, with the same answer on all ranks.

Each rank has its own loss and, with sharding or stages, its own part of the gradients. If only the
rank with NaN or Inf raised an error or skipped the step, the others would wait for it, or train on
with weights of another step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon import checks
from echelon.comm.group import Group
from echelon.comm.start_facts import agree, gather_json
from echelon.comm.torch_function import without_torch_function
from echelon.errors import ArgumentError, NonFiniteError, StateError
from echelon.modules.norms import by_kind
from echelon.modules.sharded_tensor import unmarked
from echelon.state.sharded_state import HasShards

MOST_SKIPS = 10


class NonFinite(Enum):
    """What all ranks do after a step whose loss or gradients are not finite."""

    RAISE = "every rank raises NonFiniteError"
    SKIP = "the step is left out, its gradients are dropped, and training goes on"
    STOP = "the step is left out, its gradients are dropped, and training is to end"


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepNumbers:
    """The numbers of this rank to check, besides its gradients."""

    loss: Tensor | None
    norm: Tensor | None


@final
class FiniteGuard:
    """Whether a step may be taken: not if a loss or a gradient has NaN or Inf, on any rank.

    Law: all ranks get the same answer, and a step that is left out changes neither parameters nor
    the state of the optimizer.

    Call ``allows_step`` in each step, when gradients are complete. It reads the gradients once, or
    only their norm, and does one all-reduce of one number. Only if a number is not finite, a
    further exchange determines which one and on which rank.

    After the reduction, a NaN of one rank is in the gradients of all ranks. Then the losses tell
    from whose batch it comes.

    Args:
        model: plain, or in ``DDP``, ``FSDP`` or ``Pipeline``.
        group: the ranks that train together, such as ``world.group``.
        action: what to do; the same on all ranks.
        most_skips: with ``SKIP``, how many steps in a row are left out before the next one raises;
            None: 10.
        first_step: the number of the first step, for messages; more than 1 after a resume.

    Attributes:
        step: the number of the step that was checked last.
        skipped: how many steps ``SKIP`` has left out.
        stopped: whether ``STOP`` has ended the training.
        found: the error of the last step that was left out; None before the first.

    Raises:
        ArgumentError: ``model``, ``group`` or an option cannot be used, or ``group`` lacks a rank
            with which the model is shared.
        StartMismatch: the options differ between ranks.

    Example:
        >>> def main(world):
        ...     weight = nn.Linear(1, 1)
        ...     optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
        ...     guard = FiniteGuard(weight, world.group, action=NonFinite.SKIP)
        ...     x = torch.tensor([float("nan") if world.rank == 1 else 1.0])
        ...     loss = weight(x).sum()
        ...     loss.backward()
        ...     if guard.allows_step(loss):
        ...         optimizer.step()
        ...     return guard.skipped, guard.found.losses
        >>> from echelon.launch.run import run
        >>> run(main, ranks=2)
        [(1, {1: 'nan'}), (1, {1: 'nan'})]
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        *,
        action: NonFinite = NonFinite.RAISE,
        most_skips: int | None = None,
        first_step: int = 1,
    ) -> None:
        _check_arguments(model, group)
        checks.one_of("action", action, list(NonFinite))
        if most_skips is not None and action is not NonFinite.SKIP:
            raise ArgumentError(f"most_skips is {most_skips!r:.80}, and {action} skips nothing")
        most_skips = MOST_SKIPS if most_skips is None else most_skips
        self._most_skips = checks.integer("most_skips", most_skips)
        self.step = checks.integer("first_step", first_step) - 1
        options = {"action": action.name, "most_skips": self._most_skips, "first_step": first_step}
        agree(group, {f"option {name} of FiniteGuard": value for name, value in options.items()})
        self._model, self._group, self._action = model, group, action
        self.skipped = self._in_a_row = 0
        self.stopped = False
        self.found: NonFiniteError | None = None

    def allows_step(self, loss: Tensor | float | None, norm: Tensor | float | None = None) -> bool:
        """Whether loss and gradients are finite on all ranks. All ranks call it, once a step.

        Args:
            loss: the loss of this rank, not scaled; None on a rank without a loss, as in a pipeline
                on ranks that do not have the last stage.
            norm: the norm of all gradients that ``ec.clip_grad_norm_`` returned on every rank;
                with it, the gradients are not read.

        Returns:
            True; or, with ``SKIP`` and ``STOP``, False, and gradients are None.

        Raises:
            NonFiniteError: on all ranks, with ``RAISE`` or after ``most_skips``; gradients stay.
            StateError: the guard has stopped already.
        """
        if self.stopped:
            raise StateError(
                f"allows_step() after step {self.step}, in which this guard has stopped the "
                "training: leave the loop when guard.stopped is True"
            )
        numbers = _StepNumbers(
            loss=None if loss is None else _number("loss", loss),
            norm=None if norm is None else _number("norm", norm),
        )
        self.step += 1
        alarm = self._alarm(numbers)
        self._group.all_reduce(alarm, "max", label="whether the step is finite")
        error = self._error(numbers) if alarm.item() else None
        if error is None:
            self._in_a_row = 0
            return True
        raises = self._action is NonFinite.RAISE
        if raises or (self._action is NonFinite.SKIP and self._in_a_row == self._most_skips):
            raise error
        self.found = error
        self._model.zero_grad()
        if self._action is NonFinite.STOP:
            self.stopped = True
        else:
            self.skipped += 1
            self._in_a_row += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """How many steps were checked and skipped, for ``ec.save`` and ``ec.Blackbox``."""
        return {"step": self.step, "skipped": self.skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from a state that ``state_dict`` returned.

        Raises:
            ArgumentError: it is no such state.
        """
        names = ("step", "skipped", "in_a_row")
        if not isinstance(state_dict, dict) or state_dict.keys() != {*names}:
            raise ArgumentError(f"the state of a FiniteGuard has {', '.join(names)}")
        step, skipped, in_a_row = (checks.integer(name, state_dict[name]) for name in names)
        self.step, self.skipped, self._in_a_row = step, skipped, in_a_row

    @without_torch_function
    def _gradients(self) -> dict[str, Tensor]:
        """The numbers of each gradient of this rank, by the name of the parameter."""
        gradients = {}
        for name, param in self._model.named_parameters():
            if param.grad is not None and param.grad.numel():
                grad = unmarked(param.grad).detach()
                gradients[name] = _wide(grad.coalesce().values() if grad.is_sparse else grad)
        return gradients

    @without_torch_function
    def _alarm(self, numbers: _StepNumbers) -> Tensor:
        """One if this rank has, or may have, a number that is not finite; else zero.

        A norm is finite only if all its numbers are. It may be infinite also if they are large.
        """
        device = self._group.device
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for value in (numbers.loss, numbers.norm):
            if value is not None:
                total += value.abs().sum().to(device)
        for kind in by_kind(self._gradients().values()) if numbers.norm is None else ():
            # The norm may be too large for a narrow dtype.
            dtype = torch.float32 if kind[0].dtype.itemsize < 4 else None
            norms = torch.stack(torch._foreach_norm(kind, 2.0, dtype=dtype))
            total += norms.sum().to(device)
        return total.isfinite().logical_not().to(torch.float32)

    def _error(self, numbers: _StepNumbers) -> NonFiniteError | None:
        """The error of all ranks; None if it was a false alarm. All ranks call it."""
        gradients = {name: _text(gradient) for name, gradient in self._gradients().items()}
        local_texts = {
            "loss": _text(numbers.loss),
            "norm": _text(numbers.norm),
            "gradients": {name: text for name, text in gradients.items() if text},
        }
        all_texts = gather_json(self._group, local_texts, "what is not finite")
        by_rank = dict(zip(self._group.ranks, all_texts, strict=True))
        losses = {rank: texts["loss"] for rank, texts in by_rank.items() if texts["loss"]}
        norms = {rank: texts["norm"] for rank, texts in by_rank.items() if texts["norm"]}
        by_name: dict[str, dict[int, str]] = {}
        for rank, texts in by_rank.items():
            for name, text in texts["gradients"].items():
                by_name.setdefault(name, {})[rank] = text
        if by_name:
            norms = {}  # the gradients explain them
        if not (losses or by_name or norms):
            return None
        return NonFiniteError(self.step, losses, by_name, norms, skipped=self._in_a_row)


@without_torch_function
def _text(values: Tensor | None) -> str:
    """``nan``, or ``2 nan, 1 -inf of 6``; empty if all is finite."""
    if values is None:
        return ""
    parts = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    counts = {
        "nan": int(parts.isnan().sum()),
        "inf": int(parts.isposinf().sum()),
        "-inf": int(parts.isneginf().sum()),
    }
    counts = {name: count for name, count in counts.items() if count}
    if not counts or parts.numel() == 1:
        return "".join(counts)
    return ", ".join(f"{count} {name}" for name, count in counts.items()) + f" of {parts.numel()}"


def _wide(values: Tensor) -> Tensor:
    """Convert floating point numbers of 8 bits, with which torch cannot compute, to float32."""
    narrow = values.is_floating_point() and values.dtype.itemsize == 1
    return values.float() if narrow else values


def _number(name: str, value: object) -> Tensor:
    if isinstance(value, Tensor) and value.dtype != torch.bool:
        return _wide(value.detach())
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an integer that no float can hold is as good as infinite
            number = math.inf if value > 0 else -math.inf
        return torch.tensor(number, dtype=torch.float64, device="cpu")
    raise ArgumentError(f"{name} is {value!r:.80}; give a tensor, a number, or None for none")


def _check_arguments(model: nn.Module, group: Group) -> None:
    checks.instance("model", model, nn.Module)
    checks.instance("group", group, Group)
    for name, module in model.named_modules():
        for axis in module.shared_over() if isinstance(module, HasShards) else ():
            if missing := sorted({*axis.ranks} - {*group.ranks}):
                raise ArgumentError(
                    f"group has ranks {list(group.ranks)}, and {name or 'the model'} "
                    f"({type(module).__name__}) is trained with ranks {missing} too: give the "
                    "group of all, such as world.group"
                )
