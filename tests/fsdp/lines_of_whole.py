"""Lines of ordinary scripts that need whole parameters."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn

from tests.fsdp.plain_job import Job, ids, refused

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
def penalty_written_into_another_tensor(job: Job) -> Any:
    weight = job.inner.head.weight
    away = torch.zeros(11, 6, dtype=torch.float64).add_(weight)
    (job.loss() + away.square().sum()).backward()


@refused
def penalty_of_foreach_norms(job: Job) -> Any:
    (job.loss() + torch.stack(torch._foreach_norm(job.params)).sum()).backward()


@refused
def penalty_of_a_cut_of_the_vector(job: Job) -> Any:
    vector = nn.utils.parameters_to_vector(job.params)[: job.params[0].numel()]
    (job.loss() + vector.square().sum()).backward()


@refused
def activations_scaled_beside_the_forward(job: Job) -> Any:
    out = job.model(ids(0))
    out.mul_(job.inner.scale)
    out.sum().backward()


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


@refused
def momentum_under_a_mask_of_weights(job: Job) -> Any:
    optimizer = job.sgd()
    job.train(optimizer)
    for p in job.params:
        optimizer.state[p]["momentum_buffer"].mul_((p.detach().abs() > 0.2).to(p.dtype))
    job.train(optimizer)


@refused
def momentum_under_masks_of_weights(job: Job) -> Any:
    optimizer = job.sgd()
    job.train(optimizer)
    buffers = [optimizer.state[p]["momentum_buffer"] for p in job.params]
    torch._foreach_mul_(buffers, [p.detach().sign() for p in job.params])
    job.train(optimizer)


@refused
def gradients_by_autograd(job: Job) -> Any:
    return [torch.autograd.grad(p.sum(), p)[0].sum() for p in job.params]
