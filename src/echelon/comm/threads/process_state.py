"""State of the process that each simulated rank has for itself, because ranks take turns.

A rank that is a process has its own random streams, filters of warnings and environment. Ranks that
are threads share them, so what belongs to a rank is put into the process when its turn begins, and
taken out when another rank runs. What torch keeps for each thread, such as the grad mode, autocast
and the default device, needs nothing.

Law: between its turns, nothing that a rank finds in a registered state has changed.

::

            turn of rank 0          turn of rank 1          caller
    ─────► [rank 0's streams] ───► [rank 1's streams] ───► [the caller's streams] ─────►
             saved when rank 1 runs    saved at the end
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from types import NoneType
from typing import Any, NamedTuple, TypeVar, final

import torch

from echelon.comm.threads.numpy_stream import NumpyStream
from echelon.comm.threads.python_stream import PythonStream
from echelon.errors import StateError
from echelon.process import time_limits
from echelon.process.operating_system import at_fork

# The waits of this file and of ``turns`` never hand on a turn, whatever replaces the method.
wait_for = threading.Condition.wait


class _State(NamedTuple):
    """One kind of state: how it is read from the process, put into it, and copied for a rank."""

    save: Callable[[], Any]
    restore: Callable[[Any], Any]
    copy: Callable[[Any], Any]


_states: dict[str, _State] = {}
_at_registration: dict[str, Any] = {}


def register_state(
    name: str,
    save: Callable[[], Any],
    restore: Callable[[Any], Any],
    copy: Callable[[Any], Any] = lambda value: value,
) -> Callable[[], None]:
    """Give each simulated rank a state of the process of its own, from its next turn on.

    Args:
        name: registered again, it replaces the functions.
        save: returns the state that the process has now. Where it is cheap, the same object as
            before if nothing has changed, so that it need not be put into the process again.
        restore: puts a state that ``save`` has returned into the process.
        copy: makes what a rank starts with from the caller's state, if ranks change it in place.

    Returns:
        A function that lets ranks share the state again; call it when no rank runs.

    Example:
        >>> import sys
        >>> remove = register_state(
        ...     "path", lambda: sys.path, lambda path: setattr(sys, "path", path), list
        ... )
        >>> remove()
    """
    _states[name] = _State(save, restore, copy)
    _at_registration[name] = save()

    def remove() -> None:
        _states.pop(name, None)
        _at_registration.pop(name, None)

    return remove


def register_variable(
    name: str, holder: Any, attribute: str, copy: Callable[[Any], Any] = lambda value: value
) -> None:
    """Give each simulated rank one attribute of its own, which is there already.

    Args:
        name: of the state.
        holder: a module, a class or an object.
        attribute: read and assigned at each turn, so it should cost nothing.
        copy: makes what a rank starts with from the caller's value.
    """
    register_state(
        name, partial(getattr, holder, attribute), partial(setattr, holder, attribute), copy
    )


@final
class StateOwner:
    """A rank, or the code outside of ranks, with its values of the registered states.

    Args:
        start: whose values are copied; None for the code outside of ranks.

    Attributes:
        lock: lets one of the worlds that this owner has started have its state in the process.
    """

    def __init__(self, start: StateOwner | None = None) -> None:
        self.lock = ProcessLock()
        self._values: dict[str, Any] = {}
        if start is not None:
            _import_numpy_random()
            if _loaded is start:
                start._values = {name: state.save() for name, state in _states.items()}
            self._values = {
                name: state.copy(start._values[name])
                for name, state in _states.items()
                if name in start._values
            }

    def load(self) -> None:
        """Put the state of this owner into the process, and keep that of the one before."""
        global _loaded
        if _loaded is self:
            return
        current = _loaded._values = {name: state.save() for name, state in _states.items()}
        for name, state in _states.items():
            if name not in self._values:  # registered since this owner ran
                self._values[name] = state.copy(_at_registration[name])
            value = self._values[name]
            if value is not current[name]:
                state.restore(value)
        _loaded = self


@final
class ProcessLock:
    """Lets the ranks of one world at a time have their state in the process, in order of arrival.

    Worlds that are started by different threads exclude one another. A world that a rank starts is
    part of the turn of that rank, and takes the lock of that rank.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[object] = deque()
        self._world: object = None

    def acquire(self, world: object) -> None:
        """Wait until no other world has its state in the process; this one may have it already.

        Raises:
            StateError: another world does not let it go.
        """
        end_s = time.monotonic() + time_limits.OTHER_WORLD_S
        with self._changed:
            self._queue.append(world)
            while self._world is not world and (self._world or self._queue[0] is not world):
                if time.monotonic() > end_s:
                    self._queue.remove(world)
                    raise StateError(
                        "another thread of this process runs simulated ranks, and one of them has "
                        f"kept its turn for {time_limits.OTHER_WORLD_S:g} s: run these ranks after "
                        "them, or in another process"
                    )
                wait_for(self._changed, time_limits.OTHER_WORLD_S)
            self._queue.remove(world)
            self._world = world

    def release(self, world: object) -> None:
        """Let other worlds go on, if ``world`` has the lock."""
        with self._changed:
            if self._world is world:
                self._world = None
                self._changed.notify_all()

    def is_wanted(self) -> bool:
        """Whether another world waits for the lock."""
        return bool(self._queue)


def _leave_ranks_after_fork() -> None:
    """A forked child is no rank: the forking thread lives on alone, with the state that it has."""
    global _loaded
    OUTSIDE.lock = ProcessLock()
    _loaded = OUTSIDE


OUTSIDE = StateOwner()
_loaded = OUTSIDE
at_fork(after_in_child=_leave_ranks_after_fork)


# The states that every process has ----------------------------------------------------------------

Value = TypeVar("Value")


def _same_if_equal(save: Callable[[], Value]) -> Callable[[], Value]:
    """Return the same object for equal states, which nobody changes in place."""
    latest = save()

    @wraps(save)
    def saved() -> Value:
        nonlocal latest
        value = save()
        if value != latest:
            latest = value
        return latest

    return saved


def register_generators(module: Any) -> None:
    """Give each simulated rank random streams of its own on devices, such as ``torch.cuda``."""

    def save() -> list[Any] | None:
        return list(module.get_rng_state_all()) if module.is_initialized() else None

    def restore(states: list[Any] | None) -> None:
        if states is not None and module.is_initialized():
            module.set_rng_state_all(states)

    register_state("accelerator", save, restore)


_restore_torch: Callable[[Any], Any] = torch.default_generator.set_state
register_state("torch", torch.default_generator.get_state, _restore_torch)
_accelerator = torch.accelerator.current_accelerator()
if _accelerator is None or _accelerator.type == "mps":  # which has one for all ranks
    register_state("accelerator", NoneType, lambda nothing: None)  # ``NoneType()`` is fast
else:
    register_generators(torch.get_device_module(_accelerator))
_python_stream = PythonStream()
register_state("random", _python_stream.save, _python_stream.restore)


def _import_numpy_random() -> None:
    """Import NumPy's random numbers, if it is installed, before ranks could import them."""
    if "numpy.random" not in sys.modules and importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy.random")


_numpy_stream = NumpyStream()
register_state("numpy", _numpy_stream.save, _numpy_stream.restore, _numpy_stream.copy)


def _restore_dtype(dtype: torch.dtype) -> None:
    if torch.get_default_dtype() is not dtype:
        torch.set_default_dtype(dtype)


register_state("default dtype", torch.get_default_dtype, _restore_dtype)

_Flags = tuple[bool, bool, bool, bool, bool, str, tuple[bool, bool]]


# What their public counterparts call, and nothing else.
_get_mode = torch._C._get_deterministic_algorithms
_get_warn_only = torch._C._get_deterministic_algorithms_warn_only
_get_fill = torch._C._get_deterministic_fill_uninitialized_memory
_get_cudnn_deterministic = torch._C._get_cudnn_deterministic
_get_cudnn_benchmark = torch._C._get_cudnn_benchmark
_get_precision = torch._C._get_float32_matmul_precision


@_same_if_equal
def _save_flags() -> _Flags:
    return (
        _get_mode(),
        _get_warn_only(),
        _get_fill(),
        _get_cudnn_deterministic(),
        _get_cudnn_benchmark(),
        _get_precision(),
        (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    )


def _restore_flags(flags: _Flags) -> None:
    if flags == _save_flags():
        return
    mode, warn_only, fill, cudnn_deterministic, cudnn_benchmark, precision, anomaly = flags
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    vars(torch.utils)["deterministic"].fill_uninitialized_memory = fill
    torch.backends.cudnn.deterministic = cudnn_deterministic
    torch.backends.cudnn.benchmark = cudnn_benchmark
    torch.set_float32_matmul_precision(precision)
    torch.set_anomaly_enabled(*anomaly)


register_state("determinism", _save_flags, _restore_flags)

_Warnings = tuple[list[Any], Any, Any]


def _save_warnings() -> _Warnings:
    names = vars(warnings)  # ``catch_warnings`` replaces all three
    return names["filters"], names["showwarning"], names["_showwarnmsg_impl"]


def _restore_warnings(saved: _Warnings) -> None:
    names = vars(warnings)
    changed = names["filters"] != saved[0]
    names["filters"], names["showwarning"], names["_showwarnmsg_impl"] = saved
    if changed:  # else warnings that are shown once would be shown once for each turn
        _forget_shown_warnings()


def _forget_shown_warnings() -> None:
    names = vars(warnings)
    name = "_filters_mutated_lock_held" if sys.version_info >= (3, 14) else "_filters_mutated"
    names[name]()


register_state(
    "warnings",
    _save_warnings,
    _restore_warnings,
    lambda saved: (list(saved[0]), *saved[1:]),
)


_Variables = dict[Any, Any]  # as ``os.environ`` keeps them; to decode them takes far longer
_variables: _Variables = {}  # what was read or written last
_Changes = tuple[_Variables, _Variables, dict[Any, Any]]
_changes: dict[tuple[int, int], _Changes] = {}  # from some variables to others, by identity
_MOST_CHANGES = 1000


def _save_environment() -> _Variables:
    global _variables
    encoded: _Variables = vars(os.environ)["_data"]
    if encoded != _variables:
        _variables = dict(encoded)
    return _variables


def _changed(before: _Variables, after: _Variables) -> dict[Any, Any]:
    """The variables that differ, with None for those to be removed; known for turns to come."""
    key = id(before), id(after)
    if key not in _changes:
        if len(_changes) == _MOST_CHANGES:
            _changes.clear()
        changes = {name: after.get(name) for name in before if after.get(name) != before[name]}
        changes |= {name: after[name] for name in after.keys() - before.keys()}
        _changes[key] = before, after, changes
    return _changes[key][2]


def _restore_environment(variables: _Variables) -> None:
    global _variables
    encoded: _Variables = vars(os.environ)["_data"]
    for name, value in _changed(_variables, variables).items():
        if value is None:
            os.unsetenv(name)
            del encoded[name]
        else:
            os.putenv(name, value)
            encoded[name] = value
    _variables = variables


register_state("environment", _save_environment, _restore_environment)


@_same_if_equal
def _save_folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody has removed it, so there is nothing to come back to
        return None


def _restore_folder(folder: str | None) -> None:
    if folder is not None and folder != _save_folder():
        os.chdir(folder)


register_state("working directory", _save_folder, _restore_folder)


# What a process that runs a part of this one's work begins with. The others are of this process, or
# hold functions, which may be such that no process can send them.
_SENT = (
    "torch",
    "random",
    "numpy",
    "default dtype",
    "determinism",
    "environment",
    "working directory",
)


def state_for_process() -> dict[str, Any]:
    """What a simulated rank would begin with, as far as it can be sent to another process."""
    return {name: _states[name].save() for name in _SENT}


def restore_in_process(saved: dict[str, Any]) -> None:
    """Give this process what ``state_for_process`` has returned in another one.

    Example:
        >>> saved = state_for_process()
        >>> number = torch.rand(1)
        >>> restore_in_process(saved)
        >>> bool(torch.rand(1) == number)
        True
    """
    for name, value in saved.items():
        _states[name].save()  # which looks what is there
        _states[name].restore(value)
