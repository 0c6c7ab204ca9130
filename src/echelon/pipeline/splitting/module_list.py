"""Models with a ``ModuleList`` of blocks, whose own ``forward`` every stage runs.

[Note: a forward in pieces]
::

    stage 0:  prefix  b0 b1 | exit
    stage 1:  (prefix) . .  | entry b2 b3 | exit
    stage 2:  (prefix) . .          . . | entry b4 b5  suffix

At the first block of the next stage the forward ends by an exception. The stage sends the arguments
of that block, with every mask and table in them, and the shapes of what each block has returned.
The next stage runs the same forward: the prefix and the blocks that it lacks give shapes only (see
"values that are not there" and "what is known of a block that is not here"), and its first block
gets the received arguments. Later blocks may get the same masks and tables: an argument that is the
very tensor of the first block is replaced by its received value, and any other fake one is refused.
Keyword arguments of the model have values in every stage whose rank has them. Nothing is traced,
and a result that depends on a missing value is an error, never a number.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from echelon.errors import ArgumentError, UnsupportedError
from echelon.pipeline.splitting.absent_blocks import BlockCalls, absent_block
from echelon.pipeline.splitting.fake_tensors import (
    FakeTensor,
    FakeTensorCache,
    NeedsValues,
    fake_copy,
    missing_names,
    with_fakes,
    without_values,
)
from echelon.pipeline.splitting.submodule import Blocks, Submodule, partial_model


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


class NamesAround(NamedTuple):
    """The names of modules and parameters around a list of blocks.

    Attributes:
        before: those that are registered before the blocks.
        after: those that are registered after them.
        tables: modules of either whose only tensors are buffers that are not saved, such as tables
            of positions. Any stage can have them, since they are not trained.
    """

    before: list[str]
    after: list[str]
    tables: frozenset[str]


def names_around(model: nn.Module, list_name: str) -> NamesAround:
    """The names around the list ``list_name``, at every level on the way to it.

    Nothing proves that they run in this order. A stage that lacks what its forward needs says so,
    with the names.

    Example:
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed = nn.Embedding(3, 2)
        ...         self.blocks = nn.ModuleList([nn.Linear(2, 2)])
        ...         self.norm = nn.LayerNorm(2)
        >>> names_around(Model(), "blocks")[:2]
        (['embed'], ['norm'])
    """
    before: list[str] = []
    after: list[str] = []
    module, path = model, ""
    for step in list_name.split("."):
        children = list(module._modules)
        position = children.index(step)
        before += [f"{path}{local}" for local in (*module._parameters, *children[:position])]
        after = [f"{path}{local}" for local in children[position + 1 :]] + after
        module, path = module.get_submodule(step), f"{path}{step}."
    modules = dict(model.named_modules(remove_duplicate=False))
    tables = (name for name in (*before, *after) if name in modules and _is_table(modules[name]))
    return NamesAround(before, after, frozenset(tables))


def _is_table(module: nn.Module) -> bool:
    return any(True for _ in module.buffers()) and not module.state_dict()


@final
class ModuleListBlocks(Blocks):
    """The blocks of a ``ModuleList``, whose model calls them in order.

    ``prefix`` and ``suffix`` name the modules and parameters that run before and after the blocks;
    None stands for what ``names_around`` says. Every stage has the tables of positions.
    """

    def __init__(
        self,
        model: nn.Module,
        list_name: str,
        prefix: Sequence[str] | None,
        suffix: Sequence[str] | None,
    ) -> None:
        self._model, self._list_name = model, list_name
        self.modules = _distinct_blocks(model, list_name)
        _check_router_logits(model)
        before, after, self._tables = names_around(model, list_name)
        default_prefix = [name for name in before if name not in (suffix or ())]
        default_suffix = [name for name in after if name not in (prefix or ())]
        self._prefix = _checked_names(model, "prefix", prefix, default_prefix)
        self._suffix = _checked_names(model, "suffix", suffix, default_suffix)
        missing = {*before, *after} - {*self._prefix, *self._suffix, *self._tables}
        if missing:
            raise ArgumentError(
                f"{sorted(missing)} are neither in prefix nor in suffix: name them in one of them"
            )

    @property
    def num_blocks(self) -> int:
        """One block for each item of the list; the first has the prefix, the last the suffix."""
        return len(self.modules)

    def submodule(self, start: int, stop: int) -> Submodule:
        """A stage that runs the model's forward around its blocks."""
        is_first, is_last = start == 0, stop == self.num_blocks
        names = {
            *(self._prefix if is_first else ()),
            *(self._suffix if is_last else ()),
            *self._tables,
        }
        cache = FakeTensorCache()
        own_blocks = {f"{self._list_name}.{i}": self.modules[i] for i in range(start, stop)}
        calls = BlockCalls(start, stop, own_blocks, cache)
        blocks = [
            block if start <= i < stop else self._absent(i, stop, calls)
            for i, block in enumerate(self.modules)
        ]
        make_stand_in = partial(fake_copy, cache=cache)
        copied = partial_model(self._model, self._list_name, blocks, names, make_stand_in, cache)
        for container in copied.containers.values():
            _keep_no_cache(container)
        numbered = {i: self.modules[i] for i in range(start, stop)}
        body = _PartialForward(copied.model, numbered, is_last, self._hint(), calls, cache)
        return Submodule(body, copied.modules | own_blocks, copied.containers)

    def _absent(self, index: int, stop: int, calls: BlockCalls) -> nn.Module:
        """What replaces a block of another stage; at that of ``stop`` the forward ends."""
        forward = _exit if index == stop else partial(calls.absent, index)
        return absent_block(self.modules[index], f"{self._list_name}.{index}", forward, calls)

    def _hint(self) -> str:
        return (
            f"the split has prefix={self._prefix} before the blocks {self._list_name!r} and "
            f"suffix={self._suffix} after them: name them with prefix=[...] and suffix=[...] (a "
            "name may be in both), give all ranks the keyword arguments that blocks use, or give "
            "the model a method pipeline_layers()"
        )


def _distinct_blocks(model: nn.Module, list_name: str) -> list[nn.Module]:
    children = model.get_submodule(list_name)._modules.values()
    blocks = [block for block in children if block is not None]
    for i, block in enumerate(blocks):
        if (first := blocks.index(block)) != i:
            raise ArgumentError(
                f"block {i} of {list_name!r} is block {first} again, and stages take blocks for "
                "different modules: give the model a method pipeline_layers() that returns its "
                "layers in order"
            )
    return blocks


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
        blocks: Mapping[int, nn.Module],
        is_last: bool,
        hint: str,
        calls: BlockCalls,
        cache: FakeTensorCache,
    ) -> None:
        super().__init__()
        self.model, self._is_first, self._is_last = model, 0 in blocks, is_last
        self.__dict__["blocks"] = dict(blocks)
        self._hint, self._calls, self._cache = hint, calls, cache
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._cache.problem = None
        if self._is_first:
            call = None
            if not self._is_last:
                leaves, treespec = pytree.tree_flatten((args, kwargs))
                call = pytree.treespec_dumps(treespec), without_values(leaves)
            self._calls.begin({}, (), (), torch.device("cpu"))
            return self._run(args, kwargs, call, None, self._hint)
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
        hint = self._hint
        if any(
            isinstance(fake_kwargs[key], FakeTensor) for key in fake_kwargs.keys() - kwargs.keys()
        ):
            hint = (
                f"this stage was given {sorted(kwargs)} and the first one {sorted(fake_kwargs)}: "
                f"give all ranks the same keyword arguments. Otherwise, {hint}"
            )
        fake_kwargs |= kwargs  # these have values here, too
        self._calls.begin(received["outputs"], received["stored"], received["read"], device)
        entry = _BlockEntry(received["block"], self._calls, hint)
        return self._run(fake_args, fake_kwargs, call, entry, hint)

    def _run(self, args: Any, kwargs: Any, call: Any, entry: _BlockEntry | None, hint: str) -> Any:
        """The output of the model, or the value for the next stage."""
        try:
            with self._hooks(entry):
                output = self.model(*args, **kwargs)
        except NeedsValues as error:
            raise UnsupportedError(f"{error}: {hint}") from error
        except _Exit as exit:
            block_call = exit.block_call if entry is None else entry.fill(exit.block_call)
            output = {"block": block_call, "model": call}
        else:
            if not self._is_last:
                raise UnsupportedError(
                    "the model's forward ended without calling the block at which this stage ends: "
                    + hint
                )
        self._calls.note_stored()
        problem = self._cache.problem
        if problem is not None:  # the model has caught it, and done something else instead
            raise UnsupportedError(f"{problem}: {hint}") from problem
        missing = missing_names(output)
        if missing:
            raise UnsupportedError(
                f"what this stage gives depends on {missing}, which other stages have: {hint}"
            )
        return output if self._is_last else output | self._calls.known()

    @contextmanager
    def _hooks(self, entry: _BlockEntry | None) -> Iterator[None]:
        """Give the blocks of this stage the received arguments, and note what they return."""
        blocks: dict[int, nn.Module] = self.__dict__["blocks"]
        with ExitStack() as hooks:
            for i, block in blocks.items():
                if entry is not None:
                    hook = entry.replace_call if i == min(blocks) else entry.fill_call
                    handle = block.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
                    hooks.callback(handle.remove)
                if not self._is_last:
                    handle = block.register_forward_hook(partial(self._record, i))
                    hooks.callback(handle.remove)
            yield

    def _record(self, index: int, block: nn.Module, args: Any, output: Any) -> None:
        self._calls.record(index, output)


@final
class _BlockEntry:
    """Replaces arguments of blocks by the values received from the previous stage."""

    def __init__(
        self, received: tuple[tuple[Any, ...], dict[str, Any]], calls: BlockCalls, hint: str
    ) -> None:
        self._received, self._calls, self._hint = received, calls, hint
        self._received_for: dict[int, Any] = {}  # by the identity of an argument of this stage
        self._own_call: Any = None  # keeps these alive, so that no identity is used again

    def replace_call(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of the first block: in its first call those that were received."""
        if not self._calls.enter():
            return self.fill_call(block, args, kwargs)
        self._own_call = args, kwargs
        arguments, received = pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(self._received)
        if len(arguments) == len(received):
            pairs = zip(arguments, received, strict=True)
            self._received_for = {id(leaf): value for leaf, value in pairs if _is_replaced(leaf)}
        return self._received

    def fill_call(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a later block, with received values for those of the first block."""
        filled: tuple[Any, Any] = self.fill((args, kwargs))
        return filled

    def fill(self, value: Any) -> Any:
        """The value with received values in the place of the tensors that they are values of."""

        def fill_leaf(leaf: Any) -> Any:
            if id(leaf) in self._received_for:
                return self._received_for[id(leaf)]
            if isinstance(leaf, FakeTensor):
                raise UnsupportedError(
                    f"a block is given a tensor that depends on {missing_names(leaf)} and that the "
                    f"first block of its stage is not given, so this stage has no value for it: "
                    + self._hint
                )
            return leaf

        return pytree.tree_map(fill_leaf, value)


def _is_replaced(argument: Any) -> bool:
    """Whether a received value counts instead: of what is fake, drawn at random, or written into.

    Parameters of this stage, and what is computed from them, get gradients here.
    """
    return isinstance(argument, Tensor) and not argument.requires_grad


def _keep_no_cache(container: nn.Module) -> None:
    """Let a copied model of transformers make no cache of keys and values if it is not told to.

    Only generating text needs the cache, and it cannot go to another stage.
    """
    config: Any = container.__dict__.get("config")
    if getattr(config, "use_cache", False):
        config = container.__dict__["config"] = copy.copy(config)
        config.use_cache = False


def _check_router_logits(model: nn.Module) -> None:
    for module in model.modules():
        if getattr(module.__dict__.get("config"), "output_router_logits", False):
            raise ArgumentError(
                f"this {type(module).__name__} gives the logits of its routers, of which a stage "
                "knows those of its own blocks only: set config.output_router_logits = False"
            )


def _load_fake_call(
    call: Any, device: torch.device, cache: FakeTensorCache
) -> tuple[list[Any], Any]:
    """The arguments of the model, with fake tensors: leaves and treespec."""
    treespec, dumped = call
    leaves = with_fakes(dumped, device, "the input of the model", cache)
    return leaves, pytree.treespec_loads(treespec)
