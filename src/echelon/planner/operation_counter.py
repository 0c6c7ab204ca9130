"""``OperationCounter``: what the operations of a program compute, move and keep, by place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from echelon.planner.operations import Multiplication, RankWork
from echelon.planner.shapes_only import touches_nothing

# The backward of fused attention computes the scores again (Dao, arXiv 2307.08691, section 4.1).
_ATTENTION_BACKWARD = 2.5
_ATTENTION = "aten::_scaled_dot_product_"


@final
@dataclass(kw_only=True)
class PlaceWork:
    """What is added up at one place, in one direction.

    Attributes:
        multiplications: of matrices.
        attention_flops: of attention in one kernel; half of them with a causal mask.
        moved: bytes that other operations read and write.
        kernels: operations that are not views.
        kept: bytes of the storages that the backward needs, each counted where it is kept first.
    """

    multiplications: list[Multiplication] = field(default_factory=list)
    attention_flops: float = 0.0
    moved: float = 0.0
    kernels: int = 0
    kept: list[int] = field(default_factory=list)

    def of_rank(self) -> RankWork:
        """The same as what a rank computes."""
        return RankWork(
            multiplications=tuple(self.multiplications),
            attention_flops=self.attention_flops,
            moved=self.moved,
            kernels=self.kernels,
        )


@final
class OperationCounter(TorchDispatchMode):
    """Counts the operations of this thread within the block, also those of a backward.

    Args:
        constants: parameters and buffers, which are not counted as kept.

    Attributes:
        work: by place and direction, which is ``"forward"`` or ``"backward"``.
        uses: the places that use each of the constants in a forward, by the constant's position.
        place: where what comes next belongs.
        direction: of what comes next.
    """

    def __init__(self, constants: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._constants = {_storage(tensor): i for i, tensor in enumerate(constants)}
        self._hooks = saved_tensors_hooks(self._keep, lambda tensor: tensor)
        self._kept: set[int] = set()
        self.work: dict[tuple[int, str], PlaceWork] = {}
        self.uses: dict[int, set[int]] = {}
        self.place, self.direction = 0, "forward"

    def __enter__(self) -> OperationCounter:
        self._hooks.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(*error)

    def at(self, place: int, direction: str) -> PlaceWork:
        """What was counted there."""
        return self.work.setdefault((place, direction), PlaceWork())

    def _keep(self, tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key not in self._constants and key not in self._kept:
            self._kept.add(key)  # it lives until the backward, so no other gets its address
            self.at(self.place, "forward").kept.append(tensor.untyped_storage().nbytes())
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.direction == "forward":
            for leaf in tree_iter((args, kwargs)):
                if (
                    isinstance(leaf, Tensor)
                    and (index := self._constants.get(_storage(leaf), -1)) >= 0
                ):
                    self.uses.setdefault(index, set()).add(self.place)
        if not touches_nothing(func):
            _count(self.at(self.place, self.direction), func, args, kwargs or {}, output)
        return output


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _count(work: PlaceWork, func: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
    name = func._schema.name
    products = _products(name, args, output)
    work.kernels += 1
    work.multiplications += products
    if name.startswith(_ATTENTION):
        work.attention_flops += _attention_flops(func, args, kwargs)
    elif not products:
        leaves = [leaf for leaf in tree_iter((args, kwargs, output)) if isinstance(leaf, Tensor)]
        work.moved += sum(leaf.numel() * leaf.itemsize for leaf in leaves)


def _products(name: str, args: Any, output: Any) -> list[Multiplication]:
    """The multiplications of matrices of an operation; those of a batch are one of more rows."""
    match name.removeprefix("aten::"):
        case "mm" | "bmm":
            left, right = args[:2]
        case "addmm" | "baddbmm":
            left, right = args[1:3]
        case "_grouped_mm":  # each row is multiplied by one of the matrices
            left, right = args[:2]
            if output.ndim == 3:  # the gradient of the matrices
                return [Multiplication(left.shape[0], left.shape[1], right.shape[-1])]
        case "convolution":
            return [_convolution(args[1], args[0] if args[6] else output)]
        case "convolution_backward":
            product = _convolution(args[2], args[1] if args[7] else args[0])
            return [product] * sum(args[-1][:2])
        case _:
            return []
    return [Multiplication(math.prod(left.shape[:-1]), left.shape[-1], right.shape[-1])]


def _convolution(weight: Tensor, outer: Tensor) -> Multiplication:
    """Of a weight with the side that has its first dimension: the output, or the input of a
    transposed one."""
    positions = outer.numel() / weight.shape[0]
    return Multiplication(positions, math.prod(weight.shape[1:]), weight.shape[0])


def _attention_flops(func: Any, args: Any, kwargs: Mapping[str, Any]) -> float:
    names = [argument.name for argument in func._schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key = values["query"], values["key"]
    flops: float = 4.0 * query.numel() * key.shape[-2]
    if values.get("is_causal"):
        flops /= 2
    return flops * (_ATTENTION_BACKWARD if "backward" in func._schema.name else 1.0)
