"""Which tensors of a batch are cut into microbatches, and which every microbatch gets whole.

The user says it with the words of ``torch.distributed.pipelining``, or this rule decides:

1. The first tensor of the input is the batch, and so is the first tensor of the target.
2. Any other tensor is cut if its dim 0 is as long as the batch. It is whole if it has no dims, or
   if its dim 0 has length 1, which broadcasts over rows.
3. A tensor whose dim 0 has another length is refused. So is one that rule 2 would cut although the
   same length is also that of another of its dims, or of another dim of the input: a mask of 4 × 4
   may belong to 4 rows or to 4 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.errors import ArgumentError
from echelon.modules.nested import tensors as tensors_in


@final
@dataclass(frozen=True, slots=True)
class Replicate:
    """Every microbatch gets the whole tensor."""


@final
@dataclass(frozen=True, slots=True)
class TensorChunkSpec:
    """A tensor has the rows of the batch, and is cut with it.

    Attributes:
        split_dim: the dim of the rows, which is 0.
    """

    split_dim: int = 0

    def __post_init__(self) -> None:
        if type(self.split_dim) is not int or self.split_dim != 0:
            raise ArgumentError(
                f"split_dim is {self.split_dim!r:.80}, and rows are dim 0: transpose the tensor "
                "before the pipeline, and back in the first stage"
            )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSpecs:
    """What the user said about the arguments of a pipeline; None leaves them to the rule.

    A spec stands for all tensors of what it is given for: of an argument, or of a part of one.

    Attributes:
        args: a spec for each positional argument.
        kwargs: specs of keyword arguments, by name.
        target: a spec for the target.
    """

    args: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] | None = None
    target: Any = None

    def __post_init__(self) -> None:
        if self.args is not None and not isinstance(self.args, tuple | list):
            raise ArgumentError(
                f"args_chunk_spec is {self.args!r:.80}; give a tuple with a spec for each argument"
            )
        if self.kwargs is not None and not isinstance(self.kwargs, Mapping):
            raise ArgumentError(
                f"kwargs_chunk_spec is {self.kwargs!r:.80}; give a dict such as "
                "{'mask': ec.pipeline.Replicate()}"
            )
        for name, spec in self._by_option().items():
            _check_spec(name, spec)

    def _by_option(self) -> dict[str, Any]:
        return {
            "args_chunk_spec": self.args,
            "kwargs_chunk_spec": self.kwargs,
            "target_chunk_spec": self.target,
        }

    def facts(self) -> dict[str, str]:
        """What ranks compare, by option."""
        return {name: repr(spec) for name, spec in self._by_option().items()}


def _check_spec(name: str, spec: Any) -> None:
    if isinstance(spec, Mapping | tuple | list):
        for inner in spec.values() if isinstance(spec, Mapping) else spec:
            _check_spec(name, inner)
    elif spec is not None and not isinstance(spec, Replicate | TensorChunkSpec):
        raise ArgumentError(
            f"{name} has {spec!r:.80}; give ec.pipeline.Replicate(), "
            "ec.pipeline.TensorChunkSpec(0), or None for the rule"
        )


class NamedLeaf(NamedTuple):
    """A value in the arguments, what errors call it, and what the user said about it."""

    value: Any
    tree: str
    path: Sequence[Any]
    spec: Replicate | TensorChunkSpec | None

    @property
    def name(self) -> str:
        """The name of the tree, and where in it this is; made for errors only."""
        return f"{self.tree}{pytree.keystr(tuple(self.path))}"

    def is_split(self, num_rows: int) -> bool:
        """Whether it is cut with a batch of ``num_rows``, into which it fits."""
        if not isinstance(self.value, Tensor) or isinstance(self.spec, Replicate):
            return False
        return self.value.dim() > 0 and self.value.shape[0] == num_rows

    @property
    def is_declared(self) -> bool:
        """Whether it has rows because the user said so."""
        return isinstance(self.value, Tensor) and isinstance(self.spec, TensorChunkSpec)

    @property
    def is_undecided(self) -> bool:
        """Whether only its length says whether it has rows."""
        is_whole = not isinstance(self.value, Tensor) or not self.value.dim()
        return self.spec is None and not is_whole and self.value.shape[0] != 1

    @property
    def is_square(self) -> bool:
        """Whether another dim has the length of dim 0."""
        return self.value.shape[0] in self.value.shape[1:]

    @property
    def text(self) -> str:
        """Its name and its shape."""
        return f"{self.name} of shape {list(self.value.shape)}"


class NamedLeaves(NamedTuple):
    """The values in some arguments, and how they are nested."""

    leaves: list[NamedLeaf]
    structure: pytree.TreeSpec


def named_leaves(tree: Any, spec: Any, what: str) -> NamedLeaves:
    """The values in ``tree``, which errors call ``what``.

    Refuses values that hide tensors.

    Example:
        >>> mask = torch.ones(3, 3)
        >>> leaves, _ = named_leaves((mask, {"m": mask}), (None, Replicate()), "input")
        >>> [leaf.spec for leaf in leaves], leaves[1].name
        ([None, Replicate()], "input[1]['m']")
    """
    if what == "input" and spec is not None and len(spec) != len(tree):
        raise ArgumentError(
            f"args_chunk_spec has {len(spec)} specs for {len(tree)} arguments: give one for each, "
            "None for the rule"
        )
    paths, structure = pytree.tree_flatten_with_path(tree)
    leaves = [
        NamedLeaf(value, what, path, None if spec is None else _spec_at(spec, path))
        for path, value in paths
    ]
    for leaf in leaves:
        _check_leaf(leaf)
    return NamedLeaves(leaves, structure)


def _spec_at(spec: Any, path: Sequence[Any]) -> Any:
    for key in path:
        if isinstance(spec, Mapping):
            spec = spec.get(getattr(key, "key", None))
        elif isinstance(spec, tuple | list):
            index = getattr(key, "idx", len(spec))
            spec = spec[index] if index < len(spec) else None
        else:
            break
    return spec if isinstance(spec, Replicate | TensorChunkSpec) else None


def _check_leaf(leaf: NamedLeaf) -> None:
    value = leaf.value
    if isinstance(leaf.spec, Replicate):
        return
    if not isinstance(value, Tensor):
        is_array = bool(getattr(value, "shape", ()))
        if is_array or any(True for _ in tensors_in(value)):
            kind = type(value).__name__
            raise ArgumentError(
                f"{leaf.name} is a {kind}, whose rows cannot be cut into microbatches: give its "
                "tensors in a dict, tuple or list, or a class that torch.utils._pytree knows, or "
                f"say that every microbatch gets it whole: {option_for(leaf.name)}"
            )
    elif value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise ArgumentError(
            f"{leaf.name} is {kind}, which cannot be cut into microbatches: give a dense tensor, "
            "and make it sparse or nested in the first stage, or say that every microbatch gets "
            f"it whole: {option_for(leaf.name)}"
        )
    elif isinstance(leaf.spec, TensorChunkSpec) and not value.dim():
        raise ArgumentError(f"{leaf.name} has no dims, and its spec is {leaf.spec}")


def option_for(name: str) -> str:
    """The option of a pipeline that says what ``name`` is."""
    what = name.partition("[")[0]
    if what == "kwargs":
        argument = name[len("kwargs[") :].partition("]")[0]
        return f"ec.Pipeline(kwargs_chunk_spec={{{argument}: ec.pipeline.Replicate()}})"
    option = "args_chunk_spec" if what == "input" else "target_chunk_spec"
    return f"ec.Pipeline({option}=(..., ec.pipeline.Replicate()))"


def batch_tensor(leaves: Sequence[NamedLeaf]) -> NamedLeaf | None:
    """The tensor that says how many rows the batch has: the first that may have rows."""
    declared = [leaf for leaf in leaves if leaf.is_declared]
    by_rule = [
        leaf
        for leaf in leaves
        if leaf.spec is None and isinstance(leaf.value, Tensor) and leaf.value.dim()
    ]
    return next(iter([*declared, *by_rule]), None)
