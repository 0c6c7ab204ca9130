"""Models with a ``ModuleList`` of blocks: every stage runs the model's own ``forward``.

[Note: a forward in pieces]
::

    stage 0:  prefix  b0 b1 | exit
    stage 1:  (prefix) . .  | entry b2 b3 | exit
    stage 2:  (prefix) . .          . . | entry b4 b5  suffix

At the first block of the next stage the forward ends by an exception, and what that block was given
is the value that goes on: its arguments, with every mask and table in them. The next stage runs the
same forward; the prefix and the blocks that it lacks compute shapes only (see "values that are not
there"), and its first block gets what came. Later blocks may be given the same masks and tables
again: an absent argument is replaced by what came in its place, if it is the very tensor that the
first block was given, and refused otherwise. Keyword arguments of the model have values in every
stage whose rank is given them. Nothing is traced, and what depends on a value that
the stage does not have is an error, never a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from echelon.errors import ArgumentError, UnsupportedError
from echelon.pipeline.splitting.fake_tensors import (
    Absent,
    NeedsValues,
    Recall,
    absent_copy,
    absent_like,
    missing_in,
)
from echelon.pipeline.splitting.submodule import Row, Submodule, carve, hollow, pass_on, register


def find_trunk(model: nn.Module) -> str | None:
    """The name of the longest ``ModuleList`` that is in no other; None if there is none.

    Raises:
        ArgumentError: several are equally long.
    """
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    outer = {
        name: len(module)
        for name, module in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists)
    }
    longest = [name for name, length in outer.items() if length == max(outer.values())]
    if len(longest) > 1:
        raise ArgumentError(
            f"the model has several ModuleLists of {outer[longest[0]]} blocks, {longest}: give it "
            "a method pipeline_layers() that returns its layers in order"
        )
    return longest[0] if longest else None


@final
class TrunkRow(Row):
    """The blocks of a ``ModuleList``, with what comes before them and after them.

    Args:
        model: whose forward calls the blocks in order.
        trunk: the name of the list.
        prefix: names of what runs before the blocks; those registered before the list if None.
        suffix: names of what runs after them; those registered after it if None.
    """

    def __init__(
        self,
        model: nn.Module,
        trunk: str,
        prefix: Sequence[str] | None,
        suffix: Sequence[str] | None,
    ) -> None:
        self._model, self._trunk = model, trunk
        self._blocks = list(model.get_submodule(trunk).children())
        before, after = _around(model, trunk)
        self._prefix = _named(
            model, "prefix", prefix, [n for n in before if n not in (suffix or ())]
        )
        self._suffix = _named(
            model, "suffix", suffix, [n for n in after if n not in (prefix or ())]
        )
        missing = {*before, *after} - {*self._prefix, *self._suffix}
        if missing:
            raise ArgumentError(
                f"{sorted(missing)} are neither in prefix nor in suffix: name them in one of them"
            )

    @property
    def num_atoms(self) -> int:
        """One for each block; the first has the prefix, the last the suffix."""
        return len(self._blocks)

    def part(self, start: int, stop: int) -> Submodule:
        """A stage that runs the whole forward around its blocks."""
        is_first, is_last = start == 0, stop == self.num_atoms
        names = {*(self._prefix if is_first else ()), *(self._suffix if is_last else ())}
        blocks = [
            block if start <= i < stop else hollow(block, _leave if i == stop else pass_on)
            for i, block in enumerate(self._blocks)
        ]
        recall = Recall()
        stand_in = partial(absent_copy, recall=recall)
        shell, own, bare = carve(self._model, self._trunk, blocks, names, stand_in, recall)
        own |= {f"{self._trunk}.{i}": self._blocks[i] for i in range(start, stop)}
        inside = self._blocks[start:stop]
        part = Submodule(_Forward(shell, inside, is_first, is_last, self._hint(), recall))
        register(part, own, bare)
        return part

    def _hint(self) -> str:
        return (
            f"the split has prefix={self._prefix} before the blocks {self._trunk!r} and "
            f"suffix={self._suffix} after them: name them with prefix=[...] and suffix=[...] (a "
            "name may be in both), give all ranks the keyword arguments that blocks use, or give "
            "the model a method pipeline_layers()"
        )


def _around(model: nn.Module, trunk: str) -> tuple[list[str], list[str]]:
    """What is registered before the trunk, and after it, at every level on the way to it."""
    before: list[str] = []
    after: list[str] = []
    module, path = model, ""
    late: list[str] = []
    for step in trunk.split("."):
        names = [f"{path}.{local}".lstrip(".") for local in module._modules]
        here = names.index(f"{path}.{step}".lstrip("."))
        before += [f"{path}.{local}".lstrip(".") for local in module._parameters]
        before += names[:here]
        late = names[here + 1 :] + late
        module, path = module.get_submodule(step), names[here]
    return before, after + late


def _named(model: nn.Module, what: str, given: Sequence[str] | None, found: list[str]) -> list[str]:
    if given is None:
        return found
    known = {name for name, _ in [*model.named_modules(), *model.named_parameters()]}
    for name in given:
        if name not in known:
            raise ArgumentError(f"{what} has {name!r}, which is no name in the model")
    return list(given)


def _leave(*args: Any, **kwargs: Any) -> Any:
    raise _Exit(args, kwargs)


class _Exit(BaseException):  # so that no ``except Exception`` of the model stops it
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.value = args, kwargs


@final
class _Forward(nn.Module):
    """The model's forward from an entry to an exit. See the note above."""

    def __init__(
        self,
        shell: nn.Module,
        blocks: Sequence[nn.Module],
        is_first: bool,
        is_last: bool,
        hint: str,
        recall: Recall,
    ) -> None:
        super().__init__()
        self.shell, self._is_first, self._is_last = shell, is_first, is_last
        self.__dict__["own"] = list(blocks)
        self._hint, self._recall = hint, recall
        self.training = shell.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_first:
            forms = None if self._is_last else _forms((args, kwargs))
            return self._result(args, kwargs, forms, lambda value: value)
        value = args[0]
        device = next(
            (leaf.device for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)),
            torch.device("cpu"),
        )
        self._recall.begin()
        forms = value["model"]
        leaves, spec = self._recall.made(
            [*forms, device], lambda: _absent(forms, device, self._recall)
        )
        call_args, call_kwargs = pytree.tree_unflatten(leaves, spec)
        if not kwargs.keys() <= call_kwargs.keys():
            raise ArgumentError(
                f"this stage was given {sorted(kwargs)} and the first one {sorted(call_kwargs)}: "
                "give no rank a keyword argument that the rank of the first stage is not given"
            )
        call_kwargs |= kwargs  # these have values here, too
        with ExitStack() as hooks:
            entry = _BlockEntry(value["block"], self._hint)
            for i, block in enumerate(self.__dict__["own"]):
                hook = entry.replace if i == 0 else entry.fill
                handle = block.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
                hooks.callback(handle.remove)
            return self._result(call_args, call_kwargs, value["model"], entry.filled)

    def _result(self, args: Any, kwargs: Any, forms: Any, fill: Callable[[Any], Any]) -> Any:
        try:
            found = self.shell(*args, **kwargs)
        except NeedsValues as error:
            raise UnsupportedError(f"{error}: {self._hint}") from error
        except _Exit as exit:
            found = {"block": fill(exit.value), "model": forms}
        else:
            if not self._is_last:
                raise UnsupportedError(
                    "the model's forward ended without calling the block at which this stage ends: "
                    + self._hint
                )
        missing = missing_in(found)
        if missing:
            raise UnsupportedError(
                f"what this stage gives depends on {missing}, which other stages have: {self._hint}"
            )
        return found


@final
class _BlockEntry:
    """Puts what came from the stage before in the place of absent arguments."""

    def __init__(self, value: tuple[tuple[Any, ...], dict[str, Any]], hint: str) -> None:
        self._value, self._hint = value, hint
        self._came: dict[int, Any] = {}
        self._held: Any = None  # so that no other tensor gets the identity of one in _came

    def replace(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The first block runs on what came."""
        self._held = args, kwargs
        absent, came = pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(self._value)
        if len(absent) == len(came):
            self._came = {id(one): other for one, other in zip(absent, came, strict=True)}
        return self._value

    def fill(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A later block gets what came for what the first one was given, too."""
        filled: tuple[Any, Any] = self.filled((args, kwargs))
        return filled

    def filled(self, value: Any) -> Any:
        """The same with what came in the place of what is absent."""

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, Absent):
                return leaf
            if id(leaf) not in self._came:
                raise UnsupportedError(
                    f"a block is given a tensor that depends on {missing_in(leaf)} and that the "
                    f"first block of its stage is not given, so this stage has no value for it: "
                    + self._hint
                )
            return self._came[id(leaf)]

        return pytree.tree_map(one, value)


def _forms(call: Any) -> tuple[Any, ...]:
    """The arguments of the model, with shapes for tensors, as plain values."""
    leaves, spec = pytree.tree_flatten(call)
    forms = [
        (True, leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (False, leaf)
        for leaf in leaves
    ]
    return pytree.treespec_dumps(spec), forms


def _absent(forms: Any, device: torch.device, recall: Recall) -> tuple[list[Any], Any]:
    """These arguments with absent tensors, flat, and how they are nested."""
    spec, found = forms
    name = "the input of the model"
    leaves = [
        absent_like(one[1], one[2], device, name, recall) if one[0] else one[1] for one in found
    ]
    return leaves, pytree.treespec_loads(spec)
