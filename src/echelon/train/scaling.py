"""Loss scaling for float16, with the same scale and the same skipped steps on all ranks.

Torch's ``GradScaler`` inspects the gradients of its own process. If every rank holds only a part of
them, a gradient that is not finite is on one rank only. That rank would skip the step and the
others would not, and from then on the ranks would hold weights of different steps.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, final

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from echelon import checks
from echelon.comm.group import Group
from echelon.comm.start_facts import agree
from echelon.comm.streams import device_of
from echelon.errors import ArgumentError, StateError

_LARGEST = torch.finfo(torch.float32).max  # the scale is one number of float32


@final
class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose ranks skip a step together.

    Law: after ``update()`` the scale is the same on all ranks, and either all ranks have stepped or
    none has.

    All ranks call ``unscale_`` and ``step`` for the same optimizers in the same order: for each
    optimizer there is one all-reduce of three numbers. ``ec.clip_grad_norm_`` is called between
    the two, as with torch.

    Call ``scale`` where there is a loss: for a ``Pipeline`` that is the rank of the last stage, in
    its ``loss_fn``.

    Args:
        group: the ranks that step together: those that share the model.
        device: the kind of device of the gradients; None: that of the group.
        init_scale: the factor of the first losses.
        growth_factor: the scale is multiplied by it after ``growth_interval`` steps.
        backoff_factor: the scale is multiplied by it when a step was skipped.
        growth_interval: the number of steps in a row, none of them skipped, after which the scale
            grows.
        enabled: whether to scale; with False the methods change nothing.

    Raises:
        ArgumentError: ``group`` is not a ``Group``, or a number cannot be used.
        StartMismatch: the options differ between ranks; every rank raises it.

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
            "growth_interval": checks.integer("growth_interval", growth_interval, low=1),
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
        """Multiply ``outputs``, a tensor or several, by the scale."""
        self._has_scaled = True
        return super().scale(outputs)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        # Torch makes the scale with the first loss; a rank without the last stage has no loss.
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
        """As torch's, for all ranks together; no step without a scaled loss."""
        # Torch refuses float16 gradients, because it assumes a model without master weights. Here
        # they may be reduced gradients that are float16 on purpose.
        with DisableTorchFunctionSubclass():  # of its own gradients; the ranks agree below
            if _has_gradients_on_host(optimizer):
                # Torch copies both to the host without a wait, and reads them there at once.
                inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
            infinite = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        device = self._group.device
        # Whether this rank has a gradient that is not finite, has gradients, has scaled a loss.
        flags = device_of(device).numbers([0.0, 0.0, float(self._has_scaled)], torch.float32)
        for flag in infinite.values():
            flags[0] = torch.maximum(flags[0], flag.to(device))
            flags[1] = 1
        self._group.all_reduce(flags, "max", label="whether gradients are finite")
        any_infinite, any_gradients, any_scaled = flags
        if not (self._has_scaled or any_scaled):
            raise StateError(
                "no rank has scaled a loss before this step: call scaler.scale(loss).backward(), "
                "or give a Pipeline loss_fn=lambda output, target: scaler.scale(loss(output, "
                "target))"
            )
        for flag in infinite.values():
            flag.copy_(any_infinite)
        if not infinite and any_gradients:
            infinite[device] = any_infinite.clone()  # this rank steps with the others
        return infinite


def _has_gradients_on_host(optimizer: torch.optim.Optimizer) -> bool:
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return any(p.grad is not None and device_of(p.grad.device).is_host for p in params)


def _kind(device: object) -> str:
    """Return ``device`` if it is the name of a device."""
    try:
        if isinstance(device, str):
            torch.device(device)
            return device
    except RuntimeError:
        pass
    raise ArgumentError(f"device is {device!r:.80}; give a kind of device, such as 'cuda'")
