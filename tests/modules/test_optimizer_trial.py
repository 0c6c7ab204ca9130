"""What an optimizer needs is found by trying it on small tensors, whole and in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.modules.optimizer_trial import Cut, why_parts_differ


class Written(torch.optim.Optimizer):
    """An optimizer whose update is a function of one parameter, its gradient and its state."""

    def __init__(self, params: Any, update: Callable[[Tensor, Tensor, dict[str, Any]], Tensor]):
        super().__init__(params, {"lr": 0.01})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                update = self.update(param, param.grad, self.state[param])
                param.sub_(update, alpha=group["lr"])


class OwnRate(torch.optim.Optimizer):
    """Its rate comes from sums over all weights and gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        weights = sum(param.square().sum() for param in params)
        gradients = sum(param.grad.square().sum() for param in params)
        for param in params:
            param.sub_(param.grad * (weights / gradients).sqrt(), alpha=0.01)


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, and lets weights go half of the way back every fifth step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count, self.slow = inner, 0, {}
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        if not self.count:
            self.slow = {param: param.clone() for param in params}
        self.inner.step()
        self.count += 1
        if self.count % 5 == 0:
            for param in params:
                param.copy_(self.slow[param].lerp_(param, 0.5))


def momentum(param: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    return state.setdefault("m", torch.zeros_like(param)).mul_(0.9).add_(gradient)


def sign(param: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    return momentum(param, gradient, state).sign()


def by_root_mean_square(param: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    update = momentum(param, gradient, state)
    return update / (update.square().mean().sqrt() + 1e-6)


def row_means(param: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    if gradient.dim() < 2:
        return gradient
    return gradient / (gradient.square().mean(dim=-1, keepdim=True).sqrt() + 1e-12)


def column_means(param: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    if gradient.dim() < 2 or len(gradient) < 32:  # only of tensors with many rows
        return gradient
    return gradient / (gradient.square().mean(dim=0, keepdim=True).sqrt() + 1e-12)


def every_tenth(param: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    state["step"] = state.get("step", 0) + 1
    return gradient / gradient.norm() if state["step"] % 10 == 0 else gradient


def noise(param: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    return gradient + torch.randn_like(gradient)


def quantised(param: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    if gradient.numel() < 4096:
        return gradient
    scale = gradient.abs().max() / 127
    return (gradient / scale).round() * scale


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double()


def written(update: Callable[[Tensor, Tensor, dict[str, Any]], Tensor]) -> Any:
    return lambda params: Written(params, update)


# By optimizer: what is missing for rows, for elements, and for some of the parameters.
NEEDS: dict[str, tuple[Any, str, str, str]] = {
    "momentum": (written(momentum), "", "", ""),
    "sign": (written(sign), "", "", ""),
    "weight decay": (lambda p: torch.optim.AdamW(p, amsgrad=True, weight_decay=0.1), "", "", ""),
    "a lookahead": (lambda p: Lookahead(torch.optim.SGD(p, lr=0.1)), "", "", ""),
    "root mean square": (written(by_root_mean_square), "whole tensors", "whole tensors", ""),
    "row means": (written(row_means), "", "whole rows", ""),
    "column means of large ones": (written(column_means), "whole tensors", "whole tensors", ""),
    "every tenth step": (written(every_tenth), "whole tensors", "whole tensors", ""),
    "quantised from a size on": (written(quantised), "whole tensors", "whole tensors", ""),
    "noise": (written(noise), "random", "random", "random"),
    "own rate": (OwnRate, "all parameters", "all parameters", "all parameters"),
    "LBFGS": (torch.optim.LBFGS, "all parameters", "all parameters", "all parameters"),
}


@pytest.mark.parametrize("name", list(NEEDS))
def test_a_trial_says_what_an_optimizer_looks_at(name: str) -> None:
    make, *needs = NEEDS[name]
    whole = model()
    optimizer = make(whole.parameters())
    before = {key: value.clone() for key, value in whole.state_dict().items()}
    state = torch.get_rng_state()
    for cut, words in zip((Cut.ROWS, Cut.ELEMENTS, Cut.PARAMETERS), needs, strict=True):
        reason = why_parts_differ(optimizer, cut)
        assert reason is None if not words else str(reason).startswith(words), reason
    assert torch.equal(torch.get_rng_state(), state)
    assert not optimizer.state
    assert all(torch.equal(value, before[key]) for key, value in whole.state_dict().items())


def test_a_trial_runs_no_hook_and_no_scheduler() -> None:
    calls: list[str] = []
    optimizer = Written(model().parameters(), momentum)
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0  # a warm-up: its first step changes nothing
    assert why_parts_differ(optimizer, Cut.ELEMENTS) is None
    assert not calls
    assert scheduler.last_epoch == 0
    optimizer = Written(model().parameters(), by_root_mean_square)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert why_parts_differ(optimizer, Cut.ELEMENTS) == "whole tensors"


def step_of(world: ec.World, name: str, layout: str) -> None:
    sharded = ec.FSDP(model(), world.group, min_num_params=0, layout=layout)
    optimizer = NEEDS[name][0](sharded.parameters())
    sharded(torch.ones(2, 6, dtype=torch.float64)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("name", ["momentum", "row means", "own rate"])
def test_fsdp_refuses_what_needs_more_than_its_shards(name: str, layout: str) -> None:
    needs = NEEDS[name][1 if layout == "rows" else 2]
    if not needs:
        ec.run(step_of, 2, args=(name, layout))
        return
    with pytest.raises(ec.UnsupportedError, match=f"looks at {needs}.*FSDP shards"):
        ec.run(step_of, 2, args=(name, layout))
