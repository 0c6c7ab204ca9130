"""Lines of ordinary scripts over a wrapped model give what one process gives, or a typed error."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import echelon as ec
from echelon.errors import EchelonError
from tests.worlds import run_world


class Model(nn.Module):
    """With an odd number of rows, a parameter without dims, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 6))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.scale * self.body(self.embed(ids)))


def build() -> Model:
    torch.manual_seed(0)
    return Model().double()


def ids(rank: int, step: int = 0) -> Tensor:
    return torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(100 * step + rank))


class Job:
    """A model on one rank of some, or on one process that has the rows of all."""

    def __init__(
        self, model: nn.Module, inner: Model, ranks: list[int], group: ec.Group | None = None
    ) -> None:
        self.model, self.inner, self.ranks, self._group = model, inner, ranks, group
        self.params = [*model.parameters()]

    def loss(self, step: int = 0) -> Tensor:
        x = torch.cat([ids(rank, step) for rank in self.ranks])
        return F.cross_entropy(self.model(x).flatten(0, 1), x.flatten())

    def evaluate(self, step: int = 0) -> Tensor:
        """The loss of the rows of all ranks."""
        with torch.no_grad():
            loss = self.loss(step)
        if self._group is not None:
            self._group.all_reduce(loss, "mean")
        return loss

    def backward(self, step: int = 0) -> None:
        self.loss(step).backward()

    def train(self, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            self.backward(step)
            optimizer.step()

    def sgd(self, params: Any = None) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.params if params is None else params, lr=0.1, momentum=0.9)


Lines = Callable[[Job], Any]
LINES: dict[str, Lines] = {}
REFUSED: dict[str, Lines] = {}  # right, or a typed error, on every sharded model


def right(function: Lines) -> Lines:
    LINES[function.__name__] = function
    return function


def refused(function: Lines) -> Lines:
    REFUSED[function.__name__] = function
    return function


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
def gradients_as_vector(job: Job) -> Any:
    job.backward()
    vector = torch.cat([p.grad.reshape(-1) for p in job.params])
    return vector.norm(), vector.sum(), vector.abs().max(), vector.numel()


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


@refused
def row_norms(job: Job) -> Any:
    weight = job.inner.head.weight
    with torch.no_grad():
        weight.div_(weight.norm(dim=1, keepdim=True).clamp(min=0.5))
        weight.sub_(weight.mean(1, keepdim=True))
    return weight.sum(dim=1).square().sum()


# Needs the whole -----------------------------------------------------------------------------


@refused
def head_called_outside(job: Job) -> Any:
    with torch.no_grad():
        return job.inner.head(torch.ones(2, 6, dtype=torch.float64))


@refused
def embedding_called_outside(job: Job) -> Any:
    return job.inner.embed(torch.tensor([1, 10])).detach()


@refused
def matrix_product(job: Job) -> Any:
    return (job.inner.head.weight @ job.inner.embed.weight.t()).detach()


@refused
def a_row(job: Job) -> Any:
    return job.inner.embed.weight[3].detach()


@refused
def as_array(job: Job) -> Any:
    return job.inner.embed.weight.detach().cpu().numpy().sum()


@refused
def as_list(job: Job) -> Any:
    return job.inner.head.bias.tolist()


@refused
def saved_by_itself(job: Job) -> Any:
    torch.save(job.inner.embed.weight, io.BytesIO())


@refused
def saved_gradients(job: Job) -> Any:
    job.backward()
    torch.save([p.grad for p in job.params], io.BytesIO())


@refused
def drawn_again(job: Job) -> Any:
    torch.manual_seed(5)
    nn.init.normal_(job.inner.body[0].weight)


@refused
def initialised_by_fan(job: Job) -> Any:
    torch.manual_seed(5)
    nn.init.kaiming_uniform_(job.inner.head.weight)


@refused
def dropped_out(job: Job) -> Any:
    torch.manual_seed(5)
    with torch.no_grad():
        job.inner.embed.weight.bernoulli_()


@refused
def largest_elements(job: Job) -> Any:
    return job.inner.embed.weight.flatten().topk(3).values.detach()


@refused
def quantile(job: Job) -> Any:
    return job.inner.embed.weight.detach().median()


@refused
def singular_values(job: Job) -> Any:
    return torch.linalg.matrix_norm(job.inner.head.weight.detach(), 2)


@refused
def column_means(job: Job) -> Any:
    return job.inner.head.weight.detach().mean(0)


@refused
def penalty_beside_the_forward(job: Job) -> Any:
    (job.loss() + 0.1 * sum(p.square().sum() for p in job.params)).backward()
    job.sgd().step()


@refused
def centred_gradients(job: Job) -> Any:
    job.backward()
    for p in job.params:
        if p.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True))
    job.sgd().step()


@refused
def part_of_a_pretrained_table(job: Job) -> Any:
    with torch.no_grad():
        job.inner.embed.weight[:5] = torch.ones(5, 6, dtype=torch.float64)


@refused
def value_of_another_shape(job: Job) -> Any:
    job.inner.embed.weight.data = torch.ones(33, dtype=torch.float64)


# The matrix ----------------------------------------------------------------------------------

_S = ec.Strategy
MODELS: dict[str, dict[str, Any] | None] = {
    "DDP": None,
    **{
        f"{layout} {strategy.name}": {"layout": layout, "strategy": strategy, "min_num_params": 0}
        for layout in ("flat", "rows")
        for strategy in (_S.FULL_SHARD, _S.SHARD_GRAD_OP, _S.NO_SHARD)
    },
    "flat, small units whole": {"layout": "flat", "min_num_params": 60},
}


def wrap(world: ec.World, options: dict[str, Any] | None) -> Job:
    inner = build()
    if options is None:
        model: nn.Module = ec.DDP(inner, world.group)
    else:
        group, more = world.group, {}
        if options.get("strategy", _S.FULL_SHARD).hybrid:
            mesh = world.mesh(replicate=2, shard=-1)
            group, more = mesh["shard"], {"replicate": mesh["replicate"]}
        units = ec.units.by_type(nn.Sequential)
        model = ec.FSDP(inner, group, units=units, **more, **options)
    return Job(model, inner, [world.rank], world.group)


def state_of(job: Job) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in job.model.state_dict().items()}


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        found = found if isinstance(found, Tensor) else torch.tensor(float(found))
        return torch.allclose(found.double(), expected.double(), 1e-9, 1e-11, equal_nan=True)
    if isinstance(expected, float):
        return math.isclose(float(found), expected, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    return bool(found == expected)


def outcome(lines: Lines, job: Job, world: ec.World, expected: Any) -> str:
    try:
        result, state = lines(job), state_of(job)
    except EchelonError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"
    wanted, wanted_state = expected
    if not (result is None or same(result, wanted)):
        return f"wrong: {result} instead of {wanted}"
    return "right" if same(state, wanted_state) else "wrong: another state"


def plain(lines: Lines, size: int) -> Any:
    model = build()
    job = Job(model, model, [*range(size)])
    return lines(job), state_of(job)


def check_all(world: ec.World, models: list[str]) -> list[str]:
    found = []
    expected = {name: plain(f, world.size) for name, f in {**LINES, **REFUSED}.items()}
    for kind in models:
        options = MODELS.get(kind, {"strategy": _S.HYBRID_SHARD, "min_num_params": 0})
        whole = options is None or options.get("strategy") is _S.NO_SHARD
        for name, lines in {**LINES, **REFUSED}.items():
            text = outcome(lines, wrap(world, options), world, expected[name])
            world.group.barrier()
            may_refuse = name in REFUSED and (not whole or name == "value_of_another_shape")
            if text != "right" and not (may_refuse and text.startswith("refused")):
                found.append(f"{kind}, {name}: {text[:300]}")
    return found


CASES = [("threads", 2, [*MODELS]), ("threads", 3, [*MODELS]), ("threads", 4, ["hybrid"])]
OTHERS = [(kind, 2, ["flat FULL_SHARD", "rows FULL_SHARD"]) for kind in ("processes", "gloo")]


@pytest.mark.parametrize(("kind", "ranks", "models"), [*CASES, *OTHERS])
def test_a_line_of_a_script_is_right_or_refused(kind: str, ranks: int, models: list[str]) -> None:
    for found in run_world(kind, check_all, ranks, args=(models,)):
        assert found == [], "\n".join(found)
