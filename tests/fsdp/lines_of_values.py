"""Lines of ordinary scripts about values of parameters, averages, optimizers and vectors."""

from __future__ import annotations

import copy
from collections import OrderedDict
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.fsdp.plain_job import Job, build, refused, right

# Values --------------------------------------------------------------------------------------


@right
def logged(job: Job) -> Any:
    job.backward()
    tensors = [p.detach() for p in job.params] + [p.grad for p in job.params]
    return [
        (t.norm().item(), t.mean().item(), t.std(unbiased=False).item(), t.min().item(),
         t.max().item(), float(t.abs().sum()), t.numel(), (t == 0).sum().item(),
         t.count_nonzero().item(), t.detach().float().var(unbiased=False).item())
        for t in tensors
    ]  # fmt: skip


@right
def one_element(job: Job) -> Any:
    scale = job.inner.scale
    return (
        scale.item(),
        float(scale.detach()),
        f"{scale.detach():.3f}",
        bool(scale > 1),
        scale.sum().item(),
    )


@right
def written_in_place(job: Job) -> Any:
    with torch.no_grad():
        for p in job.params:
            p.mul_(0.5).add_(0.1).clamp_(-0.3, 0.3)
            p -= 0.01 * p.sign()
        job.inner.body[0].bias.zero_()
        nn.init.constant_(job.inner.body[3].bias, 0.25)
        job.inner.head.bias.fill_(0.5)
        job.inner.head.weight.data *= 2
    return job.evaluate()


@right
def own_step(job: Job) -> Any:
    for step in range(2):
        job.model.zero_grad()
        job.backward(step)
        with torch.no_grad():
            for p in job.params:
                p -= 0.1 * p.grad
                p.sub_(0.01 * p.grad / (p.grad.pow(2).mean().sqrt() + 1e-8))


@right
def constrained(job: Job) -> Any:
    job.train(job.sgd())
    with torch.no_grad():
        for p in job.params:
            p.div_(p.norm().clamp(min=1.0))
            p.copy_(torch.lerp(p, torch.zeros_like(p), 0.1))


@right
def pruned_by_mask(job: Job) -> Any:
    mask = torch.rand(11, 6, generator=torch.Generator().manual_seed(3)) > 0.5
    with torch.no_grad():
        job.inner.head.weight.mul_(mask)
        job.inner.embed.weight.masked_fill_(mask, 0.0)
        job.inner.embed.weight.data[:] = torch.where(mask, 0.0, job.inner.embed.weight)
        small = job.inner.body[0].weight.abs() < 0.1
        job.inner.body[0].weight[...] = job.inner.body[0].weight * ~small
    return small.sum().item()


@right
def pretrained_values(job: Job) -> Any:
    value = torch.arange(66.0, dtype=torch.float64).view(11, 6) / 66
    with torch.no_grad():
        job.inner.embed.weight.copy_(value)
        job.inner.head.weight.data = value * 2
        job.inner.body[0].weight += torch.ones(6) / 2
    return job.evaluate()


@right
def partly_loaded(job: Job) -> Any:
    value = torch.ones(11, 6, dtype=torch.float64)
    job.inner.load_state_dict({"embed.weight": value}, strict=False)
    job.inner.head.load_state_dict({"weight": value / 2, "bias": torch.ones(11)})
    return job.evaluate()


@right
def of_another_size(job: Job) -> Any:
    found = []
    for rows in (4, 5, 6):
        try:
            job.inner.head.load_state_dict(
                {"weight": torch.ones(rows, 6), "bias": torch.ones(rows)}
            )
        except RuntimeError as error:
            found.append("torch.Size([11, 6])" in str(error))
    return found


@right
def frozen(job: Job) -> Any:
    job.inner.embed.requires_grad_(False)
    job.train(job.sgd([p for p in job.params if p.requires_grad]))
    return [p.requires_grad for p in job.params]


# Averages ------------------------------------------------------------------------------------


@right
def average_of_clones(job: Job) -> Any:
    shadow, optimizer = {n: p.detach().clone() for n, p in job.inner.named_parameters()}, job.sgd()
    for step in range(3):
        optimizer.zero_grad()
        job.backward(step)
        optimizer.step()
        with torch.no_grad():
            for n, p in job.inner.named_parameters():
                shadow[n].lerp_(p, 0.3)
                shadow[n].mul_(0.9).add_(p.data, alpha=0.1)
    kept = {n: p.data for n, p in job.inner.named_parameters()}
    for n, p in job.inner.named_parameters():
        p.data = shadow[n]
    averaged = job.evaluate()
    for n, p in job.inner.named_parameters():
        p.data = kept[n]
    job.train(optimizer, 1)
    return averaged


@right
def average_exchanged_under_no_grad(job: Job) -> Any:
    kept, losses = {n: p.data * 0.5 for n, p in job.inner.named_parameters()}, []
    for step in range(4):
        losses.append(job.evaluate(step))
        for n, p in job.inner.named_parameters():
            p.data, kept[n] = kept[n], p.data
    return losses


@right
def stored_and_restored(job: Job) -> Any:
    stored = [p.clone() for p in job.params]
    job.train(job.sgd())
    changed = [torch.equal(p, s) for p, s in zip(job.params, stored, strict=True)]
    close = [torch.allclose(p, s, atol=10.0) for p, s in zip(job.params, stored, strict=True)]
    for p, s in zip(job.params, stored, strict=True):
        p.data.copy_(s.data)
    return changed, close, [torch.equal(p, s) for p, s in zip(job.params, stored, strict=True)]


@right
def whole_average_of_a_plain_copy(job: Job) -> Any:
    average = build()
    job.train(job.sgd())
    with torch.no_grad():
        for a, p in zip(average.parameters(), job.inner.parameters(), strict=True):
            a.mul_(0.9).add_(p, alpha=0.1)
            a.copy_(a + 0 * a)
    return [a.detach() for a in average.parameters()]


@right
def averaged_by_torch(job: Job) -> Any:
    average = torch.optim.swa_utils.AveragedModel(job.model)
    job.train(job.sgd())
    average.update_parameters(job.model)
    job.train(job.sgd())
    average.update_parameters(job.model)
    return [p.detach().norm() for p in average.parameters()]


@right
def target_network(job: Job) -> Any:
    with torch.no_grad():
        for old, new in [
            (job.inner.embed.weight, job.inner.head.weight),
            (
                job.inner.body[3].bias,
                job.inner.embed.weight.detach().mean() + job.inner.body[3].bias,
            ),
        ]:
            old.mul_(0.9).add_(new, alpha=0.1)


@right
def lists_of_gradients(job: Job) -> Any:
    job.backward()
    grads = [p.grad for p in job.params]
    torch._foreach_mul_(grads, 0.5)
    torch._foreach_add_(grads, [p.detach() for p in job.params], alpha=0.1)
    job.sgd().step()
    return torch.stack(torch._foreach_norm(grads))


# Optimizers and vectors ----------------------------------------------------------------------


@right
def fused_and_foreach(job: Job) -> Any:
    job.train(torch.optim.AdamW(job.params, lr=0.01, fused=True))
    job.train(torch.optim.AdamW(job.params, lr=0.01, foreach=True))
    job.train(torch.optim.Adagrad(job.params, lr=0.01))
    job.train(torch.optim.Adam(job.params, lr=0.01, amsgrad=True))


@right
def clipped_in_hooks_and_closures(job: Job) -> Any:
    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(job.params, 0.1)

    optimizer = job.sgd()
    optimizer.register_step_pre_hook(clip)
    norms = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = job.loss()
        loss.backward()
        norms.append(sum(p.grad.square().sum() for p in job.params))
        return loss

    job.backward()
    optimizer.step(closure)
    return norms


@right
def vectors(job: Job) -> Any:
    vector = parameters_to_vector(job.params)
    vector_to_parameters(vector * 0.5, job.params)
    return vector.numel(), vector.norm()


@right
def a_whole_vector(job: Job) -> Any:
    numel = sum(p.numel() for p in job.params)
    vector_to_parameters(torch.linspace(-1, 1, numel, dtype=torch.float64), job.params)


@right
def copied_parameter(job: Job) -> Any:
    twin = copy.deepcopy(job.inner.head.weight)
    job.train(job.sgd())
    return (job.inner.head.weight - twin).norm(), twin.shape, isinstance(twin, nn.Parameter)


class _Logs(torch.optim.SGD):
    """A user's optimizer with methods of its own, which are called outside of steps, too."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.first = [p.detach().clone() for p in self._params()]
        self.at_start = [p.norm() for p in self.first]
        self.zeros = [torch.zeros_like(p) for p in self._params()]

    def _params(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def sizes(self) -> list[Tensor]:
        return [p.clone().norm() for p in self._params()]

    def slopes(self) -> list[Tensor]:
        return [p.grad.clone().abs().max() for p in self._params() if p.grad is not None]

    def moved(self) -> list[Tensor]:
        now = [p.detach().clone() for p in self._params()]
        kept = [n.sub(f).square().mean() for n, f in zip(now, self.first, strict=True)]
        return kept

    def momenta(self) -> list[float]:
        of_params = [self.state[p].get("momentum_buffer", p) for p in self._params()]
        pairs = zip(self._params(), of_params, strict=True)
        return [(p * 0 + m).abs().sum().item() for p, m in pairs]

    def kept(self) -> list[list[Tensor]]:
        return [self.at_start, [p.norm() for p in self.first], [p.sum() for p in self.zeros]]


@right
def methods_of_an_own_optimizer(job: Job) -> Any:
    optimizer, found = _Logs(job.params, lr=0.1, momentum=0.9), []
    for step in range(3):
        job.train(optimizer, steps=step)
        found += [optimizer.sizes(), optimizer.slopes(), optimizer.moved(), optimizer.momenta()]
        found.append(optimizer.kept())
    return found


class _KeepsFirst(torch.optim.SGD):
    """Has a state from its constructor on."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for param in self.param_groups[0]["params"]:
            self.state[param]["first"] = param.detach().clone()


@right
def a_state_from_a_constructor_is_saved_and_loaded(job: Job) -> Any:
    optimizer = _KeepsFirst(job.params, lr=0.1)
    for _ in range(2):
        job.train(optimizer)
        file = BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        optimizer.load_state_dict(torch.load(file))
    job.train(optimizer)


class _WithoutHooks(torch.optim.Optimizer):
    """Steps that run no hooks, as its constructor does not call that of torch."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = inner.state
        self.norms: list[list[Tensor]] = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        self.norms.append([])
        for param in self.param_groups[0]["params"]:
            slow = self.state[param].setdefault("slow", torch.clone(param.data).detach())
            self.norms[-1].append(param.data.clone().norm())
            param.data.mul_(0.5 / param.data.clone().norm().clamp(min=1.0)).add_(slow, alpha=0.5)
            slow.data.copy_(param)


@right
def a_step_without_hooks(job: Job) -> Any:
    optimizer = _WithoutHooks(job.sgd())
    job.train(optimizer, steps=3)
    return optimizer.norms


class _WithHooksOfItsOwn(_WithoutHooks):
    """Steps that run the hooks of a step, with no other attribute of torch's constructor."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._patch_step_function()
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        for param, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            torch._foreach_lerp_([param.data], [slow], weight=0.5)
            torch._foreach_copy_([slow], [param.data])


@right
def a_step_with_hooks_of_a_wrapper(job: Job) -> Any:
    optimizer = _WithHooksOfItsOwn(job.sgd())
    job.train(optimizer, steps=3)
    return [slow.norm() for slow in optimizer.slow]


@refused
def row_norms(job: Job) -> Any:
    weight = job.inner.head.weight
    with torch.no_grad():
        weight.div_(weight.norm(dim=1, keepdim=True).clamp(min=0.5))
        weight.sub_(weight.mean(1, keepdim=True))
    return weight.sum(dim=1).square().sum()
