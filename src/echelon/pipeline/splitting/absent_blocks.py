"""Stand-ins for the blocks of a ``ModuleList`` that other stages have.

[Note: what is known of a block that is not here]
The model's own forward runs around the stand-ins, and it may do anything with a block: call it in
another order or twice, or read what the block has stored in an attribute. A stand-in knows the
shapes of what its block has returned, for which the stages before this one send them, and the plain
attributes that no method of the block changes. Everything else is an error that names the block.
"""

from __future__ import annotations

import dis
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from echelon.pipeline.splitting.fake_tensors import FakeTensorCache, fake_tensor

# By index of a block: what each of its calls has returned, without the values of tensors. None
# where that cannot be said in plain values.
BlockOutputs = dict[int, list[Any]]

_SENDABLE = (bool, int, float, str, type(None))


@final
class BlockCalls:
    """The calls of the blocks of one forward, on a stage that has the blocks ``start..stop-1``.

    Attributes:
        outputs: what blocks have returned: received for those before ``start``, and recorded.
    """

    def __init__(self, start: int, stop: int, fakes: FakeTensorCache) -> None:
        self.outputs: BlockOutputs = {}
        self._start, self._stop, self._fakes = start, stop, fakes
        self._has_entered = start == 0
        self._counts: dict[int, int] = defaultdict(int)
        self._device = torch.device("cpu")
        self._random_state: Tensor | None = None
        self._may_warn = start > 0

    def begin(self, received: Mapping[int, Sequence[Any]], device: torch.device) -> None:
        """Begin a forward; ``received`` has the outputs of the blocks before ``start``."""
        self.outputs = {index: list(outputs) for index, outputs in received.items()}
        self._has_entered = self._start == 0
        self._counts.clear()
        self._device = device
        self._random_state = torch.get_rng_state() if self._may_warn else None

    def enter(self) -> bool:
        """Note a call of the first block of this stage; returns whether it is the first call."""
        is_first, self._has_entered = not self._has_entered, True
        if is_first and self._random_state is not None:
            self._warn_of_random_numbers(self._random_state)
        return is_first

    def _warn_of_random_numbers(self, before: Tensor) -> None:
        if not torch.equal(before, torch.get_rng_state()):
            self._may_warn = False
            warnings.warn(
                f"the model draws random numbers before block {self._start}, where a stage begins. "
                "Each stage draws its own, so where two stages use them, as for a noise level, the "
                "result is not that of the model: draw them outside and give them to the model as "
                "an argument, or to every block, so that they are sent. What only one stage uses, "
                "such as a dropout, is right",
                stacklevel=2,
            )

    def record(self, index: int, output: Any) -> None:
        """Note what a block of this stage has returned."""
        self.outputs.setdefault(index, []).append(_without_values(output))

    def absent(self, index: int, /, *args: Any, **kwargs: Any) -> Any:
        """What a block of another stage returns: fake tensors, of the shapes that it has given."""
        if self._has_entered:
            place = "before" if index < self._start else "after"
            raise self._fakes.needs_values(
                f"the model calls block {index}, which a stage {place} this one has, between calls "
                f"of the blocks {self._start} to {self._stop - 1} of this stage. Stages run once, "
                "one after the other"
            )
        count = self._counts[index]
        self._counts[index] = count + 1
        outputs = self.outputs.get(index, ())
        output = outputs[count] if count < len(outputs) else None
        if output is None:  # unknown, so only the arguments of this stage's first block are right
            return args[0] if args else next(iter(kwargs.values()))
        return self._fakes.get_or_make(
            ["block", index, count, *_plain(output), self._device],
            lambda: self._with_fakes(index, output),
        )

    def _with_fakes(self, index: int, output: Any) -> Any:
        text, leaves = output
        name = f"the output of block {index}"
        filled = [
            fake_tensor(leaf[1], leaf[2], self._device, name, self._fakes) if leaf[0] else leaf[1]
            for leaf in leaves
        ]
        return filled[0] if text is None else pytree.tree_unflatten(filled, _treespec(text))


def _without_values(output: Any) -> Any:
    """The nesting of an output as text, and its leaves, with shapes and dtypes for tensors."""
    if isinstance(output, Tensor):
        return None, [(True, output.shape, output.dtype)]
    leaves, treespec = pytree.tree_flatten(output)
    if not all(isinstance(leaf, Tensor) or type(leaf) in _SENDABLE for leaf in leaves):
        return None
    try:
        text = pytree.treespec_dumps(treespec)
    except NotImplementedError:  # of a class that has no name for other processes
        return None
    return text, [
        (True, leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (False, leaf)
        for leaf in leaves
    ]


def _plain(output: Any) -> tuple[Any, ...]:
    text, leaves = output
    return text, *leaves


@cache
def _treespec(text: str) -> pytree.TreeSpec:
    return pytree.treespec_loads(text)


# --- attributes ----------------------------------------------------------------------------------


def absent_block(
    block: nn.Module, name: str, forward: Callable[..., Any], fakes: FakeTensorCache
) -> nn.Module:
    """A module of the class of ``block`` with its plain attributes, and with no tensors.

    Its submodules are stand-ins, too. What a method of a class stores in an attribute, other than
    those that set it up, is an error to read: only the stage of the block knows it.
    """
    absent = _stand_in(block, name, fakes)
    absent.__dict__["forward"] = forward
    return absent


def _stand_in(module: nn.Module, name: str, fakes: FakeTensorCache) -> nn.Module:
    absent = _new_absent(type(module))
    nn.Module.__init__(absent)
    plain = {key: value for key, value in vars(module).items() if key not in vars(absent)}
    absent.__dict__.update(plain, _absent_name=name, _absent_fakes=fakes)
    absent.__dict__["_absent_tensors"] = frozenset([*module._parameters, *module._buffers])
    absent.training = module.training
    for local, child in module._modules.items():
        if child is not None:
            absent._modules[local] = _stand_in(child, f"{name}.{local}", fakes)
    return absent


@cache
def _absent_class(cls: Any) -> type[nn.Module]:
    """A subclass of which attributes that only the stage of the module knows cannot be read."""

    def refuse(self: nn.Module, local: str) -> NoReturn:
        name, fakes = (self.__dict__[key] for key in ("_absent_name", "_absent_fakes"))
        raise fakes.needs_values(f"the model reads {name}.{local}, which another stage has")

    def property_of(local: str) -> property:
        def read(self: nn.Module) -> NoReturn:
            refuse(self, local)

        return property(read, lambda self, value: None)  # what is written here, nobody reads

    def __getattr__(self: nn.Module, local: str) -> Any:
        if local in self.__dict__.get("_absent_tensors", ()):
            refuse(self, local)
        return cls.__getattr__(self, local)

    def __reduce_ex__(self: nn.Module, protocol: object) -> Any:
        return _new_absent, (cls,), self.__dict__  # no other process finds this class by its name

    members: dict[str, Any] = {local: property_of(local) for local in _stored_names(cls)}
    members |= {"__getattr__": __getattr__, "__reduce_ex__": __reduce_ex__}
    return type(cls.__name__, (cls,), {**members, "__module__": cls.__module__})


def _new_absent(cls: Any) -> nn.Module:
    absent = _absent_class(cls)
    return absent.__new__(absent)


_SETS_UP = ("__init__", "__new__", "__setstate__", "__post_init__", "reset_parameters")


def _stored_names(cls: type[nn.Module]) -> frozenset[str]:
    """The attributes that methods of a class store, other than those that set it up."""
    known = {*dir(nn.Module), *vars(nn.Module())}
    stored: set[str] = set()
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, value in vars(base).items():
            method = inspect.unwrap(value) if callable(value) else value
            if isinstance(method, FunctionType) and name not in _SETS_UP:
                stored.update(_stores(method.__code__))
    return frozenset(name for name in stored - known if not name.startswith("__"))


def _stores(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR":
            yield instruction.argval
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _stores(const)
