"""Models with a ``ModuleList`` of blocks, whose own ``forward`` every stage runs.

[Note: a forward in pieces]
::

    stage 0:  prefix  b0 b1 | exit
    stage 1:  (prefix) . .  | entry b2 b3 | exit
    stage 2:  (prefix) . .          . . | entry b4 b5  suffix

At the first block of the next stage the forward ends by an exception. The stage sends the
arguments of that block, with every mask and table in them. The next stage runs the same forward:
the prefix and the blocks that it lacks compute shapes only (see "values that are not there"), and
its first block gets the received arguments. Later blocks may get the same masks and tables: a fake
argument that is the very tensor of the first block is replaced by its received value, and any other
is refused. Keyword arguments of the model have values in every stage whose rank has them. Nothing
is traced, and a result that depends on a missing value is an error, never a number.
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
    FakeTensor,
    FakeTensorCache,
    NeedsValues,
    fake_copy,
    fake_tensor,
    missing_names,
)
from echelon.pipeline.splitting.submodule import (
    Blocks,
    Submodule,
    empty_block,
    partial_model,
    return_input,
)


def find_module_list(model: nn.Module) -> str | None:
    """The name of the longest ``ModuleList`` that is in no other; None if there is none."""
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    lengths = {
        name: len(module)
        for name, module in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists)
    }
    longest = [name for name, length in lengths.items() if length == max(lengths.values())]
    if len(longest) > 1:
        raise ArgumentError(
            f"the model has several ModuleLists of {lengths[longest[0]]} blocks, {longest}: give "
            "it a method pipeline_layers() that returns its layers in order"
        )
    return longest[0] if longest else None


@final
class ModuleListBlocks(Blocks):
    """The blocks of a ``ModuleList``, whose model calls them in order.

    ``prefix`` and ``suffix`` name the modules and parameters that run before and after the blocks;
    None stands for those that are registered before and after the list.
    """

    def __init__(
        self,
        model: nn.Module,
        list_name: str,
        prefix: Sequence[str] | None,
        suffix: Sequence[str] | None,
    ) -> None:
        self._model, self._list_name = model, list_name
        self._blocks = list(model.get_submodule(list_name).children())
        before, after = _names_around(model, list_name)
        default_prefix = [name for name in before if name not in (suffix or ())]
        default_suffix = [name for name in after if name not in (prefix or ())]
        self._prefix = _checked_names(model, "prefix", prefix, default_prefix)
        self._suffix = _checked_names(model, "suffix", suffix, default_suffix)
        missing = {*before, *after} - {*self._prefix, *self._suffix}
        if missing:
            raise ArgumentError(
                f"{sorted(missing)} are neither in prefix nor in suffix: name them in one of them"
            )

    @property
    def num_blocks(self) -> int:
        """One block for each item of the list; the first has the prefix, the last the suffix."""
        return len(self._blocks)

    def submodule(self, start: int, stop: int) -> Submodule:
        """A stage that runs the model's forward around its blocks."""
        is_first, is_last = start == 0, stop == self.num_blocks
        names = {*(self._prefix if is_first else ()), *(self._suffix if is_last else ())}
        blocks = [
            block if start <= i < stop else empty_block(block, _exit if i == stop else return_input)
            for i, block in enumerate(self._blocks)
        ]
        cache = FakeTensorCache()
        make_stand_in = partial(fake_copy, cache=cache)
        copied = partial_model(self._model, self._list_name, blocks, names, make_stand_in, cache)
        modules = copied.modules | {
            f"{self._list_name}.{i}": self._blocks[i] for i in range(start, stop)
        }
        body = _PartialForward(
            copied.model, self._blocks[start:stop], is_first, is_last, self._hint(), cache
        )
        return Submodule(body, modules, copied.containers)

    def _hint(self) -> str:
        return (
            f"the split has prefix={self._prefix} before the blocks {self._list_name!r} and "
            f"suffix={self._suffix} after them: name them with prefix=[...] and suffix=[...] (a "
            "name may be in both), give all ranks the keyword arguments that blocks use, or give "
            "the model a method pipeline_layers()"
        )


def _names_around(model: nn.Module, list_name: str) -> tuple[list[str], list[str]]:
    """The names registered before and after the list, at every level on the way to it."""
    before: list[str] = []
    after: list[str] = []
    module, path = model, ""
    for step in list_name.split("."):
        names = [f"{path}.{local}".lstrip(".") for local in module._modules]
        position = names.index(f"{path}.{step}".lstrip("."))
        before += [f"{path}.{local}".lstrip(".") for local in module._parameters]
        before += names[:position]
        after = names[position + 1 :] + after
        module, path = module.get_submodule(step), names[position]
    return before, after


def _checked_names(
    model: nn.Module, option: str, names: Sequence[str] | None, default: list[str]
) -> list[str]:
    if names is None:
        return default
    known = {name for name, _ in [*model.named_modules(), *model.named_parameters()]}
    for name in names:
        if name not in known:
            raise ArgumentError(f"{option} has {name!r}, which is no name in the model")
    return list(names)


def _exit(*args: Any, **kwargs: Any) -> Any:
    """The forward of the block at which the next stage begins."""
    raise _Exit(args, kwargs)


class _Exit(BaseException):  # an ``except Exception`` in the model must not catch it
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.block_call = args, kwargs


@final
class _PartialForward(nn.Module):
    """The model's forward from an entry to an exit. See [Note: a forward in pieces]."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        is_first: bool,
        is_last: bool,
        hint: str,
        cache: FakeTensorCache,
    ) -> None:
        super().__init__()
        self.model, self._is_first, self._is_last = model, is_first, is_last
        self.__dict__["blocks"] = list(blocks)
        self._hint, self._cache = hint, cache
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_first:
            call = None if self._is_last else _dump_call((args, kwargs))
            return self._run(args, kwargs, call, lambda value: value)
        received = args[0]
        device = next(
            (leaf.device for leaf in pytree.tree_leaves(received) if isinstance(leaf, Tensor)),
            torch.device("cpu"),
        )
        self._cache.begin_forward()
        call = received["model"]
        leaves, treespec = self._cache.get_or_make(
            [*call, device], lambda: _load_fake_call(call, device, self._cache)
        )
        fake_args, fake_kwargs = pytree.tree_unflatten(leaves, treespec)
        if not kwargs.keys() <= fake_kwargs.keys():
            raise ArgumentError(
                f"this stage was given {sorted(kwargs)} and the first one {sorted(fake_kwargs)}: "
                "give no rank a keyword argument that the rank of the first stage is not given"
            )
        fake_kwargs |= kwargs  # these have values here, too
        with ExitStack() as hooks:
            entry = _BlockEntry(received["block"], self._hint)
            for i, block in enumerate(self.__dict__["blocks"]):
                hook = entry.replace_call if i == 0 else entry.fill_call
                handle = block.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
                hooks.callback(handle.remove)
            return self._run(fake_args, fake_kwargs, call, entry.fill)

    def _run(self, args: Any, kwargs: Any, call: Any, fill: Callable[[Any], Any]) -> Any:
        """The output of the model, or the value for the next stage."""
        try:
            output = self.model(*args, **kwargs)
        except NeedsValues as error:
            raise UnsupportedError(f"{error}: {self._hint}") from error
        except _Exit as exit:
            output = {"block": fill(exit.block_call), "model": call}
        else:
            if not self._is_last:
                raise UnsupportedError(
                    "the model's forward ended without calling the block at which this stage ends: "
                    + self._hint
                )
        missing = missing_names(output)
        if missing:
            raise UnsupportedError(
                f"what this stage gives depends on {missing}, which other stages have: {self._hint}"
            )
        return output


@final
class _BlockEntry:
    """Replaces fake arguments of blocks by the values received from the previous stage."""

    def __init__(self, received: tuple[tuple[Any, ...], dict[str, Any]], hint: str) -> None:
        self._received, self._hint = received, hint
        self._received_for: dict[int, Any] = {}  # by the identity of a fake argument
        self._fake_call: Any = (
            None  # keeps the fake arguments alive, so that no identity is used again
        )

    def replace_call(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of the first block: those that were received."""
        self._fake_call = args, kwargs
        fakes, received = pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(self._received)
        if len(fakes) == len(received):
            pairs = zip(fakes, received, strict=True)
            self._received_for = {id(fake): value for fake, value in pairs}
        return self._received

    def fill_call(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a later block, with received values for those of the first block."""
        filled: tuple[Any, Any] = self.fill((args, kwargs))
        return filled

    def fill(self, value: Any) -> Any:
        """The value with received values in the place of fake tensors."""

        def fill_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, FakeTensor):
                return leaf
            if id(leaf) not in self._received_for:
                raise UnsupportedError(
                    f"a block is given a tensor that depends on {missing_names(leaf)} and that the "
                    f"first block of its stage is not given, so this stage has no value for it: "
                    + self._hint
                )
            return self._received_for[id(leaf)]

        return pytree.tree_map(fill_leaf, value)


def _dump_call(call: Any) -> tuple[Any, ...]:
    """The arguments of the model, with shapes for tensors, as plain values."""
    leaves, treespec = pytree.tree_flatten(call)
    dumped = [
        (True, leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (False, leaf)
        for leaf in leaves
    ]
    return pytree.treespec_dumps(treespec), dumped


def _load_fake_call(
    call: Any, device: torch.device, cache: FakeTensorCache
) -> tuple[list[Any], Any]:
    """The arguments that ``_dump_call`` wrote, with fake tensors: leaves and treespec."""
    treespec, dumped = call
    name = "the input of the model"
    leaves = [
        fake_tensor(leaf[1], leaf[2], device, name, cache) if leaf[0] else leaf[1]
        for leaf in dumped
    ]
    return leaves, pytree.treespec_loads(treespec)
