"""``Allocations``: the bytes of tensors that one thread has alive, after each operation."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from types import FrameType
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from echelon import events
from echelon.modules.sharded_tensor import local_shard

_COMMUNICATION = {"echelon.comm.group", "echelon.comm.work"}  # where every call passes


@final
class Allocations(TorchDispatchMode):
    """Counts the storages that this thread uses, from the first operation with them to their end.

    What a group allocates to move values is not counted, nor is workspace inside of an operation.
    Nothing depends on clocks: two runs of a deterministic step count the same.

    Args:
        after: is called with the bytes of all storages that are alive, after each operation.
        rounding: an allocation takes a multiple of so many bytes; PyTorch's of CUDA takes 512.

    Attributes:
        nbytes: of all storages that are alive.
    """

    def __init__(self, after: Callable[[int], None], *, rounding: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._after, self._rounding = after, rounding
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._were_resized = False
        self._listening = ExitStack()
        self.nbytes = 0

    def __enter__(self) -> Self:
        self._listening.enter_context(events.listen(self._hear))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._listening.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _hear(self, event: events.Event) -> None:
        # FSDP gives memory of unsharded parameters back, and no operation sees that.
        self._were_resized |= "unit" in event.facts

    def add(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor`` as it is now."""
        if is_traceable_wrapper_subclass(tensor):  # such as a DTensor: its parts have the storage
            for name in tensor.__tensor_flatten__()[0]:
                self.add(getattr(tensor, name))
            return
        if tensor.layout is not torch.strided or tensor.is_meta:
            return
        storage = local_shard(tensor).untyped_storage()
        if storage._cdata not in self._sizes:
            self._storages[storage._cdata] = weakref.ref(storage)
            weakref.finalize(storage, self._remove, storage._cdata).atexit = False
        self._weigh(storage)

    def _weigh(self, storage: torch.UntypedStorage) -> None:
        size = -(-storage.nbytes() // self._rounding) * self._rounding
        self.nbytes += size - self._sizes.get(storage._cdata, 0)  # it may have been resized
        self._sizes[storage._cdata] = size

    def _remove(self, key: int) -> None:
        self.nbytes -= self._sizes.pop(key)
        del self._storages[key]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if _in_group_call():
            return output
        if self._were_resized:
            self._were_resized = False
            for reference in list(self._storages.values()):
                if (storage := reference()) is not None:
                    self._weigh(storage)
        for tensor in tensors_in((*args, *(kwargs or {}).values(), output)):
            self.add(tensor)
        self._after(self.nbytes)
        return output


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among what an operation takes or returns, alone or in a list."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _in_group_call() -> bool:
    """Whether an operation is part of the work of a group, which one rank may do for all."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") in _COMMUNICATION:
            return True
        frame = frame.f_back
    return False
