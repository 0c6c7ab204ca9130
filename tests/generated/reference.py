"""A case in one process: a copy of the model for each rank's batches, gradients put together.

Buffers, branches that depend on data and parameters that nobody reduces differ between ranks, so a
concatenated batch would not say what each rank has to see. A copy for each rank does, and the mean
of the gradients is that of the concatenated batch.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from torch import Tensor, nn

from tests.generated.modules import Model, build
from tests.generated.operations import Spec
from tests.generated.program import (
    InvalidCase,
    Record,
    Step,
    Toggles,
    Trainer,
    check_stays_small,
    new_optimizer,
)


@dataclass
class Expected:
    """What every rank has to see.

    Attributes:
        records: by rank and step.
        norms: of gradients, by step, before they were clipped; None: they were not.
        states: by rank, at the end.
        was_float: whether something was computed in float32.
    """

    records: list[list[Record]]
    norms: list[Tensor | None] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)


def ignored_names(case: Spec, model: nn.Module) -> tuple[str | None, set[str]]:
    """What a wrapper is told to ignore: the name of a module or parameter; all parameters in it."""
    kind = case["options"].get("ignored")
    if kind is None:
        return None, set()
    names = [name for name, _ in model.named_parameters()]
    if not names:
        return None, set()
    if kind == "param":
        name = names[case.get("values", 0) % len(names)]
        return name, {name}
    module = names[case.get("values", 0) % len(names)].rpartition(".")[0]
    inside = {id(param) for param in model.get_submodule(module).parameters()}
    return module, {name for name, p in model.named_parameters() if id(p) in inside}


class Reference:
    """Runs a case in one process."""

    def __init__(self, case: Spec) -> None:
        self.case, size = case, case["ranks"]
        model = build(case)
        self.models: list[Model] = [model, *(copy.deepcopy(model) for _ in range(size - 1))]
        self.params = [dict(one.named_parameters()) for one in self.models]
        self.names = list(self.params[0])
        self.ignored = ignored_names(case, model)[1]
        if not any(param.requires_grad for param in self.params[0].values()):
            raise InvalidCase("nothing to train")
        if self.names and not any(
            self.params[0][name].requires_grad for name in self.names if name not in self.ignored
        ):
            raise InvalidCase("all that is to train is ignored")
        self.toggles = [Toggles(case, own) for own in self.params]
        self.size = size
        reduction = case["options"].get("reduction", "mean")
        self.divisor = {"mean": float(size), "sum": 1.0}.get(reduction, reduction)
        self.optimizers = [new_optimizer(case, list(own.values())) for own in self.params]

    def run(self) -> Expected:
        """All steps.

        Raises:
            InvalidCase: torch itself cannot.
        """
        expected = Expected([[] for _ in range(self.size)])
        for number in range(len(self.case["steps"])):
            self.before(number)
            for rank, model in enumerate(self.models):
                trainer = Trainer(model, model, self.params[rank], rank, ignored=self.ignored)
                step = Step(trainer, self.case, number)
                try:
                    record = step.run()
                    if self.case["steps"][number].get("eval"):
                        step.evaluate()
                except (RuntimeError, IndexError, ValueError) as error:
                    raise InvalidCase(str(error)) from error
                expected.records[rank].append(record)
            self.reduce(expected, number)
            self.clip(expected, number)
            for optimizer in self.optimizers:
                optimizer.step()
        for model in self.models:
            state = {name: value.detach().clone() for name, value in model.state_dict().items()}
            check_stays_small(state)
            expected.states.append(state)
        return expected

    def before(self, number: int) -> None:
        """Gradients that are forgotten or kept, parameters frozen and thawed, buffers sent."""
        keeps = number and self.case["steps"][number - 1].get("keep")
        for own in self.params:
            for name, param in own.items():
                if not keeps:
                    param.grad = None
                elif param.grad is not None and name not in self.ignored:
                    param.grad *= self.divisor / self.size  # of which each rank has its share
        for toggles in self.toggles:
            toggles.apply(number)
        if self.case["technique"] == "ddp" and self.case["options"].get("broadcast_buffers", True):
            source = dict(self.models[0].named_buffers())
            for model in self.models[1:]:
                for name, buffer in model.named_buffers():
                    buffer.copy_(source[name])

    def reduce(self, expected: Expected, number: int) -> None:
        """Give every copy the gradients of all."""
        for name in self.names:
            parts = [own[name].grad for own in self.params]
            found = [part for part in parts if part is not None]
            total = None
            if found and name not in self.ignored:
                total = sum(found[1:], start=found[0].clone()) / self.divisor
            for rank, own in enumerate(self.params):
                param = own[name]
                if name not in self.ignored:
                    param.grad = None if total is None else total.clone()
                value = None if param.grad is None else param.grad.clone()
                expected.records[rank][number].gradients[name] = value

    def clip(self, expected: Expected, number: int) -> None:
        limit = self.case["steps"][number].get("clip")
        norm = None
        if limit is not None:
            for own in self.params:
                norm = nn.utils.clip_grad_norm_(list(own.values()), limit)
        expected.norms.append(norm)


def expect(case: Spec) -> Expected:
    """What every rank has to see in a case that is no pipeline."""
    return Reference(case).run()
