"""Parameters that have memory in common with other tensors, without being one parameter with them.

In the plain model, what is written into one of them is read from the other. A wrapper that moves
parameters into memory of its own, or sends them to another rank, would part them silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.errors import ArgumentError
from echelon.modules.sharded_tensor import is_part, local_shard


@final
class NamedMemory(NamedTuple):
    """A tensor of a module.

    Attributes:
        what: what errors call it, such as ``parameter '0.weight'``.
        tensor: the tensor.
        moves: whether it gets other memory, so that nothing may share its present one.
        home: tensors of the same home stay together, and may share memory.
    """

    what: str
    tensor: Tensor
    moves: bool
    home: object


def check_memory_of(module: nn.Module, ignored: Iterable[nn.Parameter], wrapper: str) -> None:
    """Refuse a module whose parameters ``wrapper`` cannot move, by an ArgumentError.

    ``ignored`` parameters stay where they are. Attributes are searched for views of parameters that
    are part of a graph, as ``self.head = self.embedding.weight.t()`` makes them.
    """
    stay = {id(param) for param in ignored}
    check_memory(_memory_of(module, stay), f"{wrapper} gives parameters other memory")


def check_memory(tensors: Iterable[NamedMemory], reason: str) -> None:
    """Refuse tensors that share memory and would be parted, by an ArgumentError."""
    items = [
        item._replace(tensor=local_shard(item.tensor)) if is_part(item.tensor) else item
        for item in tensors
    ]
    pair = _first_overlap([item for item in items if _has_memory(item.tensor)])
    if pair is not None:
        first, second = (item.what for item in pair)
        raise ArgumentError(
            f"{first} and {second} have memory in common and are two tensors. {reason}, so that "
            "the one would no longer follow the other. Make them one parameter (b.weight = "
            "a.weight ties them), compute the one from the other in forward, or give it a .clone()"
        )


def _memory_of(module: nn.Module, stay: set[int]) -> Iterator[NamedMemory]:
    params = {id(param) for param in module.parameters()}
    for name, param in module.named_parameters():
        yield NamedMemory(f"parameter {name!r}", param, id(param) not in stay, param)
    for name, buffer in module.named_buffers():
        yield NamedMemory(f"buffer {name!r}", buffer, False, buffer)
    for name, submodule in module.named_modules():
        for local, value in vars(submodule).items():
            if isinstance(value, Tensor) and value.requires_grad and id(value) not in params:
                yield NamedMemory(
                    f"attribute {f'{name}.{local}'.strip('.')!r}", value, False, value
                )


def _has_memory(tensor: Tensor) -> bool:
    if nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    is_plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return is_plain and tensor.numel() > 0


def _first_overlap(tensors: Sequence[NamedMemory]) -> tuple[NamedMemory, NamedMemory] | None:
    """The first two tensors with a common element, of which one moves and the other stays behind.

    Tensors are compared with those before them whose memory has not ended where theirs begins.
    """
    spans = [(str(item.tensor.device), *span_of(item.tensor), item) for item in tensors]
    open_spans: list[tuple[str, int, int, NamedMemory]] = []
    for span in sorted(spans, key=lambda span: span[:3]):
        device, start, _, item = span
        open_spans = [other for other in open_spans if other[0] == device and other[2] > start]
        for *_, other in open_spans:
            is_parted = (item.moves or other.moves) and item.home is not other.home
            if is_parted and _share_an_element(item.tensor, other.tensor):
                return other, item
        open_spans.append(span)
    return None


def span_of(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor, and of the first byte after it."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _share_an_element(first: Tensor, second: Tensor) -> bool:
    """Whether tensors, whose memory is interleaved at least, have a byte in common."""
    if first.is_contiguous() and second.is_contiguous():
        return True
    spans = [span_of(first), span_of(second)]
    begin, end = min(start for start, _ in spans), max(stop for _, stop in spans)
    first_bytes = torch.zeros(end - begin, dtype=torch.bool, device="cpu")
    second_bytes = first_bytes.clone()
    for marks, tensor in ((first_bytes, first), (second_bytes, second)):
        itemsize = tensor.element_size()
        strides = [step * itemsize for step in tensor.stride()]
        offset = tensor.data_ptr() - begin
        marks.as_strided((*tensor.shape, itemsize), (*strides, 1), offset).fill_(True)
    return bool((first_bytes & second_bytes).any())
