"""Nested values whose arrays lie in one memory, which several processes map.

The memory is a file without a name, so the kernel frees it with the last process that maps it,
however that ends.

[Note: private mappings]
torch has no tensors that cannot be written to, and a write to a page that is mapped for reading
would end the process. So each rank maps the memory privately: all ranks read the same pages, and
one that writes gets a copy of the page for itself.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any, Self, TypeVar, cast, final, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.comm.streams import device_of
from echelon.errors import ArgumentError
from echelon.process.memory_files import create_memory, memory_error, open_memory

Item = TypeVar("Item", str, bytes)

_NAME = "echelon-data"
_WHAT = "a shared data set"
_ALIGN_NBYTES = 64
_CHUNK_NBYTES = 64 << 20
_MAX_DEPTH = 20
_SCALARS = (int, float, complex, bool, str, bytes, type(None))

# A value without its arrays: its kind, and what belongs to the kind.
Node = tuple[Any, ...]
Description = tuple[int, int, int, Node]


@final
class SharedColumn(Sequence[Item]):
    """A list of str or bytes, in memory that several processes map. A slice is a list.

    Example:
        >>> import echelon as ec
        >>> column = ec.shared_dataset(lambda: ["a", "bc", "d"])
        >>> column, column[1:], "d" in column
        (SharedColumn of 3 str, ['bc', 'd'], True)
    """

    def __init__(self, ends: NDArray[np.int64], data: NDArray[np.uint8], *, is_text: bool) -> None:
        self._ends, self._data, self._is_text = ends, data, is_text

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]  # which refuses what is out of range
        start = int(self._ends[i - 1]) if i else 0
        data = self._data[start : int(self._ends[i])].tobytes()
        return cast(Item, data.decode("utf-8", "surrogatepass") if self._is_text else data)

    def __repr__(self) -> str:
        return f"SharedColumn of {len(self)} {'str' if self._is_text else 'bytes'}"


@final
class MappedValues:
    """Values in a memory that was made here, or by another rank; a context manager.

    Its end closes the file of the memory, which stays as long as one of the values.

    Attributes:
        value: with arrays that lie in the memory.
        description: process, descriptor and size of the memory that was made here, and the value
            without its arrays.
    """

    def __init__(self) -> None:
        self.value: Any = None
        self.description: Description | None = None
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def fill(self, value: object) -> None:
        """Copy the arrays and columns of a value into new memory, and map it.

        Raises:
            ArgumentError: the value holds what has no place in such memory.
            SharedMemoryError: there is not enough memory.
        """
        layout = _Layout()
        node = layout.node(value, "the data", 0)
        self._descriptor = _create(layout.nbytes)
        try:
            for offset, array in layout.arrays:
                _write(self._descriptor, array, offset)
        except OSError as error:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            raise memory_error(error, _WHAT, layout.nbytes, free) from error
        self.description = os.getpid(), self._descriptor, layout.nbytes, node
        self._map(layout.nbytes, node)

    def map(self, description: Description) -> None:
        """Map the memory of another rank of this host, perhaps one of this process."""
        process, descriptor, nbytes, node = description
        if process == os.getpid():
            self._descriptor = os.dup(descriptor)
        else:
            self._descriptor = open_memory(f"/proc/{process}/fd/{descriptor}", _NAME)
        self._map(nbytes, node)

    def _map(self, nbytes: int, node: Node) -> None:
        # See [Note: private mappings]. Arrays keep it from being unmapped.
        memory = mmap.mmap(self._descriptor, nbytes, access=mmap.ACCESS_COPY)
        self.value = _value(node, memory)


@final
class _Layout:
    """Where the arrays of a value lie in one memory.

    Attributes:
        arrays: their offsets and bytes.
        nbytes: the size of the memory.
    """

    def __init__(self) -> None:
        self.arrays: list[tuple[int, NDArray[np.uint8]]] = []
        self.nbytes = _ALIGN_NBYTES  # no memory is empty

    def node(self, value: Any, name: str, depth: int) -> Node:
        """The value without its arrays, which get their places."""
        if depth > _MAX_DEPTH:
            raise ArgumentError(f"{name} is nested more than {_MAX_DEPTH} deep")
        kind = type(value)
        if kind in (Tensor, torch.nn.Parameter):
            return self._tensor(value, name)
        if kind is np.ndarray and not value.dtype.hasobject and not value.dtype.names:
            array = np.ascontiguousarray(value)
            return ("array", array.dtype.str, value.shape, self._place(array))
        if kind is dict:
            keys = [*value]
            items = [self.node(value[key], f"{name}[{key!r}]", depth + 1) for key in keys]
            return ("dict", keys, items)
        if kind is list and value and all(type(item) is str for item in value):
            return self._column([item.encode("utf-8", "surrogatepass") for item in value], True)
        if kind is list and value and all(type(item) is bytes for item in value):
            return self._column(value, False)
        if kind in (list, tuple):
            if all(type(item) in _SCALARS for item in value):
                return ("value", value)
            pairs = enumerate(value)
            return (kind.__name__, [self.node(v, f"{name}[{i}]", depth + 1) for i, v in pairs])
        if kind in _SCALARS or isinstance(value, np.generic | torch.dtype | torch.Size):
            return ("value", value)
        what = f"an array of {value.dtype}" if kind is np.ndarray else f"a {kind.__qualname__}"
        raise ArgumentError(
            f"{name} is {what}, which cannot be shared: return dicts, lists and tuples of tensors, "
            "arrays, texts and numbers, and make a data set of them on each rank"
        )

    def _tensor(self, tensor: Tensor, name: str) -> Node:
        if not device_of(tensor.device).is_on_host(tensor) or tensor.layout is not torch.strided:
            raise ArgumentError(
                f"{name} is a tensor of layout {tensor.layout} on {tensor.device}, which cannot be "
                "shared: give a dense one on the CPU"
            )
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return ("tensor", tensor.dtype, tuple(tensor.shape), self._place(flat.numpy()))

    def _column(self, items: Sequence[bytes], is_text: bool) -> Node:
        ends = np.cumsum([len(item) for item in items], dtype=np.int64)
        data = np.frombuffer(b"".join(items), np.uint8)
        return ("column", is_text, len(items), len(data), self._place(ends), self._place(data))

    def _place(self, array: NDArray[Any]) -> int:
        offset = self.nbytes
        self.arrays.append((offset, array.reshape(-1).view(np.uint8)))
        self.nbytes += -(-array.nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES
        return offset


def _value(node: Node, memory: mmap.mmap) -> Any:
    """The value of a node, with arrays that lie in ``memory``."""
    kind, content = node[0], node[1]
    if kind == "tensor":
        shape, offset = node[2], node[3]
        if 0 in shape:
            return torch.empty(shape, dtype=content, device="cpu")
        numel = int(np.prod(shape, dtype=np.int64))
        return torch.frombuffer(memory, dtype=content, count=numel, offset=offset).view(shape)
    if kind == "array":
        return _array(memory, np.dtype(content), node[2], node[3])
    if kind == "column":
        num_items, nbytes, ends, data = node[2:]
        return SharedColumn(
            _array(memory, np.dtype(np.int64), (num_items,), ends),
            _array(memory, np.dtype(np.uint8), (nbytes,), data),
            is_text=content,
        )
    if kind == "dict":
        return {key: _value(item, memory) for key, item in zip(content, node[2], strict=True)}
    if kind in ("list", "tuple"):
        items = [_value(item, memory) for item in content]
        return items if kind == "list" else tuple(items)
    return content


def _array(
    memory: mmap.mmap, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int
) -> NDArray[Any]:
    array = np.ndarray(shape, dtype, buffer=memory, offset=offset)
    array.flags.writeable = False
    return array


def _create(nbytes: int) -> int:
    """The descriptor of new memory."""
    if hasattr(os, "memfd_create"):
        return create_memory(_NAME, nbytes, what=_WHAT)
    with tempfile.TemporaryFile() as file:  # only simulated ranks share memory there
        file.truncate(nbytes)
        return os.dup(file.fileno())


def _write(descriptor: int, array: NDArray[np.uint8], offset: int) -> None:
    """Write to memory by system calls: too little of it is an error then, and not a signal."""
    data = array.data
    while data:
        written = os.pwrite(descriptor, data[:_CHUNK_NBYTES], offset)
        data, offset = data[written:], offset + written
