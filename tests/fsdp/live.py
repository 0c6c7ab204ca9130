"""How many bytes of tensors are alive, and were at most."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storages(nested: Any) -> list[torch.UntypedStorage]:
    found = (one for one in tree_leaves(nested) if isinstance(one, Tensor) and not one.is_meta)
    with torch._C.DisableTorchFunctionSubclass():
        return [one.untyped_storage() for one in found]


class Live(TorchDispatchMode):
    """The bytes that are alive of all tensors that were made inside, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(output):
            if storage._cdata not in given:  # not a view of what was there
                one = StorageWeakRef(storage)
                self._seen[one.cdata] = one
        self.peak = max(self.peak, self.now())
        return output

    def now(self) -> int:
        self._seen = {key: one for key, one in self._seen.items() if not one.expired()}
        alive = map(torch.UntypedStorage._new_with_weak_ptr, self._seen)
        return sum(one.nbytes() for one in alive if one is not None)
