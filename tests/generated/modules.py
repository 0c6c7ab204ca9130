"""Modules that are built from data, and what is in them.

Every module maps a tensor (rows, WIDTH) to one of the same shape, so any may stand in any place.
Values come from a generator seeded by the case: the global stream is not touched.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.generated.operations import OPS, Spec, freeze
from tests.generated.values import Context, call, factor, pack, received

WIDTH = 4


class Builder:
    """What one model is built with: its context, its dice, and what several modules share."""

    def __init__(self, seed: int, width: int = WIDTH) -> None:
        self.context = Context()
        self.width = width
        self.tied: dict[Any, nn.Parameter] = {}
        self.modules: dict[int, nn.Module] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> Tensor:
        """Values in a range, in float64."""
        value = torch.rand(shape, generator=self._generator, dtype=torch.float64)
        return value * (high - low) + low

    def fill(self, module: nn.Module) -> nn.Module:
        """Give a module of torch the values of this model, in float64."""
        module.double()
        with torch.no_grad():
            for param in module.parameters():
                param.copy_(self.uniform(tuple(param.shape), -0.7, 0.7))
        return module

    def parameter(self, spec: Spec, shape: tuple[int, ...], low: float, high: float) -> Any:
        """A parameter as the operation wants it: tied, frozen, complex, or of another dtype."""
        value = self.uniform(shape, low, high)
        if spec.get("dtype") == "complex":
            value = torch.complex(value, value.flip(0) if value.dim() else 0.3 * value)
        elif spec.get("dtype") == "single":
            value = value.float()
        key = (spec.get("tie"), tuple(shape), value.dtype)
        if spec.get("tie") is not None and key in self.tied:
            return self.tied[key]
        param = nn.Parameter(value, requires_grad=not spec.get("frozen"))
        if spec.get("tie") is not None:
            self.tied[key] = param
        return param

    def build(self, spec: Spec) -> nn.Module:
        """The module that a spec describes."""
        if spec["kind"] == "again":
            return Again(spec, self)
        module = KINDS[spec["kind"]](spec, self)
        if "id" in spec:
            self.modules[spec["id"]] = module
        return module


class Part(nn.Module):
    """A module of a generated model.

    Attributes:
        takes: in which way its input comes.
        gives: in which wrapping its output goes.
    """

    def __init__(self, spec: Spec, builder: Builder) -> None:
        super().__init__()
        self.spec, self.context = spec, builder.context
        self.takes, self.gives = spec.get("takes", "tensor"), spec.get("gives", "tensor")
        self.children_of = []
        for i, child in enumerate(spec.get("children", [])):
            name = f"{child['kind']}{i}"
            setattr(self, name, builder.build(child))
            self.children_of.append(name)

    def forward(self, value: Any = None, *others: Any, **named: Any) -> Any:
        x = received(self, value)
        for extra in (*others, *named.values()):
            x = x if extra is None else x * factor(extra)
        return pack(self.run(x), self.gives)

    def inner(self) -> list[nn.Module]:
        """The modules inside, in order."""
        return [getattr(self, name) for name in self.children_of]

    def through(self, x: Tensor) -> Tensor:
        """All modules inside, one after another."""
        for module in self.inner():
            x = call(module, x)
        return x

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Chain(Part):
    """One after another."""

    def run(self, x: Tensor) -> Tensor:
        return self.through(x)


class Outer(Chain):
    """A chain under another name, so that a rule of units can mean it alone."""


class Residual(Part):
    """The input is added to what comes out."""

    def run(self, x: Tensor) -> Tensor:
        return x + self.through(x)


class Branch(Part):
    """Each module gets the same input."""

    def run(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for i, module in enumerate(self.inner()):
            total = total + call(module, x) / (i + 1)
        return total


class Twice(Part):
    """The same modules twice."""

    def run(self, x: Tensor) -> Tensor:
        return self.through(torch.tanh(self.through(x)))


class Dead(Part):
    """Modules whose output nobody uses, or not for a gradient."""

    def run(self, x: Tensor) -> Tensor:
        y = self.through(x)
        return x + y.detach() if self.spec.get("how") == "detached" else x


class Blind(Part):
    """Modules whose input needs no gradient, or which run without a graph."""

    def run(self, x: Tensor) -> Tensor:
        if self.spec.get("how") == "no_grad":
            with torch.no_grad():
                return x + self.through(x)
        return x + self.through(x.detach())


class Skips(Part):
    """Modules that are left out in some steps: on all ranks, or on some."""

    def run(self, x: Tensor) -> Tensor:
        turn = self.context.step + self.spec.get("phase", 0)
        if self.spec.get("how") == "ranks":
            turn += self.context.rank
        return self.through(x) if turn % 2 == 0 else x


class Recomputed(Part):
    """Modules whose activations are not kept."""

    def run(self, x: Tensor) -> Tensor:
        reentrant = self.spec.get("how") == "reentrant"
        return checkpoint(self.through, x, use_reentrant=reentrant)


class Border(Part):
    """Views and operations in place on both sides of a module."""

    def run(self, x: Tensor) -> Tensor:
        how = self.spec.get("how")
        if how == "view_in":
            return self.through(x.reshape(-1).view(x.shape))
        if how == "view_out":
            return self.through(x).t().t().view(-1).view(x.shape)
        if how == "inplace_out":
            return self.through(x).mul_(0.9).add_(0.1)
        if how == "slice_out":
            y = self.through(x)
            return torch.cat([y[:, :1] * 2, y[:, 1:]], dim=1)
        if how == "inplace_view_out":
            y = self.through(x)
            y.view(-1)[0].mul_(0.5)
            return y
        y = x.clone()
        z = self.through(y)
        return z + y.mul_(0.5).detach()


class Hides(Part):
    """Inputs and outputs that go by way of an attribute."""

    def run(self, x: Tensor) -> Tensor:
        stash, key = self.context.stash, self.spec.get("key", 0)
        if self.spec.get("how") == "take":
            hidden = stash.get(key)
            same = hidden is not None and hidden.shape == x.shape
            return self.through(x) + (hidden if same else 0)
        y = self.through(x)
        stash[key] = y * 0.5
        return y


class Parent(Part):
    """Uses the parameters of the module inside itself, which is never called."""

    def __init__(self, spec: Spec, builder: Builder) -> None:
        super().__init__({**spec, "children": []}, builder)
        self.used = builder.fill(nn.Linear(builder.width, builder.width))
        freeze(self.used, spec)

    def run(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(x), self.used.weight, self.used.bias)


class Again(Part):
    """A module that is elsewhere in the model, too; nothing where it was taken away."""

    def __init__(self, spec: Spec, builder: Builder) -> None:
        super().__init__({**spec, "children": []}, builder)
        self.other = builder.modules.get(spec["of"])

    def run(self, x: Tensor) -> Tensor:
        return x if self.other is None else call(self.other, x)


class Cell(Part):
    """A sequence of operations with parameters of its own."""

    def __init__(self, spec: Spec, builder: Builder) -> None:
        super().__init__(spec, builder)
        self.ops = spec.get("ops", [])
        for i, op in enumerate(self.ops):
            make = OPS[op["op"]][0]
            if make is not None:
                make(self, f"p{i}", op, builder)
        self.half = len(self.ops) // 2

    def run(self, x: Tensor) -> Tensor:
        how = self.spec.get("recomputes")
        if how:
            x = checkpoint(self.part, x, 0, self.half, use_reentrant=how == "reentrant")
            return self.part(x, self.half, len(self.ops))
        return self.part(x, 0, len(self.ops))

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Some of the operations."""
        for i in range(start, stop):
            op = self.ops[i]
            if op.get("use") != "unused":
                x = OPS[op["op"]][1](self, f"p{i}", op, x)
        return x


KINDS: dict[str, type[Part]] = {
    "cell": Cell,
    "chain": Chain,
    "outer": Outer,
    "residual": Residual,
    "branch": Branch,
    "twice": Twice,
    "dead": Dead,
    "blind": Blind,
    "skips": Skips,
    "recomputed": Recomputed,
    "border": Border,
    "hides": Hides,
    "parent": Parent,
}


class Model(nn.Module):
    """The whole: what a program calls. Its output is one tensor or several, in any wrapping."""

    def __init__(self, spec: Spec, builder: Builder, gives: str) -> None:
        super().__init__()
        self.context, self.gives = builder.context, gives
        self.body = builder.build(spec)

    def forward(self, x: Tensor) -> Any:
        self.context.stash.clear()
        y = call(self.body, x * 1.0)
        if self.gives == "pair":
            return y, y.square().mean()
        return pack(y, self.gives)


def build(case: Spec) -> Model:
    """The model of a case; the same values each time."""
    builder = Builder(case.get("values", 0), case.get("width", WIDTH))
    return Model(case["model"], builder, case.get("gives", "tensor"))
