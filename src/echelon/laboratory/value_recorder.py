"""Records what a model computes while it trains: outputs, gradients, buffers, optimizer states.

The code that trains is not changed. Hooks on the modules see outputs, and hooks that torch runs
around ``step()`` of every optimizer see the rest::

    forward      root call: inputs, random stream     each module: its outputs
    backward     the gradient of the model's output
    step()       before: parameters, buffers, gradients     after: states of the optimizer
    the end      parameters and buffers
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from echelon.laboratory.pieces import Piece, PieceFinder
from echelon.modules.autograd import in_backward
from echelon.modules.nested import tensors
from echelon.modules.sharded_tensor import is_part, local_shard, unmarked
from echelon.process.this_rank import here

_MAX_OUTPUTS = 8  # tensors of an output that are recorded


@final
@dataclass(frozen=True, slots=True, eq=False)
class RootCall:
    """One forward of the model itself, or of modules in it that the user's code calls one by one.

    Attributes:
        inputs: the tensors among the arguments of the first call.
        stream: the state of torch's random stream before it.
        is_random: whether it drew random numbers.
        output_gradients: of each output that is a floating-point tensor; None where backward did
            not reach it.
    """

    inputs: list[Tensor]
    stream: Tensor
    is_random: bool = False
    output_gradients: list[Tensor | None] = field(default_factory=list)

    @property
    def is_trained(self) -> bool:
        """Whether backward reached an output, as far as these were recorded."""
        gradients = self.output_gradients
        return not gradients or any(gradient is not None for gradient in gradients)


@final
@dataclass(frozen=True, slots=True, eq=False)
class ModuleOutput:
    """What one forward of one module returned.

    Attributes:
        root: which of the root calls of the step it belongs to; None if the model itself is not
            called, as in a pipeline.
        tensors: its floating-point tensors.
    """

    root: int | None
    tensors: list[Tensor]


@final
@dataclass(frozen=True, slots=True, eq=False)
class StepValues:
    """What was recorded of one step; pieces are ranges of tensors of the plain model.

    Attributes:
        roots: the forwards of the model.
        outputs: those of each module, in the order in which forwards ended.
        parameters: before the step.
        buffers: before the step, after its forwards.
        gradients: those that the optimizer got; ``values`` is None where there was none.
        states: of the optimizer, after the step.
        options: such as ``lr``, as they are written, of all groups of parameters in this step.
    """

    roots: list[RootCall] = field(default_factory=list)
    outputs: dict[str, list[ModuleOutput]] = field(default_factory=lambda: defaultdict(list))
    parameters: list[Piece] = field(default_factory=list)
    buffers: list[Piece] = field(default_factory=list)
    gradients: list[Piece] = field(default_factory=list)
    states: list[Piece] = field(default_factory=list)
    options: dict[str, list[str]] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True, eq=False)
class TrainingValues:
    """What was recorded of a training.

    Attributes:
        steps: one for each step.
        parameters: at the end.
        buffers: at the end.
    """

    steps: list[StepValues]
    parameters: list[Piece]
    buffers: list[Piece]

    def at(self, step: int) -> StepValues:
        """The values of a step; after the last one, the parameters and buffers of the end."""
        if step < len(self.steps):
            return self.steps[step]
        return StepValues(parameters=self.parameters, buffers=self.buffers)


@dataclass(slots=True, eq=False)
class _RawStep:
    """A step before it is known which ranges of the model the tensors of a rank are."""

    values: StepValues = field(default_factory=StepValues)
    parameters: dict[Tensor, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[Tensor, Tensor | None] = field(default_factory=dict)
    states: dict[Tensor, dict[str, Any]] = field(default_factory=dict)


@final
class ValueRecorder:
    """Records a training of ``model`` on this thread, between ``with recorder.recording()``.

    Args:
        model: the plain one, before it is wrapped.
        in_stages: whether a pipeline calls its modules, for one microbatch or another.
    """

    def __init__(self, model: nn.Module, *, in_stages: bool = False) -> None:
        self._model = model
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._steps: list[_RawStep] = [_RawStep()]
        self._num_steps: dict[int, int] = defaultdict(int)  # by id of an optimizer
        self._optimizers: list[Optimizer] = []  # keeps the ids valid
        self._in_stages = in_stages
        self._depth = 0  # of calls of modules in one another
        self._stream = torch.get_rng_state()  # before the outermost of them
        self._parts: list[str] = []  # the outermost modules that this forward has called
        self._handles: list[Any] = []

    @property
    def num_steps(self) -> int:
        """How many steps an optimizer made; that with the most counts."""
        return max(self._num_steps.values(), default=0)

    @property
    def current(self) -> StepValues:
        """What was recorded since the last step of an optimizer."""
        return self._this_step().values

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what happens in the body."""
        with _registration:
            _watch_optimizers()
        self._watch_modules()
        before = _current()
        here.recorder = self
        try:
            yield
        finally:
            here.recorder = before
            for handle in self._handles:
                handle.remove()

    def finish(self, trained: object) -> TrainingValues:
        """What was recorded.

        Args:
            trained: what the function that trained has returned: the model as it was wrapped,
                which knows the ranges that this rank holds.
        """
        finder = PieceFinder(self._shapes, self._model, trained)
        last = self._steps[self.num_steps] if len(self._steps) > self.num_steps else _RawStep()
        self._note_model(last)
        steps = []
        for raw in self._steps[: self.num_steps]:
            values = _trained(raw.values)
            values.parameters.extend(finder.of_parameters(raw.parameters))
            values.buffers.extend(finder.of_buffers(raw.buffers))
            values.gradients.extend(finder.of_parameters(raw.gradients))
            values.states.extend(finder.of_states(raw.states))
            steps.append(values)
        return TrainingValues(
            steps=steps,
            parameters=finder.of_parameters(last.parameters),
            buffers=finder.of_buffers(last.buffers),
        )

    # Modules ---------------------------------------------------------------------------------

    def _watch_modules(self) -> None:
        # Closures, because a model that is copied takes them along: a bound method would be copied
        # together with the recorder.
        for name, module in self._model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(
                    self._enter_hook(name), with_kwargs=True, prepend=True
                ),
                module.register_forward_hook(self._output_hook(name)),
                module.register_forward_hook(self._leave_hook(), always_call=True),
            ]

    def _enter_hook(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._is_watched() or in_backward():
                return
            self._depth += 1
            if self._depth == 1 and not self._in_stages:
                self._stream = torch.get_rng_state()
                self._begin_call(name, tensors((args, kwargs)))

        return enter

    def _begin_call(self, name: str, inputs: Iterable[Tensor]) -> None:
        """A call of the model itself, or by the user's code of modules in it, one after the other.

        The forward of these ends where one of them is called again.
        """
        roots = self._this_step().values.roots
        if not name or not roots or name in self._parts:
            roots.append(RootCall([t.detach().clone() for t in inputs], self._stream))
            self._parts = [name]
        else:
            self._parts.append(name)

    def _leave_hook(self) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not self._is_watched() or in_backward():
                return
            self._depth -= 1
            roots = self._this_step().values.roots
            if self._depth == 0 and roots and not torch.equal(self._stream, torch.get_rng_state()):
                roots[-1] = replace(roots[-1], is_random=True)

        return leave

    def _output_hook(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            if not self._is_watched() or in_backward():  # a checkpointed forward that runs again
                return
            if not self._in_stages and len(self._parts) > 1:
                return  # its inputs are no rows of a batch
            floats = float_tensors(output)
            if any(type(t) not in (Tensor, nn.Parameter) or t.is_meta for t in floats):
                return  # a model that is cut into stages runs by shapes alone
            values = self._this_step().values
            root = None if self._in_stages else len(values.roots) - 1
            copies = [t.detach().clone() for t in floats]
            values.outputs[name].append(ModuleOutput(root, copies))
            if not name and root is not None:
                values.roots[root] = self._with_gradients(values.roots[root], floats)

        return note

    def _with_gradients(self, call: RootCall, outputs: list[Tensor]) -> RootCall:
        """The call, into which the gradients of its outputs are written when backward runs."""
        gradients: list[Tensor | None] = [None] * len(outputs)

        def keeper(i: int) -> Callable[[Tensor], None]:
            def keep(gradient: Tensor) -> None:
                before = gradients[i]
                gradients[i] = gradient.clone() if before is None else before + gradient

            return keep

        for i, output in enumerate(outputs):
            if output.requires_grad:
                output.register_hook(keeper(i))
        return replace(call, output_gradients=gradients)

    # Steps -----------------------------------------------------------------------------------

    def _is_watched(self) -> bool:
        """Whether this thread is the rank that is recorded."""
        return _current() is self

    def _this_step(self) -> _RawStep:
        return self._step(self.num_steps)

    def _step_of(self, optimizer: Optimizer) -> _RawStep:
        return self._step(self._num_steps[id(optimizer)])

    def _step(self, number: int) -> _RawStep:
        while len(self._steps) <= number:
            self._steps.append(_RawStep())
        return self._steps[number]

    def before_step(self, optimizer: Optimizer) -> None:
        """Record what an optimizer is about to use."""
        raw = self._step_of(optimizer)
        if not raw.buffers and not raw.parameters:
            self._note_model(raw)
        for group in optimizer.param_groups:
            for name, value in group.items():
                if isinstance(value, int | float | tuple):
                    raw.values.options.setdefault(name, []).append(repr(value))
        for param in _params_of(optimizer):
            raw.parameters.setdefault(param, _copy(param))
            raw.gradients[param] = None if param.grad is None else _copy(unmarked(param.grad))

    def after_step(self, optimizer: Optimizer) -> None:
        """Record the states that an optimizer has now, and count its step."""
        raw = self._step_of(optimizer)
        for param in _params_of(optimizer):
            if param in optimizer.state:
                raw.states[param] = {
                    key: _copy(value) if isinstance(value, Tensor) else value
                    for key, value in optimizer.state[param].items()
                }
        self._num_steps[id(optimizer)] += 1
        if not any(known is optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)

    def _note_model(self, raw: _RawStep) -> None:
        optimized = (param for optimizer in self._optimizers for param in _params_of(optimizer))
        for param in (*self._model.parameters(), *optimized):
            raw.parameters[param] = _copy(param)
        for name, buffer in self._model.named_buffers():
            raw.buffers[name] = _copy(buffer)


def _trained(values: StepValues) -> StepValues:
    """The step without the forwards that backward did not reach, such as that of a metric.

    A model that is checkpointed as a whole may give outputs without a graph, which backward builds
    later: where no forward seems to train, all do.
    """
    trained = [number for number, root in enumerate(values.roots) if root.is_trained]
    if not trained:
        return values
    outputs = {
        name: [replace(o, root=trained.index(o.root)) for o in of_module if o.root in trained]
        for name, of_module in values.outputs.items()
    }
    return replace(values, roots=[values.roots[number] for number in trained], outputs=outputs)


# torch's hooks on optimizers are global: they are registered once, and ask for the recorder of the
# thread.
_registration = threading.Lock()


def _current() -> ValueRecorder | None:
    recorder: ValueRecorder | None = here.recorder
    return recorder


@cache
def _watch_optimizers() -> None:
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (recorder := _current()) is not None:
            recorder.before_step(optimizer)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (recorder := _current()) is not None:
            recorder.after_step(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def float_tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output, of which the first are recorded."""
    return [t for t in tensors(output) if t.is_floating_point()][:_MAX_OUTPUTS]


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _copy(tensor: Tensor) -> Tensor:
    return (local_shard(tensor) if is_part(tensor) else tensor.detach()).clone()
