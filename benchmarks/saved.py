"""How many bytes of activations autograd graphs keep, whoever made them."""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["SavedBytes"]


class _Held:
    """A saved tensor, counted as long as a graph has it."""

    def __init__(self, tensor: Tensor, owner: SavedBytes) -> None:
        self.tensor, self._owner = tensor, owner
        owner.change(tensor, +1)

    def __del__(self) -> None:
        self._owner.change(self.tensor, -1)


class SavedBytes:
    """Counts while its block runs, on one thread. Memory that several graph nodes keep counts once.

    Args:
        model: whose parameters do not count.

    Attributes:
        most: bytes at once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._params = {param.untyped_storage().data_ptr() for param in model.parameters()}
        self._uses: dict[int, int] = {}
        self._now = self.most = 0
        self._hooks = saved_tensors_hooks(lambda t: _Held(t, self), lambda held: held.tensor)

    def change(self, tensor: Tensor, by: int) -> None:
        """A graph took a tensor, or let it go."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place in self._params:
            return
        before = self._uses.get(place, 0)
        self._uses[place] = before + by
        if before == 0 or before + by == 0:
            self._now += by * storage.nbytes()
            self.most = max(self.most, self._now)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
