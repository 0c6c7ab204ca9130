"""Values that cross a stage boundary: any nesting of tensors and plain values.

The tensors of a value are sent in each step. Its *spec* is everything else: the nesting, dtypes,
shapes, which tensors need a gradient, and the plain values. Both sides remember the spec of each
microbatch, so that it is sent only when it changes, and the receiver can post its buffers early.

Only containers that the receiver knows itself are rebuilt: those of Python, named tuples of
modules that it has imported, and classes that it has registered with ``torch.utils._pytree``.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict, namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.comm.object_bytes import from_object, to_object
from echelon.errors import ArgumentError, CommError


@final
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its elements.

    Attributes:
        shape: the shape of the tensor.
        dtype: the dtype of its elements.
        requires_grad: whether its gradient is sent back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        """Memory for such a tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@final
@dataclass(frozen=True, slots=True)
class BoundarySpec:
    """A value without the elements of its tensors; values with equal specs fit the same buffers.

    Attributes:
        leaves: by position, a ``TensorSpec`` or the plain value itself.
        treespec: how the leaves are nested.
    """

    leaves: tuple[Any, ...]
    treespec: pytree.TreeSpec

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The specs of the tensors, in order."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    @property
    def requiring_grad(self) -> tuple[TensorSpec, ...]:
        """The specs of the tensors whose gradients come back, in order."""
        return tuple(spec for spec in self.tensors if spec.requires_grad)

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """The value with these tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.treespec)

    def is_identical(self, other: BoundarySpec) -> bool:
        """Whether ``other`` need not be sent to a receiver that knows this spec.

        The bytes of plain values are compared: 1, 1.0 and True are equal and not identical.
        """
        if self.leaves != other.leaves or self.treespec != other.treespec:
            return False
        if len(self.tensors) == len(self.leaves):
            return True
        return all(map(_are_identical, self.leaves, other.leaves))

    def to_bytes(self) -> bytes:
        """The spec as bytes; refuses a class that the receiver could not find by its name."""
        # The containers themselves, with the numbers of the leaves in them.
        numbers = pytree.tree_unflatten(range(len(self.leaves)), self.treespec)
        leaves = [
            (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, TensorSpec) else [leaf]
            for leaf in self.leaves
        ]
        data = from_object((leaves, list(_dump_tree(numbers))), "what goes to the next stage")
        return data.numpy().tobytes()

    @staticmethod
    def from_bytes(data: bytes, rank: int) -> BoundarySpec:
        """The spec that ``to_bytes`` wrote on the world rank ``rank``."""
        received = to_object(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank)
        try:
            dumped_leaves, nodes = received
            leaves = tuple(
                TensorSpec(*leaf) if isinstance(leaf, tuple) else leaf[0] for leaf in dumped_leaves
            )
            numbers = _load_tree(nodes, iter(range(len(leaves))))
        except (TypeError, ValueError, KeyError, IndexError, StopIteration) as error:
            raise CommError(
                f"rank {rank} sent bytes that are no spec of a value: {error!r}"
            ) from error
        return BoundarySpec(leaves, pytree.tree_structure(numbers))


def _are_identical(leaf: Any, other: Any) -> bool:
    """Whether two leaves that are equal are also sent as the same bytes."""
    if type(leaf) is not type(other):
        return False
    return not isinstance(leaf, float | complex) or repr(leaf) == repr(other)  # 0.0 and -0.0


@final
@dataclass(frozen=True, slots=True)
class BoundaryValue:
    """A value between two stages, flattened: its spec and its tensors, which have no graph."""

    spec: BoundarySpec
    tensors: list[Tensor]

    def require_grad(self) -> None:
        """Make leaves that need a gradient of the tensors whose gradients come back."""
        for spec, tensor in zip(self.spec.tensors, self.tensors, strict=True):
            if spec.requires_grad:
                tensor.requires_grad_()

    def unflatten(self) -> Any:
        """The value as the next stage takes it."""
        return self.spec.unflatten(self.tensors)


def flatten(value: Any, source: str) -> tuple[BoundarySpec, list[Tensor]]:
    """The spec and the tensors of a value that errors say comes from ``source``.

    Example:
        >>> spec, tensors = flatten({"x": torch.ones(2), "n": 3}, "stage 0")
        >>> spec.tensors[0].shape, spec.unflatten(tensors)["n"]
        ((2,), 3)
    """
    if isinstance(value, Tensor):  # the output of most stages needs no walk through a tree
        return BoundarySpec((_tensor_spec(value, source),), _LEAF), [value]
    leaves, treespec = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    specs = tuple(
        _tensor_spec(leaf, source) if isinstance(leaf, Tensor) else _plain_value(leaf, source)
        for leaf in leaves
    )
    return BoundarySpec(specs, treespec), tensors


_LEAF = pytree.tree_flatten(0)[1]  # the tree of a value that is no container


def _tensor_spec(tensor: Tensor, source: str) -> TensorSpec:
    if tensor.layout is not torch.strided:
        raise ArgumentError(
            f"{source} gave a tensor of layout {tensor.layout}, which cannot go to another stage: "
            "give dense tensors, such as its indices and its values"
        )
    return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size)


def _plain_value(leaf: Any, source: str) -> Any:
    if isinstance(leaf, _PLAIN):
        return leaf
    raise ArgumentError(
        f"{source} gave a {type(leaf).__name__} ({leaf!r:.60}), which cannot go to another stage: "
        "give tensors and plain values (None, numbers, strings) in tuples, lists or dicts, or "
        "register the class with torch.utils._pytree"
    )


# --- trees of containers as data ---------------------------------------------------------------

_NAMED_TUPLE = "namedtuple"  # the name in a dump of every class of named tuples
_DEFAULT_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (int, float, str, list, dict, set, tuple)
}

# None for a leaf, else the name of a container's class, its pytree context, and its length.
_Node = tuple[str, Any, int] | None


def _dump_tree(tree: Any) -> Iterator[_Node]:
    """Each container and each leaf of ``tree``, a container before its children."""
    kind = pytree._get_node_type(tree)
    if kind not in pytree.SUPPORTED_NODES:
        yield None
        return
    children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(tree)
    if kind is namedtuple:
        context = _class_name(context)
        if _find_named_tuple(context) is not type(tree):
            raise ArgumentError(_unknown_class(context))
        yield _NAMED_TUPLE, context, len(children)
    elif kind is defaultdict:
        factory, keys = context
        name = None if factory is None else getattr(factory, "__name__", "")
        if factory is not None and _DEFAULT_FACTORIES.get(name or "") is not factory:
            raise ArgumentError(
                f"a defaultdict of {factory!r:.60} cannot go to another stage: give a dict"
            )
        yield _class_name(kind), (name, keys), len(children)
    else:
        yield _class_name(kind), context, len(children)
    for child in children:
        yield from _dump_tree(child)


def _load_tree(nodes: Sequence[_Node], leaves: Iterator[Any]) -> Any:
    """The containers that ``_dump_tree`` wrote, with these leaves."""
    kinds = {_class_name(kind): kind for kind in pytree.SUPPORTED_NODES if kind is not namedtuple}
    return _load_node(iter(nodes), leaves, kinds)


def _load_node(nodes: Iterator[_Node], leaves: Iterator[Any], kinds: dict[str, Any]) -> Any:
    node = next(nodes)
    if node is None:
        return next(leaves)
    name, context, length = node
    children = [_load_node(nodes, leaves, kinds) for _ in range(length)]
    if name == _NAMED_TUPLE:
        named_tuple = _find_named_tuple(context)
        if named_tuple is None:
            raise ArgumentError(_unknown_class(context))
        return named_tuple(*children)
    if name not in kinds:
        raise ArgumentError(
            f"another stage sends a {name}, which is not registered with torch.utils._pytree in "
            "this process: import the module that registers it on all ranks"
        )
    kind = kinds[name]
    if kind is defaultdict:
        factory, keys = context
        context = [None if factory is None else _DEFAULT_FACTORIES[factory], keys]
    return pytree.SUPPORTED_NODES[kind].unflatten_fn(children, context)


def _class_name(kind: Any) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find_named_tuple(name: str) -> Any:
    """The class of that name in a module that is imported; None if there is none."""
    module, _, path = name.partition(":")
    kind: Any = sys.modules.get(module)
    for attribute in path.split("."):
        kind = getattr(kind, attribute, None)
    is_named_tuple = isinstance(kind, type) and pytree.is_namedtuple_class(kind)
    return kind if is_named_tuple else None


def _unknown_class(name: str) -> str:
    return (
        f"what goes to the next stage cannot be written down: {name.replace(':', '.')} is not "
        "found by its name; define the class at the top of a module that all ranks import"
    )
