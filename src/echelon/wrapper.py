"""A module around a module that looks like the plain one: its names, its attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["Wrapper"]


class Wrapper(nn.Module):
    """Wraps ``module`` without a prefix: names of parameters, buffers and modules stay the same.

    Attributes:
        module: what is wrapped.
    """

    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """This wrapper, then the module and all below it under the plain module's names."""
        memo = set() if memo is None else memo
        if self not in memo or not remove_duplicate:
            memo.add(self)
            yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)
