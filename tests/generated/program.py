"""What a case does in each step: the same code in one process and on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.generated.modules import Model
from tests.generated.operations import VOCABULARY, Spec
from tests.generated.values import unpack

LARGEST = 1e8  # of what a case computes


class InvalidCase(Exception):
    """One process cannot run the case either, or its numbers do not stay small."""


@dataclass
class Trainer:
    """What a program runs on.

    Attributes:
        model: what is called.
        plain: the generated model inside.
        params: by the names of the plain model.
        rank: whose batches these are.
        no_sync: as of a wrapper.
        sync: reduces gradients now.
        is_manual: whether nothing else reduces them.
        ignored: the names of parameters that a wrapper does not know.
    """

    model: nn.Module
    plain: Model
    params: Mapping[str, nn.Parameter]
    rank: int
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    sync: Callable[[], None] = lambda: None
    is_manual: bool = False
    ignored: AbstractSet[str] = frozenset()


@dataclass
class Record:
    """What a rank has seen in one step.

    Attributes:
        numbers: losses, and what else the program looked at, in order.
        gradients: of parameters when they are reduced; None: without one.
    """

    numbers: list[tuple[str, Tensor]] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)

    def see(self, what: str, value: Tensor) -> None:
        self.numbers.append((what, value.detach().clone()))


def check_stays_small(state: Mapping[str, Tensor]) -> None:
    """Refuse a case that diverges: its numbers are then those of rounding, which ranks sum in
    another order. One bit in the weights of a case that ended at 3e9 moved them by 7e-8 of that.

    Raises:
        InvalidCase: a value at the end is not finite, or larger than 1e8.
    """
    if not all((value.abs() <= LARGEST).all() for value in state.values()):
        raise InvalidCase(f"it diverges: a value at the end is not below {LARGEST:g}")


def batch(case: Spec, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, indices and targets of one rank."""
    seed = case.get("values", 0) * 1000 + step * 100 + micro * 10 + rank
    generator = torch.Generator().manual_seed(seed)
    shape = (2, case.get("rows", 2), case.get("width", 4))
    x, y = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(VOCABULARY, (shape[1],), generator=generator), y


class Step:
    """One step of a program on one trainer."""

    def __init__(self, trainer: Trainer, case: Spec, number: int) -> None:
        self.on, self.case, self.number = trainer, case, number
        self.spec: Spec = case["steps"][number]
        self.kind = self.spec.get("backward", "plain")
        self.record = Record()
        self.micro = 0

    def run(self) -> Record:
        """Forwards and backwards, until gradients are reduced."""
        self.on.plain.context.step = self.number
        self.on.plain.context.rank = self.on.rank
        for _ in range(self.spec.get("micro", 0)):
            with self.on.no_sync():
                self.backward(self.losses()[0])
        late = self.spec.get("sync") == "late"
        with self.on.no_sync() if late else nullcontext():
            getattr(self, self.kind)()
        if late or self.on.is_manual:
            self.on.sync()
        return self.record

    # Forward ------------------------------------------------------------------------------

    def losses(self) -> tuple[Tensor, Tensor, Tensor]:
        """A forward on a batch of its own: two losses, and the input."""
        x, tokens, y = batch(self.case, self.number, self.micro, self.on.rank)
        self.micro += 1
        self.on.plain.context.tokens = tokens
        x.requires_grad_(bool(self.spec.get("input")) or self.kind.startswith("grad_"))
        output = self.on.model(x)
        value = unpack(output)
        loss = (value - y).square().mean()
        second = value.sin().mean() + (output[1] if self.case.get("gives") == "pair" else 0)
        self.record.see("loss", loss)
        return loss, second, x

    def backward(self, loss: Tensor, x: Tensor | None = None, **options: Any) -> None:
        if not loss.requires_grad:
            raise InvalidCase("a loss without a graph")
        waits = self.spec.get("micro") or self.spec.get("sync") == "late"
        if self.on.model is self.on.plain and (waits or "inputs" in options):
            params = options.get("inputs", self.on.params.values())
            ignored = {id(self.on.params[name]) for name in self.on.ignored}
            known = [p for p in params if p.requires_grad and id(p) not in ignored]
            if not leads_to(loss, known):
                raise InvalidCase("a backward that no wrapper sees, where one should reduce")
        loss.backward(**options)
        if x is not None and x.grad is not None:
            self.record.see("gradient of the input", x.grad)

    def evaluate(self) -> None:
        """A forward of evaluation."""
        x, _, _ = batch(self.case, self.number, 9, self.on.rank)
        self.on.model.eval()
        with torch.no_grad():
            self.record.see("evaluation", unpack(self.on.model(x)))
        self.on.model.train()

    # Kinds of backward --------------------------------------------------------------------

    def plain(self) -> None:
        loss, _, x = self.losses()
        self.backward(loss, x)

    def retain(self) -> None:
        loss, _, x = self.losses()
        self.backward(loss, x, retain_graph=True)
        self.backward(loss, x)

    def two_losses(self) -> None:
        loss, second, x = self.losses()
        self.backward(second, x, retain_graph=True)
        self.backward(loss, x)

    def two_forwards(self) -> None:
        first, second = self.losses(), self.losses()
        self.backward(first[0] + 2 * second[1], first[2])

    def interleaved(self) -> None:
        first, second = self.losses(), self.losses()
        self.backward(first[0], first[2])
        self.backward(second[0], second[2])

    def reversed(self) -> None:
        first, second = self.losses(), self.losses()
        self.backward(second[0], second[2])
        self.backward(first[0], first[2])

    def grad_first(self) -> None:
        loss, second, x = self.losses()
        found = torch.autograd.grad(second, x, retain_graph=True, allow_unused=True)[0]
        if found is not None:
            self.record.see("torch.autograd.grad", found)
        self.backward(loss, x)

    def grad_only(self) -> None:
        loss, _, x = self.losses()
        if not loss.requires_grad:
            raise InvalidCase("a loss without a graph")
        found = torch.autograd.grad(loss, x, allow_unused=True)[0]
        if found is not None:
            self.record.see("torch.autograd.grad", found)
        self.plain()

    def dropped(self) -> None:
        self.losses()
        self.plain()

    def eval_between(self) -> None:
        loss, _, x = self.losses()
        self.evaluate()
        self.backward(loss, x)

    def inputs(self) -> None:
        loss, _, x = self.losses()
        chosen = [p for i, p in enumerate(self.on.params.values()) if p.requires_grad and i % 2]
        if not chosen:
            raise InvalidCase("no parameter to choose")
        self.backward(loss, x, inputs=chosen)


def leads_to(loss: Tensor, params: list[nn.Parameter]) -> bool:
    """Whether backward from ``loss`` comes to one of ``params``; nothing is run for it."""
    wanted, seen, left = set(map(id, params)), set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in wanted:
            return True
        left += [following for following, _ in node.next_functions]
    return False


class Toggles:
    """Which parameters are frozen or thawed before each step: mostly those that were trainable."""

    def __init__(self, case: Spec, params: Mapping[str, nn.Parameter]) -> None:
        self._case, self._params = case, params
        self._trainable = [name for name, param in params.items() if param.requires_grad]

    def apply(self, step: int) -> None:
        """Change them, and forget their gradients."""
        names = list(self._params)
        chosen = set()
        for i in self._case["steps"][step].get("toggle", []):
            among = self._trainable if i < 90 and self._trainable else names
            chosen.add(among[i % len(among)])
        for name in chosen:
            param = self._params[name]
            param.requires_grad_(not param.requires_grad)
            param.grad = None


def new_optimizer(case: Spec, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a case, which makes no rounding larger.

    A gradient that is zero, as that of a bias in front of a BatchNorm, is all rounding. The step of
    AdamW is ``lr / eps`` times as large.
    """
    if case.get("optimizer") == "adamw":
        return torch.optim.AdamW(params, lr=0.01, eps=0.05)
    momentum = 0.9 if case.get("optimizer") == "momentum" else 0.0
    return torch.optim.SGD(params, lr=0.1, momentum=momentum)
