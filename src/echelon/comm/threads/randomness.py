"""A random stream for each simulated rank.

torch has one default CPU generator for the whole process. Ranks that are threads would draw from it
in an order that changes from run to run, so ``torch.manual_seed(0)`` on every rank would give
neither the weights of one process nor the same weights twice. Here the generator has one owner at a
time. Before another rank draws, the state of the owner is saved and that of the rank is set. If the
rank is the owner already, a draw only costs a lock.

Law: what a simulated rank draws depends only on its own seeds and draws.

Python's ``random``, NumPy's global generator, and the generators of CUDA devices stay shared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from echelon.comm.threads.default_dtype import RankDtype
from echelon.comm.threads.installation import Installation
from echelon.process.operating_system import at_fork
from echelon.process.replacement import Replacement

_DRAWS = {
    torch: (
        "rand randn randint rand_like randn_like randint_like randperm normal bernoulli "
        "multinomial poisson dropout feature_dropout alpha_dropout feature_alpha_dropout "
        "native_dropout rrelu binomial _standard_gamma _sample_dirichlet lstm gru rnn_tanh "
        "rnn_relu dropout_ alpha_dropout_ feature_dropout_ feature_alpha_dropout_ rrelu_"
    ),
    torch.Tensor: (
        "uniform_ normal_ bernoulli bernoulli_ exponential_ random_ cauchy_ geometric_ "
        "log_normal_ multinomial"
    ),
    torch.nn.functional: (
        "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout "
        "gumbel_softmax rrelu rrelu_ "
        "multi_head_attention_forward scaled_dot_product_attention fractional_max_pool2d "
        "fractional_max_pool3d fractional_max_pool2d_with_indices "
        "fractional_max_pool3d_with_indices"
    ),
    torch.nn.init: (
        "uniform_ normal_ trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ "
        "kaiming_normal_ "
        "orthogonal_ sparse_"
    ),
}

_DRAWING: frozenset[Any] = frozenset(
    getattr(module, name)
    for module, names in _DRAWS.items()
    for name in names.split()
    if name in dir(module)
)


# Replacements of these functions have their names: libraries that guard ``torch.nn.init`` replace
# its functions, and torch passes the replacements to modes.
_NAMES = frozenset(function.__name__ for function in _DRAWING if isinstance(function, FunctionType))


def _draws(function: Callable[..., Any]) -> bool:
    return function in _DRAWING or (
        isinstance(function, FunctionType) and function.__name__ in _NAMES
    )


class _Turns:
    """The owner of torch's default generator, and the states of all others."""

    def __init__(self) -> None:
        self.generator = torch.default_generator
        self._lock = threading.RLock()
        self._states: dict[object, Tensor] = {}
        self._owner: object = None  # None stands for code outside of simulated ranks

    @contextmanager
    def turn(self, who: object) -> Iterator[torch.Generator]:
        """Hold the generator with the state of ``who``."""
        with self._lock:
            if self._owner is not who:
                self._states[self._owner] = self.generator.get_state()
                # A new stream starts as a copy of that outside of simulated ranks.
                self.generator.set_state(self._states.get(who, self._states[None]))
                self._owner = who
            yield self.generator

    def forget(self, who: object) -> None:
        """Drop the stream of a rank that has ended."""
        with self._lock:
            if self._owner is who:
                self.generator.set_state(self._states[None])
                self._owner = None
            self._states.pop(who, None)

    def free_after_fork(self) -> None:
        """In a forked child only the forking thread lives on; the lock may belong to another."""
        self._lock = threading.RLock()


_turns = _Turns()
at_fork(after_in_child=_turns.free_after_fork)
_current = threading.local()


class _RankGenerator:
    """Replaces ``torch.random.default_generator``: it acts on the stream of the calling rank."""

    def __getattr__(self, name: str) -> Any:
        who = getattr(_current, "who", None)

        def call(*args: Any, **kwargs: Any) -> Any:
            with _turns.turn(who) as generator:
                return getattr(generator, name)(*args, **kwargs)

        return call


class _OwnDraws(TorchFunctionMode):
    """Calls functions of torch with the random stream and the default dtype of a rank."""

    def __init__(self, who: object, dtype: RankDtype) -> None:
        super().__init__()
        self._who = who
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if _draws(func):
            return self._dtype.call(self._draw, (func, args, kwargs or {}), {})
        return self._dtype.call(func, args, kwargs or {})

    def _draw(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with _turns.turn(self._who):
            return func(*args, **kwargs)


def _run_backward_with_own_draws(*args: Any, **kwargs: Any) -> Any:
    """Run backward under the mode of the rank, for draws in recomputed forwards.

    torch disables a mode while it handles a function. ``Tensor.backward`` and
    ``torch.autograd.grad`` are such functions, so all of backward would run without the mode.
    """
    who = getattr(_current, "who", None)
    # If the mode is active, a second one must not be: torch.compile would see it, and trace another
    # graph for the recomputation than for the forward.
    if who is None or _has_mode():
        return _backward.original(*args, **kwargs)
    with _OwnDraws(who, _current.dtype):
        return _backward.original(*args, **kwargs)


def _has_mode() -> bool:
    """Whether the mode of the rank is active."""
    depth = torch._C._len_torch_function_stack()
    return any(isinstance(torch._C._get_function_stack_at(i), _OwnDraws) for i in range(depth))


_backward = Replacement(torch.autograd, "_engine_run_backward", _run_backward_with_own_draws)
_in_torch = Installation.of(
    Replacement(torch.random, "default_generator", _RankGenerator()), _backward
)


@contextmanager
def random_stream(dtype: RankDtype | None = None) -> Iterator[None]:
    """Give this thread its own stream in the body, which starts as a copy of the outer one.

    Calls of torch in the body use ``dtype`` of this thread as the default dtype.

    Example:
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> with random_stream():
        ...     inside = torch.rand(3)
        >>> bool((inside == torch.rand(3)).all())
        True
    """
    who = object()
    dtype = dtype or RankDtype(torch.get_default_dtype())
    with _in_torch.of_rank(), _OwnDraws(who, dtype):
        _current.who, _current.dtype = who, dtype
        try:
            yield
        finally:
            _current.who = None
            _turns.forget(who)
