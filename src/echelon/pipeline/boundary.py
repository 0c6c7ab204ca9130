"""What goes from one stage to the next: any nesting of tensors and plain values, as messages.

A *message* is the tensors of a value, one after the other; its *form* is everything else: the
nesting, dtypes, shapes, which tensors need a gradient, and the plain values. A form is sent with
the first microbatch and remembered on both sides, by microbatch, so that from the next step on the
receiver has the memory ready before the message comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.comm.object_bytes import from_object, to_object
from echelon.errors import ArgumentError, CommError
from echelon.pipeline.nesting import described, rebuilt


@final
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its values.

    Attributes:
        shape: of it.
        dtype: of it.
        requires_grad: whether a gradient comes back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        """Memory for such a tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@final
@dataclass(frozen=True, slots=True)
class BoundarySpec:
    """A value without its tensors; equal forms may use each other's memory.

    Attributes:
        leaves: by position, a ``TensorSpec`` or the plain value itself.
        spec: how leaves are nested.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Those of the tensors, in order."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    def assemble(self, tensors: Sequence[Tensor]) -> Any:
        """The value that has these tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def same(self, other: BoundarySpec) -> bool:
        """Whether ``other`` need not be sent where this one is known.

        Plain values are compared as they are sent: 1, 1.0 and True are equal and not the same.
        """
        if self.leaves != other.leaves or self.spec != other.spec:
            return False
        if len(self.tensors) == len(self.leaves):
            return True
        return all(map(_alike, self.leaves, other.leaves))

    def to_bytes(self) -> bytes:
        """For the stage that receives.

        Raises:
            ArgumentError: the receiver could not find a class that is in it.
        """
        # The containers themselves, with numbers in them.
        numbers = pytree.tree_unflatten(range(len(self.leaves)), self.spec)
        leaves = [
            (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, TensorSpec) else [leaf]
            for leaf in self.leaves
        ]
        data = from_object((leaves, described(numbers)), "what goes to the next stage")
        return data.numpy().tobytes()

    @staticmethod
    def from_bytes(data: bytes, rank: int) -> BoundarySpec:
        """What ``to_bytes`` gave on the stage before, which ``rank`` (in the job) has.

        Raises:
            ArgumentError: it has a class that this process does not know.
            CommError: these are the bytes of no form.
        """
        found = to_object(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank)
        try:
            given, nodes = found
            leaves = tuple(
                TensorSpec(*leaf) if isinstance(leaf, tuple) else leaf[0] for leaf in given
            )
            numbers = rebuilt(nodes, iter(range(len(leaves))))
        except (TypeError, ValueError, KeyError, IndexError, StopIteration) as error:
            raise CommError(f"rank {rank} sent what is no form of a value: {error!r}") from error
        return BoundarySpec(leaves, pytree.tree_structure(numbers))


def _alike(leaf: Any, other: Any) -> bool:
    """Whether two leaves that are equal are also the same."""
    if type(leaf) is not type(other):
        return False
    return not isinstance(leaf, float | complex) or repr(leaf) == repr(other)  # 0.0 and -0.0


def take_apart(value: Any, where: str) -> tuple[BoundarySpec, list[Tensor]]:
    """The form and the tensors of a value.

    Args:
        value: tensors and plain Python values in any nesting of tuples, lists and dicts.
        where: what gave it, in errors.

    Raises:
        ArgumentError: something in it can be neither sent nor written down.

    Example:
        >>> form, tensors = take_apart({"x": torch.ones(2), "n": 3}, "stage 0")
        >>> form.tensors[0].shape, form.assemble(tensors)["n"]
        ((2,), 3)
    """
    if isinstance(value, Tensor):  # what most stages give, without a walk
        return BoundarySpec((_form(value, where),), _ALONE), [value]
    leaves, spec = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    forms = tuple(
        _form(leaf, where) if isinstance(leaf, Tensor) else _plain(leaf, where) for leaf in leaves
    )
    return BoundarySpec(forms, spec), tensors


_ALONE = pytree.tree_flatten(0)[1]  # of a value that is no container


def _form(tensor: Tensor, where: str) -> TensorSpec:
    if tensor.layout is not torch.strided:
        raise ArgumentError(
            f"{where} gave a tensor of layout {tensor.layout}, which cannot go to another stage: "
            "give dense tensors, such as its indices and its values"
        )
    return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size)


def _plain(leaf: Any, where: str) -> Any:
    if isinstance(leaf, _PLAIN):
        return leaf
    raise ArgumentError(
        f"{where} gave a {type(leaf).__name__} ({leaf!r:.60}), which cannot go to another stage: "
        "give tensors and plain values (None, numbers, strings) in tuples, lists or dicts, or "
        "register the class with torch.utils._pytree"
    )
