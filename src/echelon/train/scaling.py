"""Loss scaling for float16, of which all ranks of a group hold the same opinion.

Torch's ``GradScaler`` looks at the gradients of its own process. When every rank holds only its
part of them, one that is not finite reaches one owner only: that rank would skip the step and the
others would not, and from then on the weights would belong to no model.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from echelon import checks
from echelon.comm.group import Group
from echelon.comm.start_facts import agree
from echelon.errors import ArgumentError, StateError

_LARGEST = torch.finfo(torch.float32).max  # the scale is one number of float32


@final
class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose ranks skip a step together.

    Law: after ``update()`` the scale is the same on all ranks, and either all ranks have stepped or
    none has.

    All ranks call ``unscale_`` and ``step`` for the same optimizers in the same order: each
    optimizer is looked at with one all-reduce of three numbers. ``ec.clip_grad_norm_`` belongs
    between the two, as with torch.

    ``scale`` is called where there is a loss: of a ``Pipeline`` on the rank of the last stage, in
    its ``loss_fn``.

    Args:
        group: the ranks that step together: those that share the model.
        device: kind of device of the gradients; None: that of the group.
        init_scale: what the first losses are multiplied by.
        growth_factor: what the scale is multiplied by after ``growth_interval`` steps.
        backoff_factor: what the scale is multiplied by when a step was skipped.
        growth_interval: steps in a row without a skipped one after which the scale grows.
        enabled: whether to scale at all; False leaves a plain loop.

    Raises:
        ArgumentError: ``group`` is no group, or a number is none that can scale.
        StartMismatch: ranks have other numbers; on all of them.

    Example:
        >>> def main(world):
        ...     weight = torch.nn.Parameter(torch.ones(1))
        ...     optimizer = torch.optim.SGD([weight], lr=1.0)
        ...     scaler = GradScaler(world.group, init_scale=8.0)
        ...     scaler.scale(weight * (float("inf") if world.rank else 1.0)).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        ...     return weight.item(), scaler.get_scale()
        >>> from echelon.launch.run import run
        >>> run(main, ranks=2)
        [(1.0, 4.0), (1.0, 4.0)]
    """

    def __init__(
        self,
        group: Group,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        checks.instance("group", group, Group)
        device = str(group.device).partition(":")[0] if device is None else _kind(device)
        checks.flag("enabled", enabled)
        options: dict[str, Any] = {
            "init_scale": checks.positive("init_scale", init_scale, _LARGEST),
            "growth_factor": checks.positive("growth_factor", growth_factor, _LARGEST),
            "backoff_factor": checks.positive("backoff_factor", backoff_factor),
            "growth_interval": checks.whole("growth_interval", growth_interval, low=1),
            "enabled": enabled,
        }
        if not options["backoff_factor"] < 1 < options["growth_factor"]:
            raise ArgumentError(
                f"growth_factor is {growth_factor} and backoff_factor {backoff_factor}: the first "
                "must be above 1, so that the scale grows, and the second below"
            )
        agree(group, {f"option {name} of GradScaler": value for name, value in options.items()})
        super().__init__(device, **options)
        self._group = group
        self._has_scaled = False

    def scale(self, outputs: Any) -> Any:
        """``outputs``, one tensor or several, times the scale."""
        self._has_scaled = True
        return super().scale(outputs)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        # Torch makes the scale with the first loss, which a rank without the last stage never has.
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(self._group.device)
        return super()._check_scale_growth_tracker(funcname)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """As torch's, for all ranks.

        Raises:
            StateError: no rank has scaled a loss.
        """
        # Torch refuses float16 gradients, because it takes them for those of a model without
        # master weights. Here they may be reduced ones that were kept so on purpose.
        infinite = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        device = self._group.device
        # Something is not finite; something was looked at; a loss was scaled.
        mine = torch.tensor([0.0, 0.0, float(self._has_scaled)], device=device)
        for flag in infinite.values():
            mine[0] = torch.maximum(mine[0], flag.to(device))
            mine[1] = 1
        self._group.all_reduce(mine, "max", label="whether gradients are finite")
        if not (self._has_scaled or mine[2]):
            raise StateError(
                "no rank has scaled a loss before this step: call scaler.scale(loss).backward(), "
                "or give a Pipeline loss_fn=lambda output, target: scaler.scale(loss(output, "
                "target))"
            )
        for flag in infinite.values():
            flag.copy_(mine[0])
        if not infinite and mine[1]:
            infinite[device] = mine[0].clone()  # a rank without gradients steps with the others
        return infinite


def _kind(device: object) -> str:
    """``device``, if it is the text of a device."""
    try:
        if isinstance(device, str):
            torch.device(device)
            return device
    except RuntimeError:
        pass
    raise ArgumentError(f"device is {device!r:.80}; give a kind of device, such as 'cuda'")
