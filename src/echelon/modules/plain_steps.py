"""Steps of optimizers, in which parameters and gradients are plain tensors of this rank's parts.

An optimizer that takes each element by itself needs nothing but the parts, and torch's fused and
foreach forms take plain tensors only. So the classes of parameters, of gradients and of what the
optimizer has copied of them are switched after all other hooks before a step, and back before all
other hooks after it, or on the way of what a step raises. Only ``optimizer.state`` stays plain.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import chain, repeat
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.optim.optimizer import Optimizer

from echelon.comm.compiler_bypass import bypass_compiler
from echelon.modules.optimizer_memory import number_keys
from echelon.modules.sharded_tensor import (
    KeptGradient,
    ShardedParameter,
    ShardedTensor,
    grad_of,
    refuse_kept,
    sharding_of,
)
from echelon.modules.stage_gradients import JoinedStages, StageGradient

# By optimizer whose step is under way: what is plain meanwhile, and the class of each.
_plain: WeakKeyDictionary[Optimizer, tuple[list[Tensor], list[type[Tensor]]]] = WeakKeyDictionary()
# By optimizer, the id of the state that consists of parts; 0 after a load.
_cut: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def make_steps_plain(optimizer: Optimizer) -> None:
    """Let the parts in the coming step of ``optimizer`` be plain tensors.

    It is called by a hook before the step that runs before those of the optimizer itself.
    """
    _restore(optimizer)  # in a step that calls that of its base class
    before: Any = optimizer._optimizer_step_pre_hooks  # ordered dicts
    after: Any = optimizer._optimizer_step_post_hooks
    if _KEY not in before:
        _switch_back_after_errors(type(optimizer))
    before[_KEY] = _switch
    before.move_to_end(_KEY)
    after[_KEY] = _switch_back
    after.move_to_end(_KEY, last=False)


_KEY = -32  # of our hooks among those of an optimizer, whose keys torch counts from 0


def closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The closure that a step was given, whose arguments a hook gets with the optimizer first."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


@bypass_compiler
def _switch(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _make_plain(optimizer)
    closure = closure_of(args, kwargs)
    if not callable(closure):
        return None
    if len(args) > 1:
        return (args[0], _with_parts(optimizer, closure), *args[2:]), kwargs
    return args, {**kwargs, "closure": _with_parts(optimizer, closure)}


@bypass_compiler
def _switch_back(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _restore(optimizer)


_HOOKED = Optimizer.profile_hook_step(Optimizer.step).__code__


def _switch_back_after_errors(kind: type[Optimizer]) -> None:
    """Let steps of a class that raise switch back, too: torch calls no hook after them.

    A step may have begun, and schedulers may keep the function that calls the hooks and the step.
    So the step is replaced inside of that function.
    """
    for owner in kind.__mro__:
        hooked = vars(owner).get("step")
        while hooked is not None and getattr(hooked, "__code__", None) is not _HOOKED:
            hooked = getattr(hooked, "__wrapped__", None)
        if hooked is not None:
            cell = hooked.__closure__[_HOOKED.co_freevars.index("func")]
            if cell.cell_contents not in _switching:
                cell.cell_contents = _switching_back(cell.cell_contents)
                _switching.add(cell.cell_contents)


_switching: WeakSet[Callable[..., Any]] = WeakSet()


def _switching_back(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def switching_back(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(optimizer, *args, **kwargs)
        except BaseException:
            _restore(optimizer)
            raise

    return switching_back


def _with_parts(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure of a step, which is code of the user's and sees parts."""

    @wraps(closure)
    def with_parts() -> Any:
        _restore(optimizer)
        try:
            loss = closure()
            refuse_kept_gradients(optimizer)
            return loss
        finally:
            _make_plain(optimizer)

    return with_parts


def refuse_kept_gradients(optimizer: Optimizer) -> None:
    """Refuse a step over gradients that ``no_sync`` keeps, before it has changed anything.

    Raises:
        StateError: a parameter has one.
    """
    with DisableTorchFunctionSubclass():
        gradients = [
            grad for group in optimizer.param_groups for grad in map(grad_of, group["params"])
        ]
    if KeptGradient in map(type, gradients):  # which stays in C, unlike a loop
        kept = [gradient for gradient in gradients if isinstance(gradient, KeptGradient)]
        gradient = next((one for one in kept if one.is_lost), kept[0])
        refuse_kept(gradient, f"a step of {type(optimizer).__name__}")


def _make_plain(optimizer: Optimizer) -> None:
    every: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
    params = [param for param in every if type(param) is ShardedParameter]
    seen: set[int] = set()
    with DisableTorchFunctionSubclass():
        marked = _marked_in(map(grad_of, every), seen)
    gradients = {id(gradient) for gradient in marked}
    for value in _marked_in([optimizer.state], seen):
        if id(value) not in gradients:
            _set_classes([value], repeat(Tensor))
            vars(value).pop("_sharding", None)  # or it could not be saved
    if params and _cut.get(optimizer) != id(optimizer.state):
        if optimizer not in _cut:
            after_load(optimizer, _state_is_another)
        _take_parts(optimizer, params)
        _cut[optimizer] = id(optimizer.state)
    marked += _marked_in([optimizer], seen)
    tensors = [*params, *marked]
    _plain[optimizer] = tensors, list(map(type, tensors))
    _set_classes(marked, repeat(Tensor))
    _set_classes(params, repeat(nn.Parameter))


_MARKED = frozenset((ShardedTensor, StageGradient, JoinedStages))
_HOLDS_NOTHING = frozenset(
    (Tensor, nn.Parameter, ShardedParameter, float, int, bool, str, NoneType)
)
_CONTAINERS = (dict, list, tuple, deque, Optimizer)


def _marked_in(values: Iterable[Any], seen: set[int]) -> list[Tensor]:
    """The marked tensors of these values, and of containers and other optimizers among them."""
    marked: list[Tensor] = []
    waiting = [values]
    while waiting:
        items = tuple(waiting.pop())
        types = set(map(type, items))
        if types <= _HOLDS_NOTHING:
            continue  # as nearly always: this runs before each step, over every state
        if types == {dict} and seen.isdisjoint(map(id, items)):
            seen.update(map(id, items))  # the states of all parameters, in loops that stay in C
            waiting.append(chain.from_iterable(map(dict.values, items)))
            continue
        for value in items:
            kind = type(value)
            if kind in _HOLDS_NOTHING:
                continue
            if kind in _MARKED:
                marked.append(value)
            elif isinstance(value, _CONTAINERS) and id(value) not in seen:
                seen.add(id(value))
                waiting.append(_held_by(value))
    return marked


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, Optimizer):
        return [held for key, held in vars(value).items() if not key.startswith("_optimizer_")]
    return value.values() if isinstance(value, dict) else value


def _set_classes(tensors: Iterable[Tensor], classes: Iterable[type[Tensor]]) -> None:
    deque(map(setattr, tensors, repeat("__class__"), classes), maxlen=0)  # a loop that stays in C


def after_load(optimizer: Optimizer, hook: Callable[[Optimizer], None]) -> None:
    """Call ``hook`` after each load of a state into ``optimizer``."""
    # Some wrappers do not call the constructor of torch, which makes it.
    vars(optimizer).setdefault("_optimizer_load_state_dict_post_hooks", OrderedDict())
    optimizer.register_load_state_dict_post_hook(hook)


def _state_is_another(optimizer: Optimizer) -> None:
    _cut[optimizer] = 0


def _take_parts(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
    """Cut a state that was made for whole parameters: before wrapping, or by one process."""
    states = [(sharding_of(param), optimizer.state.get(param, {})) for param in params]
    numbers = number_keys(
        optimizer,
        ((home.shape, key, value) for home, state in states for key, value in state.items()),
    )
    for home, state in states:
        # In one of a scalar, a tensor with dims is a part already, and those without are numbers.
        is_cut = not home.shape and any(
            isinstance(value, Tensor) and value.dim() for value in state.values()
        )
        if is_cut or home.shape == home.local_shape:
            continue
        for key, value in state.items():
            is_whole = isinstance(value, Tensor) and tuple(value.shape) == home.shape
            if is_whole and key not in numbers:
                state[key] = home.part_of(value).clone()


def _restore(optimizer: Optimizer) -> None:
    if (switched := _plain.pop(optimizer, None)) is not None:
        _set_classes(*switched)
