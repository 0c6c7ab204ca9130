"""What an optimizer needs is found by trying it on small tensors, whole and in parts."""

from __future__ import annotations

from collections import deque
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


class GrowingRate(torch.optim.Optimizer):
    """Its rate is a largest number so far, which no sum over all weights has exceeded yet."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rate": 1.0, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                group["numerator"] += 1e-9 * (param * param.grad).sum().item()
            group["rate"] = max(group["rate"], group["numerator"])
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["rate"] * 0.01)


class RateOfLoss(torch.optim.Optimizer):
    """Its rate is the loss, if its step has a closure."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            rate = 1.0 if closure is None else float(closure())
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=rate * 0.01)


class Prepared(torch.optim.Optimizer):
    """Goes half of the way back to what it keeps since it was made, in one of several places."""

    def __init__(self, params: Any, place: str) -> None:
        super().__init__(params, {})
        self.place = place
        self.slow: Any = None
        if place == "a list for each group":
            self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]
        elif place == "a dict":
            self.slow = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}
        else:
            for param in self.param_groups[0]["params"]:
                self.state[param]["slow"] = param.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for i, group in enumerate(self.param_groups):
            for j, param in enumerate(group["params"]):
                if self.place == "a list for each group":
                    slow = self.slow[i][j]
                else:
                    slow = self.slow[param] if self.slow else self.state[param]["slow"]
                param.sub_(param.grad, alpha=0.01)
                param.copy_(slow.lerp_(param, 0.5))


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


def late_preconditioner(param: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    """By what it keeps of the columns of a matrix, from a step on that no trial reaches."""
    state["step"] = state.get("step", 0) + 1
    if gradient.dim() == 2:
        gram = state.setdefault("gram", torch.zeros_like(gradient.T @ gradient))
        gram.add_(gradient.T @ gradient)
    return gradient if state["step"] < 10_000 else gradient @ state["gram"]


def late_norm(param: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    state["norm"] = 0.9 * state.get("norm", 0.0) + gradient.norm().item()
    return gradient


def late_row_norms(param: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    if gradient.dim() == 2:
        state["norms"] = gradient.norm(dim=1)
    return gradient


def last_gradients(param: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    last = state.setdefault("last", deque(maxlen=3))
    last.append(gradient.clone())
    state["stacked"] = torch.stack([gradient, gradient.square()])
    return sum(last, torch.zeros_like(gradient))


def covariance(param: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    """Has a matrix with the square of the elements of a tensor, if that has one dim."""
    assert gradient.numel() < 200
    if gradient.dim() == 1:
        return torch.outer(gradient, gradient) @ gradient
    return gradient


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
    "last gradients": (written(last_gradients), "", "", ""),
    "late preconditioner": (written(late_preconditioner), "whole tensors", "whole tensors", ""),
    "late norm": (written(late_norm), "whole tensors", "whole tensors", ""),
    "late row norms": (written(late_row_norms), "", "whole rows", ""),
    "growing rate": (GrowingRate, "all parameters", "all parameters", "all parameters"),
    "rate of the loss": (RateOfLoss, "the loss", "the loss", "the loss"),
    **{
        f"prepared in {place}": (lambda p, place=place: Prepared(p, place), "", "", "")
        for place in ("a list for each group", "a dict", "the state")
    },
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
    assert all(set(state) == {"slow"} for state in optimizer.state.values())
    assert all(torch.equal(value, before[key]) for key, value in whole.state_dict().items())


def test_a_trial_says_where_the_optimizer_keeps_what_it_has_seen() -> None:
    reason = why_parts_differ(GrowingRate(model().parameters()), Cut.ROWS)
    assert str(reason).endswith("of which it keeps param_groups[0]['numerator']")
    reason = why_parts_differ(Written(model().parameters(), late_norm), Cut.ELEMENTS)
    assert reason == "whole tensors, of which it keeps state['norm']"


@pytest.mark.parametrize("cut", [Cut.ELEMENTS, Cut.FLAT, Cut.ONE_FLAT])
def test_what_differs_on_tiny_tensors_is_not_tried_on_large_ones(cut: Cut) -> None:
    reason = why_parts_differ(Written(model().parameters(), covariance), cut)
    assert str(reason).startswith("whole tensors"), reason
    assert "AssertionError" not in str(reason)


class Counted(torch.optim.Optimizer):
    """Counts its steps; with ``norms`` it divides by norms of tensors."""

    steps = 0

    def __init__(self, params: Any, norms: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.norms = norms

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        Counted.steps += 1
        for param in (param for group in self.param_groups for param in group["params"]):
            norm = param.grad.norm() if self.norms == True else 1.0  # noqa: E712
            param.sub_(param.grad / norm, alpha=self.param_groups[0]["lr"])


def test_equal_optimizers_are_tried_once_and_others_each() -> None:
    def steps(*args: Any, cut: Cut = Cut.ROWS, small: bool = False) -> tuple[int, bool]:
        before = Counted.steps
        params = list(model().parameters())
        reason = why_parts_differ(Counted(params[:1] if small else params, *args), cut)
        return Counted.steps - before, reason is None

    assert steps(False)[0] > 0
    assert steps(False) == (0, True)
    for others in ({"small": True}, {"cut": Cut.FLAT}):
        assert steps(False, **others)[0] > 0  # type: ignore[arg-type]
        assert steps(False, **others) == (0, True)  # type: ignore[arg-type]
    assert steps(False, 0.2)[0] > 0
    assert steps(True)[1] is False
    assert steps(True) == (0, False)
    for _ in range(2):  # a tensor is compared with nothing
        assert steps(torch.tensor(True))[0] > 0


class CountedLBFGS(torch.optim.LBFGS):
    """Counts its steps, of which each looks at a long history."""

    steps = 0

    def step(self, closure: Any) -> Any:
        CountedLBFGS.steps += 1
        return super().step(closure)


def test_what_looks_at_all_parameters_is_found_in_a_few_steps_and_once() -> None:
    for steps in (range(1, 60), range(1)):
        before = CountedLBFGS.steps
        optimizer = CountedLBFGS(model().parameters(), max_iter=4, tolerance_change=0.0)
        assert str(why_parts_differ(optimizer, Cut.ROWS)).startswith("all parameters")
        assert CountedLBFGS.steps - before in steps


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
@pytest.mark.parametrize(
    "name", ["momentum", "row means", "own rate", "growing rate", "prepared in the state"]
)
def test_fsdp_refuses_what_needs_more_than_its_shards(name: str, layout: str) -> None:
    needs = NEEDS[name][1 if layout == "rows" else 2]
    if not needs:
        ec.run(step_of, 2, args=(name, layout))
        return
    with pytest.raises(ec.UnsupportedError, match=f"looks at {needs}.*FSDP shards"):
        ec.run(step_of, 2, args=(name, layout))
