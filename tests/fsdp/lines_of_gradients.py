"""Lines of ordinary scripts about groups of parameters and about gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tests.fsdp.plain_job import Job, build, right

# Groups and counts ---------------------------------------------------------------------------


@right
def decay_groups_by_dim(job: Job) -> Any:
    decayed = [p for p in job.params if p.dim() >= 2]
    others = [p for p in job.params if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    job.train(torch.optim.AdamW(groups, lr=0.01))
    return len(decayed), len(others)


@right
def learning_rate_by_fan_in(job: Job) -> Any:
    groups = [{"params": [p], "lr": 0.1 / (p.shape[-1] if len(p.shape) else 1)} for p in job.params]
    job.train(torch.optim.SGD(groups))
    return [group["lr"] for group in groups]


@right
def matrices_and_the_rest(job: Job) -> Any:
    matrices = [p for p in job.params if p.ndim == 2 and p.size(0) < 10]
    rest = [p for p in job.params if not any(p is other for other in matrices)]
    for optimizer in (job.sgd(matrices), torch.optim.AdamW(rest, lr=0.01)):
        job.train(optimizer, 1)
    return len(matrices)


@right
def counts(job: Job) -> Any:
    sizes = {
        name: (tuple(p.shape), p.numel(), len(p.shape)) for name, p in job.inner.named_parameters()
    }
    return sizes, sum(p.nbytes for p in job.params), [p.stride() for p in job.params]


@right
def unpacked_shape(job: Job) -> Any:
    rows, columns = job.inner.embed.weight.shape
    return rows, columns, len(job.inner.head.weight), torch.numel(job.inner.head.bias)


# Gradients -----------------------------------------------------------------------------------


@right
def clipped_by_hand(job: Job) -> Any:
    job.backward()
    total = sum(p.grad.pow(2).sum() for p in job.params).sqrt()
    for p in job.params:
        p.grad.mul_(min(1.0, 0.01 / (total.item() + 1e-6)))
    job.sgd().step()
    return total


@right
def clipped_by_torch(job: Job) -> Any:
    job.backward()
    norm = nn.utils.clip_grad_norm_(job.params, 0.01, error_if_nonfinite=True)
    job.sgd().step()
    return norm, nn.utils.get_total_norm([p.grad for p in job.params], math.inf)


@right
def clipped_by_value(job: Job) -> Any:
    job.backward()
    nn.utils.clip_grad_value_(job.params, 0.01)
    for p in job.params:
        p.grad.data.clamp_(-0.005, 0.005)
    job.sgd().step()


@right
def clipped_by_norm_of_each(job: Job) -> Any:
    job.backward()
    for p in job.params:
        if p.grad.norm() > 0.01:
            p.grad.mul_(0.01 / p.grad.norm())
    job.sgd().step()


@right
def adaptive_clipping(job: Job) -> Any:
    job.backward()
    for p in job.params:
        limit = p.detach().norm().clamp(min=1e-3) * 0.1
        p.grad.data.copy_(p.grad * (limit / p.grad.norm().clamp(min=limit)))
    job.sgd().step()


@right
def losses_balanced_by_norms(job: Job) -> Any:
    norms = []
    for step in range(2):
        job.model.zero_grad()
        job.backward(step)
        norms.append(torch.stack([p.grad.detach().norm() for p in job.params]).norm())
    return norms


@right
def finite_checks(job: Job) -> Any:
    job.backward()
    values = [p.grad.abs().max().item() for p in job.params]
    job.params[-1].grad.view(-1)[-1] = math.nan
    bad = [bool(torch.isnan(p.grad).any()) for p in job.params]
    good = [torch.isfinite(p.grad).all().item() for p in job.params]
    return values, bad, good, [int(p.grad.isnan().sum()) for p in job.params]


@right
def skipped_where_not_finite(job: Job) -> Any:
    optimizer = job.sgd()
    job.backward()
    job.params[0].grad.view(-1)[0] = math.inf
    if not any(p.grad.isinf().any() for p in job.params):
        optimizer.step()


@right
def scaled_by_torch(job: Job) -> Any:
    optimizer, scaler, scales = job.sgd(), torch.amp.GradScaler("cpu", init_scale=8.0), []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(job.loss(step)).backward()
        if step == 1:
            job.params[-1].grad.view(-1)[-1] = math.inf
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(job.params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@right
def gradients_zeroed_and_decayed(job: Job) -> Any:
    job.backward()
    with torch.no_grad():
        for p in job.params:
            p.grad = p.grad + 0.1 * p
    job.sgd().step()
    for p in job.params:
        p.grad.zero_()
    job.sgd().step()


@right
def noise_of_zero_and_sign(job: Job) -> Any:
    job.backward()
    for p in job.params:
        p.grad = torch.sign(p.grad) * torch.where(p.grad > 0, 1.0, 0.5) + torch.zeros_like(p)
    job.sgd().step()


@right
def gradients_kept_and_added(job: Job) -> Any:
    job.backward(0)
    kept = [p.grad.clone() for p in job.params]
    job.model.zero_grad()
    job.backward(1)
    dots = [torch.dot(k.flatten(), p.grad.flatten()) for k, p in zip(kept, job.params, strict=True)]
    for k, p in zip(kept, job.params, strict=True):
        p.grad.add_(k, alpha=0.5)
    job.sgd().step()
    return dots


@right
def gradients_dropped_one_by_one(job: Job) -> Any:
    job.backward(0)
    for p in job.params[::2]:
        p.grad = None
    for p in job.params[1::2]:
        del p.grad
    none = all(p.grad is None for p in job.params)
    job.backward(1)
    job.sgd().step()
    return none


@right
def gradients_scaled_and_put_back(job: Job) -> Any:
    job.backward()
    for p in job.params:
        kept = p.grad.data
        p.grad.data = p.grad.data * 2
        p.grad.data = kept
    return [p.grad.norm() for p in job.params]


@right
def gradients_put_aside_and_added(job: Job) -> Any:
    job.backward()
    kept = [p.grad.data for p in job.params]
    for p in job.params:
        p.grad.data = torch.zeros_like(p)
    job.backward(1)
    norms = [one.norm() for one in kept]
    for p, one in zip(job.params, kept, strict=True):
        p.grad.add_(one)
    return norms


@right
def gradients_exchanged(job: Job) -> Any:
    job.backward()
    a, b = job.inner.body[0].bias, job.inner.body[2].bias
    a.grad.data, b.grad.data = b.grad.data, a.grad.data
    norms = a.grad.norm(), b.grad.norm()
    job.backward(1)
    return *norms, a.grad.norm(), b.grad.norm()


@right
def a_gradient_of_another_shape_is_set_and_zeroed(job: Job) -> Any:
    job.backward()
    for p in job.params:
        p.grad = (p.grad.view(-1) * 0.5).view_as(p)
    norms = [p.grad.to(p).norm() for p in job.params]
    job.model.zero_grad(set_to_none=False)
    return norms


@right
def gradients_as_vector(job: Job) -> Any:
    job.backward()
    vector = torch.cat([p.grad.reshape(-1) for p in job.params])
    return vector.norm(), vector.sum(), vector.abs().max(), vector.numel()


@right
def gradients_cut_out_of_a_vector(job: Job) -> Any:
    job.backward()
    vector = torch.cat([p.grad.reshape(-1) for p in job.params])
    vector, start = vector / vector.norm(), 0
    for p in job.params:
        p.grad = vector[start : start + p.numel()].view_as(p)
        start += p.numel()
    job.sgd().step()


@right
def gradients_reshaped_and_assigned(job: Job) -> Any:
    job.backward()
    for p in job.params:
        p.grad = p.grad.view(-1).mul(2).view(p.shape)
    job.sgd().step()


# Inside of a step ----------------------------------------------------------------------------


@right
def sizes_of_updates_in_hooks(job: Job) -> Any:
    optimizer, kept, norms, moved, sums = job.sgd(), {}, [], [], []

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        kept.update((p, p.detach().clone()) for p in job.params)
        norms[:] = [p.grad.clone().norm().item() for p in job.params]

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        moved[:] = [(p.detach() - kept[p]).norm().item() for p in job.params]
        sums[:] = [torch.zeros_like(p).add_(p).abs().sum().item() for p in job.params]

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    job.train(optimizer)
    return norms, moved, sums


@right
def closure_that_copies_and_clips(job: Job) -> Any:
    optimizer, averages, norms = job.sgd(), {}, []

    @torch.enable_grad()
    def closure() -> Any:
        optimizer.zero_grad()
        loss = job.loss()
        loss.backward()
        for p in job.params:
            averages.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad)
            p.grad = averages[p].clone()
        norms.append(sum(p.grad.clone().square().sum() for p in job.params).item())
        for p in job.params:
            p.grad.div_(norms[-1] ** 0.5)
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return norms


class _Lookahead(torch.optim.Optimizer):
    """Keeps slow weights beside an optimizer, as packages of optimizers do."""

    def __init__(self, inner: torch.optim.Optimizer, *, foreach: bool) -> None:
        self.inner, self.foreach, self.param_groups = inner, foreach, inner.param_groups
        self.slow = [[p.clone().detach() for p in g["params"]] for g in self.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            fast = [p.data for p in group["params"]]
            if self.foreach:
                torch._foreach_lerp_(slow, fast, 0.5)
            else:
                for s, f in zip(slow, fast, strict=True):
                    s.add_(f - s, alpha=0.5)
            for s, f in zip(slow, fast, strict=True):
                f.copy_(s)


@right
def slow_weights_beside_an_optimizer(job: Job) -> Any:
    job.train(_Lookahead(job.sgd(), foreach=False))
    job.train(_Lookahead(job.sgd(), foreach=True))


@right
def optimizer_state_of_one_process(job: Job) -> Any:
    plain = build()
    first = torch.optim.AdamW(plain.parameters(), lr=0.01)
    second = torch.optim.AdamW(job.params, lr=0.5)
    for factor in (1.0, 2.0):
        for p in plain.parameters():
            p.grad = torch.linspace(-factor, 1.0, p.numel(), dtype=p.dtype).view(p.shape)
        first.step()
        second.load_state_dict(first.state_dict())
    job.train(second)
    second.load_state_dict(second.state_dict())
    job.train(second)
