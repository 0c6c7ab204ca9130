"""Small models with every shape of trouble, and batches that differ from rank to rank."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class TiedLanguageModel(nn.Module):
    """A tied embedding, a norm, a 0-dim scale: parameters of all shapes."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(width, 2 * width)
        self.back = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.back(F.gelu(self.hidden(x)))
        logits: Tensor = self.head(self.norm(x) * self.scale)
        return logits


class TwoPaths(nn.Module):
    """A common layer, then ``a`` or ``b``; ``never`` is unused and ``frozen`` needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(3, 3)
        self.a = nn.Linear(3, 1)
        self.b = nn.Linear(3, 1)
        self.never = nn.Linear(3, 1)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor, path: str) -> Tensor:
        hidden = self.frozen(self.common(x))
        out: Tensor = self.a(hidden) if path == "a" else self.b(hidden)
        return out


class Checkpointed(nn.Module):
    """Recomputes each layer in backward."""

    def __init__(self, inner: nn.Sequential, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Casting(nn.Sequential):
    """Brings its input to the dtype of each layer."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x.to(layer.weight.dtype))
        return x


def mlp(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Five parameters of different sizes."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 5, bias=False), nn.Tanh(), nn.Linear(5, 2)
    ).to(dtype)


def tokens(step: int, ranks: int, per_rank: int = 2) -> tuple[Tensor, Tensor]:
    """The batch of all ranks together: inputs and targets."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, 11, (ranks * per_rank, 7), generator=generator)
    return text[:, :-1], text[:, 1:]


def rows(step: int, ranks: int, per_rank: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows for ``mlp``, of all ranks together."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ranks * per_rank, 6, generator=generator, dtype=dtype)


def token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def share(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """The part of one rank."""
    return tensor.chunk(ranks)[rank]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of all gradients, by name."""
    return {
        name: None if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
    }


def assert_close(actual: nn.Module, expected: nn.Module, *, rtol: float = 1e-12) -> None:
    """Parameters and gradients agree, relative to the largest element of each."""
    names = dict(expected.named_parameters())
    for name, param in actual.named_parameters():
        assert_tensor_close(param.detach(), names[name].detach(), rtol, name)
        there = names[name].grad
        if there is None:
            assert param.grad is None, name
        else:
            assert param.grad is not None, name
            assert_tensor_close(param.grad, there, rtol, f"gradient of {name}")


def assert_tensor_close(actual: Tensor, expected: Tensor, rtol: float, what: str) -> None:
    """Equal up to ``rtol`` of the largest element: sums over ranks are taken in another order."""
    bound = rtol * expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        actual, expected, rtol=0.0, atol=bound, msg=lambda text: f"{what}: {text}"
    )


@dataclass
class Output:
    """What a model returns that pytree does not know."""

    logits: Tensor


class Opaque:
    """What nobody can look into: the tensor is in a closure."""

    def __init__(self, logits: Tensor) -> None:
        self.show = lambda: logits

    @property
    def logits(self) -> Tensor:
        return self.show()


class Wrapping(nn.Module):
    """Returns the output of ``inner`` in another form."""

    def __init__(self, inner: nn.Module, form: type) -> None:
        super().__init__()
        self.inner = inner
        self.form = form

    def forward(self, x: Tensor) -> Output | Opaque:
        return self.form(self.inner(x))
