"""Tensors with shapes and without values, and a cache of the operations on them.

[Note: values that are not there]
A stage in the middle of a model runs the model's own ``forward``, but this rank has only some of
the modules. The others work on ``FakeTensor``s, which are on the meta device and cost nothing.
Plain meta tensors would be wrong: ``F.linear(real, meta)`` and ``real.add_(meta)`` return numbers
without an error. Here every result with a fake operand is fake, and writing it into a real tensor
is an error. So a real result cannot depend on a missing value. (Torch's own ``FakeTensorMode``
makes *all* tensors fake and refuses to mix them with real ones.)

[Note: a cache of fake operations]
A stage runs the model's forward for every microbatch, and most operations before its blocks are
fake and give the same shapes each time. So the result of an operation is cached by its place in the
forward, its function, and its operands. The key of a fake operand is its identity; that of a real
operand is its shape, dtype, strides and device, since nothing else of it can affect a fake result;
that of a plain value is the value. The place tells two equal calls apart, whose results differ if
they have a real operand or a random number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from echelon.errors import UnsupportedError

_MAX_RESULTS = 4096  # then the cache is cleared: the model has new shapes each time
_PLAIN = (
    bool,
    int,
    float,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_CACHED = (Tensor, *_PLAIN)  # results that cannot be changed


@final
class FakeTensorCache:
    """The results of the fake operations of one stage.

    Attributes:
        problem: what the forward that runs, or ran last, has asked for that is not there. The model
            may have caught the error and gone on without the value.
    """

    def __init__(self) -> None:
        self.problem: NeedsValues | None = None
        self._results: dict[Hashable, Any] = {}
        # Fake tensors by identity, which no other object gets while they live.
        self._fakes: dict[int, Tensor] = {}
        self._lasting_fakes: dict[int, Tensor] | None = None  # the fakes of stand-ins for modules
        self._place = 0  # of the next operation in the forward
        self._is_enabled = True

    def begin_forward(self) -> None:
        """Start again at the first operation of the forward."""
        self._place = 0
        if self._lasting_fakes is None:
            self._lasting_fakes = dict(self._fakes)
        if len(self._results) > _MAX_RESULTS:
            self._clear()

    def needs_values(self, problem: str) -> NeedsValues:
        """The error that says what is not there, which is remembered."""
        self.problem = self.problem or NeedsValues(problem)
        return self.problem

    def disable(self) -> None:
        """Cache nothing from now on, since a fake tensor was changed in place."""
        self._is_enabled = False
        self._clear()

    def _clear(self) -> None:
        self._results.clear()
        self._fakes = dict(self._lasting_fakes or {})

    def add_fake(self, tensor: Tensor) -> None:
        """Register a fake tensor, which will be an operand again."""
        self._fakes[id(tensor)] = tensor

    def get_or_make(self, plain: Sequence[Any], make: Callable[[], Any]) -> Any:
        """The result of ``make``, which is called once for all plain values equal to these."""
        try:
            key = "made", self._key_of(plain)
        except _Uncacheable:
            return make()
        if not self._is_enabled:
            return make()
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]

    def next_key(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Hashable | None:
        """The key of the next operation of the forward; None if it is not cached."""
        self._place += 1
        if not self._is_enabled:
            return None
        try:
            named = self._key_of(tuple(kwargs.items())) if kwargs else None
            return self._place, func, self._key_of(args), named
        except _Uncacheable:
            return None

    def get(self, key: Hashable | None) -> tuple[Any] | None:
        """The result, in a tuple; None if there is none."""
        return None if key is None else self._results.get(key)

    def put(self, key: Hashable | None, result: Any) -> None:
        """Cache a result, unless it can be changed."""
        items = result if isinstance(result, tuple) else (result,)
        if key is None or not all(item is None or isinstance(item, _CACHED) for item in items):
            return
        for item in items:
            if isinstance(item, Tensor):
                self.add_fake(item)
        self._results[key] = (result,)

    def _key_of(self, value: Any) -> Hashable:
        kind = type(value)
        if id(value) in self._fakes:
            return id(value)
        if kind in _PLAIN or value is None or value is ...:
            return kind, value
        if kind in (tuple, list, torch.Size):
            return kind, tuple([self._key_of(item) for item in value])
        if kind in (Tensor, torch.nn.Parameter):
            return value.shape, value.dtype, value.stride(), value.device
        if kind is slice:
            return slice, self._key_of((value.start, value.stop, value.step))
        raise _Uncacheable


class _Uncacheable(Exception):
    """An operand without a key."""


_META = torch.device("meta")
_MOVES = {"cpu", "cuda", "xpu"}  # methods whose device a fake tensor is taken to be on already


class NeedsValues(UnsupportedError):
    """An operation on fake tensors whose result has a shape that torch cannot tell."""


@final
class FakeTensor(Tensor):
    """A tensor without values. See [Note: values that are not there].

    Attributes:
        fake_device: the device that it claims to be on, so that tensors made on it are real.
        missing: the names of the missing tensors that it was computed from.
        cache: the cache of the stage that lacks the values.
    """

    fake_device: torch.device
    missing: frozenset[str]
    cache: FakeTensorCache

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeTensor:
        return self  # it has no values that a change of the copy could affect

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == _GET_DEVICE:
            fake_device: torch.device = vars(args[0])["fake_device"]
            return fake_device
        # Most operations have a fake tensor among their arguments, and not deeper.
        cache = _cache_of(args) or _cache_of(pytree.tree_leaves((args, kwargs)))
        assert cache is not None, "else this would not be called"
        key = cache.next_key(func, args, kwargs)
        cached = cache.get(key)
        if cached is not None:
            return cached[0]
        result = _run(func, args, kwargs)
        cache.put(key, result)
        return result


_GET_DEVICE = Tensor.device.__get__


def _cache_of(values: Iterable[Any]) -> FakeTensorCache | None:
    """The cache of the first fake tensor."""
    for value in values:
        if type(value) is FakeTensor:
            cache: FakeTensorCache = vars(value)["cache"]
            return cache
    return None


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the meta device; tensors in its result are fake."""
    fakes = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
    first, name = vars(fakes[0]), getattr(func, "__name__", "")
    if name in _MOVES:
        return args[0]
    _check_target(name, args, kwargs, first["cache"])
    args, kwargs = pytree.tree_map(_to_meta, (args, kwargs))
    if name == "to":
        args = tuple(_META if isinstance(arg, str) else arg for arg in args)
    if "device" in kwargs:
        kwargs["device"] = _META
    missing = frozenset[str]().union(*(vars(fake)["missing"] for fake in fakes))
    try:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        raise first["cache"].needs_values(
            f"{name}() depends on {sorted(missing)}, which other stages have, and cannot run by "
            f"shapes alone ({type(error).__name__}: {error})"
        ) from error

    def fake(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
            return _as_fake(leaf, first["fake_device"], missing, first["cache"])
        return leaf

    return pytree.tree_map(fake, result)


def _to_meta(leaf: Any) -> Any:
    """A device or a real tensor on the meta device; any other value unchanged."""
    if isinstance(leaf, torch.device):
        return _META
    if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
        return leaf.detach().to(_META)
    return leaf


def _check_target(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], cache: FakeTensorCache
) -> None:
    """Refuse to write into a real tensor, which would keep its old values."""
    is_in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    target = kwargs.get("out", args[0] if is_in_place and args else None)
    for leaf in pytree.tree_leaves(target):
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
            raise UnsupportedError(
                f"{name or 'an operation'} writes into a tensor of this stage what only a stage "
                "before it has: compute it without changing a tensor in place, or let the model "
                "say its layers with pipeline_layers()"
            )
    if target is not None:
        cache.disable()


_IN_PLACE = {"__setitem__"} | {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


def _as_fake(
    tensor: Tensor, fake_device: torch.device, missing: frozenset[str], cache: FakeTensorCache
) -> FakeTensor:
    with torch._C.DisableTorchFunctionSubclass():
        fake: FakeTensor = Tensor._make_subclass(FakeTensor, tensor.detach().to(_META))
    vars(fake).update(fake_device=fake_device, missing=missing, cache=cache)
    return fake


def fake_tensor(
    shape: Iterable[int],
    dtype: torch.dtype,
    fake_device: torch.device,
    name: str,
    cache: FakeTensorCache,
) -> FakeTensor:
    """A fake tensor of this shape; errors call it ``name``."""
    meta = torch.empty(tuple(shape), dtype=dtype, device=_META)
    fake = _as_fake(meta, fake_device, frozenset([name]), cache)
    cache.add_fake(fake)
    return fake


def without_values(leaves: Iterable[Any]) -> list[Any]:
    """Leaves of a value as plain values, with the shapes and dtypes of tensors."""
    return [
        (True, leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (False, leaf)
        for leaf in leaves
    ]


def with_fakes(
    dumped: Iterable[Any], fake_device: torch.device, name: str, cache: FakeTensorCache
) -> list[Any]:
    """The leaves of which ``without_values`` made these, with fake tensors."""
    return [
        fake_tensor(leaf[1], leaf[2], fake_device, name, cache) if leaf[0] else leaf[1]
        for leaf in dumped
    ]


def fake_copy(module: nn.Module, name: str, cache: FakeTensorCache) -> nn.Module:
    """A copy of a submodule that has fake tensors only; optimizers do not find its parameters."""
    memo: dict[int, Any] = {
        id(tensor): fake_tensor(tensor.shape, tensor.dtype, tensor.device, f"{name}.{local}", cache)
        for local, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    return copy.deepcopy(module, memo)


def missing_names(value: Any) -> list[str]:
    """The names of the missing tensors that the fake tensors in ``value`` were computed from."""
    leaves = pytree.tree_leaves(value)
    return sorted(
        {name for leaf in leaves if isinstance(leaf, FakeTensor) for name in leaf.missing}
    )
