"""Models to split, and the comparison of their stages with the whole."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World

VOCABULARY, LENGTH = 31, 6


class Block(nn.Module):
    """Takes a table and a mask besides the hidden state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, table: Tensor, *, mask: Tensor | None = None) -> Tensor:
        y = self.down(torch.tanh(self.up(x) + table))
        return x + (y if mask is None else y * mask[..., None])


class Decoder(nn.Module):
    """A trunk below the top, with a parameter of its own, a learnt table and a buffer."""

    def __init__(self, num_blocks: int = 5, width: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.inner = nn.ModuleDict(
            {
                "embed": nn.Embedding(VOCABULARY, width),
                "table": nn.Linear(1, width),
                "blocks": nn.ModuleList(Block(width) for _ in range(num_blocks)),
                "norm": nn.LayerNorm(width),
            }
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("shift", torch.tensor(0.5))
        if tied:
            self.head.weight = self.inner["embed"].weight

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
        table = self.inner["table"](positions.to(self.scale.dtype)) + self.shift
        x = self.inner["embed"](tokens) * self.scale
        for i, block in enumerate(self.inner["blocks"]):
            x = block(x, table, mask=mask if i % 2 else None)
        return self.head(self.inner["norm"](x))


class Layered(nn.Module):
    """Says what its layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, VOCABULARY)
        self.first = nn.Embedding(VOCABULARY, 4)
        self.rest = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def pipeline_layers(self) -> list[nn.Module]:
        return [self.first, self.rest["a"], nn.Tanh(), self.rest["b"], self.last]

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.pipeline_layers():
            tokens = layer(tokens)
        return tokens


def loss_fn(output: Any, target: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def step_like_the_whole(
    world: World,
    model: nn.Module,
    kwargs: dict[str, Any],
    split: dict[str, Any],
    pipeline: dict[str, Any],
) -> float:
    """One step of the stages, compared with the model; the rows of a batch are uneven."""
    model, plain = copy.deepcopy(model), copy.deepcopy(model)
    chunks = pipeline.pop("chunks", 1) if (pipeline := dict(pipeline)) else 1
    stages = ec.pipeline.split(model, chunks * world.size, **split)
    options = {"microbatches": 3, "loss_fn": loss_fn, **pipeline}
    pipe = ec.Pipeline(stages, world.group, **options)
    generator = torch.Generator().manual_seed(1)
    tokens, target = torch.randint(VOCABULARY, (2, 7, LENGTH), generator=generator)
    inputs = [tokens] if pipe.has_input else []
    loss = pipe.step(
        *inputs, target=target if pipe.has_loss else None, loss_everywhere=True, **kwargs
    )
    expected = loss_fn(plain(tokens, **kwargs), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    whole = dict(plain.named_parameters(remove_duplicate=False))
    for index, stage in pipe.stages.items():
        for name, param in stage.named_parameters():
            torch.testing.assert_close(
                param.grad,
                whole[name].grad,
                rtol=1e-11,
                atol=1e-13,
                msg=lambda text, name=name, index=index: f"stage {index}, {name}: {text}",
            )
    state, everything = pipe.state_dict(), plain.state_dict()
    together = set().union(*world.group.all_gather_object(set(state)))
    assert together == set(everything)
    changed = {name: value + 1 for name, value in everything.items()}
    assert not any(pipe.load_state_dict(changed))
    for name, value in pipe.state_dict().items():
        assert torch.equal(value, changed[name]), name
    return float(loss) if loss is not None else 0.0
