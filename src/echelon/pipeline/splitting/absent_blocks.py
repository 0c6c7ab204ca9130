"""Stand-ins for the blocks of a ``ModuleList`` that other stages have.

[Note: what is known of a block that is not here]
The model's own forward runs around the stand-ins, and it may do anything with a block: call it in
another order or twice, or read what the block has stored in an attribute. A stand-in knows the
shapes of what its block has returned, for which the stages before this one send them, and the plain
attributes that its block had when the model was split. Whether the block still has them is said by
two lists, which go from stage to stage: what blocks have stored since, which no later stage may
read, and what stages have read, which no later block may have stored. Everything else is an error
that names the block.
"""

from __future__ import annotations

import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from echelon.pipeline.splitting.fake_tensors import (
    FakeTensorCache,
    NeedsValues,
    with_fakes,
    without_values,
)

# By index of a block: what each of its calls has returned, without the values of tensors. None
# where that cannot be said in plain values.
BlockOutputs = dict[int, list[Any]]

_SENDABLE = (bool, int, float, str, type(None))
_OF_EVERY_MODULE = frozenset({*dir(nn.Module), *vars(nn.Module())})


@final
class BlockCalls:
    """The calls of the blocks of one forward, on a stage that has the blocks ``start..stop-1``.

    ``blocks`` has these by their names in the model.

    Attributes:
        outputs: what blocks have returned: received for those before ``start``, and recorded.
        problems: makes the errors about what is not here, and remembers the first.
    """

    def __init__(
        self, start: int, stop: int, blocks: Mapping[str, nn.Module], fakes: FakeTensorCache
    ) -> None:
        self.outputs: BlockOutputs = {}
        self.problems = fakes
        self._start, self._stop = start, stop
        self._has_entered = start == 0
        self._counts: dict[int, int] = defaultdict(int)
        self._device = torch.device("cpu")
        self._random_state: Tensor | None = None
        self._may_warn = start > 0
        # What the modules in blocks had in their attributes when the model was split.
        self._at_split = [
            (f"{name}.{path}".rstrip("."), module, dict(vars(module)))
            for name, block in blocks.items()
            for path, module in block.named_modules()
        ]
        # Attributes by their names in the model, as keys of dicts, which keep their order.
        self._stored: dict[str, None] = {}
        self._read: dict[str, None] = {}

    def begin(
        self,
        received: Mapping[int, Sequence[Any]],
        stored: Sequence[str],
        read: Sequence[str],
        device: torch.device,
    ) -> None:
        """Begin a forward with the ``known()`` of the stage before."""
        self.outputs = {index: list(outputs) for index, outputs in received.items()}
        self._stored, self._read = dict.fromkeys(stored), dict.fromkeys(read)
        self._has_entered = self._start == 0
        self._counts.clear()
        self._device = device
        self._random_state = torch.get_rng_state() if self._may_warn else None

    def known(self) -> dict[str, Any]:
        """What the next stage has to know of the blocks before it and of its own."""
        return {"outputs": self.outputs, "stored": [*self._stored], "read": [*self._read]}

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
        self.outputs.setdefault(index, []).append(_as_plain_values(output))

    def note_stored(self) -> None:
        """Note which attributes of the blocks of this stage are not what they were at the split."""
        for name, module, before in self._at_split:
            now = vars(module)
            if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
                continue
            for stored in (f"{name}.{local}" for local in _changed(before, now)):
                self._stored[stored] = None
                if stored in self._read:
                    self.not_here(stored)

    def read(self, name: str) -> None:
        """Note that the model reads an attribute of a block of another stage, and may do so."""
        if name in self._stored:
            raise self.not_here(name)
        self._read[name] = None

    def not_here(self, name: str) -> NeedsValues:
        """The error about an attribute of a block of another stage."""
        return self.problems.needs_values(f"the model reads {name}, which another stage has")

    def absent(self, index: int, /, *args: Any, **kwargs: Any) -> Any:
        """What a block of another stage returns: fake tensors, of the shapes that it has given."""
        if self._has_entered:
            place = "before" if index < self._start else "after"
            raise self.problems.needs_values(
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
        text, leaves = output

        def make() -> Any:
            name = f"the output of block {index}"
            filled = with_fakes(leaves, self._device, name, self.problems)
            return filled[0] if text is None else pytree.tree_unflatten(filled, _treespec(text))

        key = ["block", index, count, text, *leaves, self._device]
        return self.problems.get_or_make(key, make)


def _as_plain_values(output: Any) -> Any:
    """The nesting of an output as text, and its leaves, with shapes and dtypes for tensors."""
    if isinstance(output, Tensor):
        return None, without_values([output])
    leaves, treespec = pytree.tree_flatten(output)
    if not all(isinstance(leaf, Tensor) or type(leaf) in _SENDABLE for leaf in leaves):
        return None
    try:
        text = pytree.treespec_dumps(treespec)
    except NotImplementedError:  # of a class that has no name for other processes
        return None
    return text, without_values(leaves)


@cache
def _treespec(text: str) -> pytree.TreeSpec:
    return pytree.treespec_loads(text)


# --- attributes ----------------------------------------------------------------------------------


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """The attributes that are not what they were."""
    for local in {**before, **now}:
        old, new = before.get(local, _MISSING), now.get(local, _MISSING)
        is_same = new is old or (type(new) is type(old) and type(new) in _SENDABLE and new == old)
        if not is_same and local not in _OF_EVERY_MODULE:
            yield local


_MISSING = object()


def absent_block(
    block: nn.Module, name: str, forward: Callable[..., Any], calls: BlockCalls
) -> nn.Module:
    """A module of the class of ``block`` with its plain attributes, and with no tensors.

    Its submodules are stand-ins, too, which are never called.
    """
    absent = _stand_in(block, name, calls)
    absent.__dict__["forward"] = forward
    return absent


def _stand_in(module: nn.Module, name: str, calls: BlockCalls) -> nn.Module:
    absent = _new_absent(type(module))
    nn.Module.__init__(absent)
    attributes = absent.__dict__
    attributes.update({key: value for key, value in vars(module).items() if key not in attributes})
    attributes["training"] = module.training
    for local, child in module._modules.items():
        if child is not None:
            attributes["_modules"][local] = _stand_in(child, f"{name}.{local}", calls)
    tensors = frozenset([*module._parameters, *module._buffers])
    attributes["_absent"] = name, tensors, calls  # from here on it watches its attributes
    return absent


@cache
def _absent_class(cls: Any) -> type[nn.Module]:
    """A subclass of which attributes that only the stage of the module knows cannot be read."""

    def __getattribute__(self: nn.Module, local: str) -> Any:
        if local not in _OF_EVERY_MODULE and not local.startswith("__"):
            name, tensors, calls = object.__getattribute__(self, "__dict__").get("_absent", _NOBODY)
            if local in tensors:
                raise calls.not_here(f"{name}.{local}")
            if calls is not None:
                calls.read(f"{name}.{local}")
        return cls.__getattribute__(self, local)

    def refusing(register: str) -> Callable[..., Any]:
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name, _, calls = vars(self)["_absent"]
            is_called = "forward" in vars(self)  # a block itself, and not what is in it
            if not is_called or "backward" in register:
                raise calls.problems.needs_values(
                    f"the model hooks {name}, which another stage has"
                )
            return getattr(cls, register)(self, *args, **kwargs)

        return method

    def __reduce_ex__(self: nn.Module, protocol: object) -> Any:
        return _new_absent, (cls,), self.__dict__  # no other process finds this class by its name

    members: dict[str, Any] = {
        "__getattribute__": __getattribute__,
        "__reduce_ex__": __reduce_ex__,
        "__module__": cls.__module__,
        **{register: refusing(register) for register in _REGISTERS},
    }
    return type(cls.__name__, (cls,), members)


# Nobody would call such a hook.
_REGISTERS = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
)
_NOBODY = "", frozenset[str](), None


def _new_absent(cls: Any) -> nn.Module:
    absent = _absent_class(cls)
    return absent.__new__(absent)
