"""A module around a module that looks like the plain one: its names, its attributes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from echelon.errors import ArgumentError, StateError, UnsupportedError
from echelon.modules.compiled import plain_name

_TORCH_DDP = "torch.nn.parallel.distributed"


def check_may_sync(*, in_no_sync: bool, in_backward: bool) -> None:
    """Refuse ``sync_gradients()`` where the gradients are not complete."""
    if in_no_sync:
        raise StateError("sync_gradients() inside no_sync(): leave the block first")
    if in_backward:
        raise StateError("sync_gradients() inside backward: call it after loss.backward()")


def no_assign(owner: str) -> ArgumentError:
    """The error for ``assign=True``; ``owner`` is such as ``"FSDP shards"``."""
    return ArgumentError(
        f"load_state_dict(assign=True) would replace the parameters that {owner}: use assign=False"
    )


def prefix_loader(owner: str, rename: Callable[[str], str] = str) -> Callable[..., None]:
    """A hook on the state that a larger module loads, where torch looks for names of ``module``.

    ``owner`` is as in ``no_assign``; ``rename`` makes the names in the wrapped module.
    """

    def hook(
        _: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: object
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise no_assign(owner)
        for key in [key for key in state if key.startswith(prefix)]:
            state[f"{prefix}module.{rename(key.removeprefix(prefix))}"] = state.pop(key)

    return hook


class Wrapper(nn.Module):
    """Wraps ``module`` without a prefix: names of parameters, buffers and modules stay the same.

    Attributes:
        module: the wrapped module.
    """

    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return self._of_module(name)

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        if self._is_of_module(name, value):
            vars(self).pop(name, None)  # a plain value that this one takes the place of
            setattr(self.module, name, value)  # whose code reads it there
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_of_module(name):
            delattr(self.module, name)
        else:
            super().__delattr__(name)

    def _is_of_module(self, name: str, value: object = None) -> bool:
        """Whether an attribute is the module's: it has it already, or the value becomes state."""
        own = vars(self)
        if "forward" not in own:  # what a wrapper sets first is its own
            return False
        if name in own["_modules"] or hasattr(type(self), name):
            return False
        if isinstance(value, nn.Parameter | nn.Buffer | nn.Module):
            return True
        return name not in own and hasattr(self.module, name)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a buffer to the module."""
        self.module.register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter to the module."""
        self.module.register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a module to the module."""
        self.module.add_module(name, module)

    def _of_module(self, name: str) -> Any:
        module = self.module
        try:
            return getattr(module, name)
        except AttributeError as error:
            inner, outer = type(module).__name__, type(self).__name__
            if str(error) != f"{inner!r} object has no attribute {name!r}":
                raise  # of code of the module
            raise AttributeError(
                f"{outer!r} object has no attribute {name!r}, and neither has the {inner!r} that "
                "it wraps",
                name=name,
                obj=self,
            ) from None

    def _wear_forward(self) -> None:
        """Give ``forward`` the signature of the module's forward, which tools read.

        From now on the wrapper has all attributes that are its own.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            return type(self).forward(self, *args, **kwargs)

        forward.__doc__ = type(self).forward.__doc__
        forward.__wrapped__ = self.module.forward  # type: ignore[attr-defined]
        self.forward = forward

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Refuse PyTorch's ``DistributedDataParallel``, which reads this attribute first.

        For whoever else reads it, such as ``inspect.getmembers``, there is no such attribute.
        """
        name = type(self).__name__
        if sys._getframe(1).f_globals.get("__name__") != _TORCH_DDP:
            raise AttributeError(f"{name!r} object has no attribute that {_TORCH_DDP} ignores")
        raise UnsupportedError(
            f"an echelon {name} was given to torch.nn.parallel.DistributedDataParallel, which "
            "would reduce its gradients once more. The Trainer of transformers and prepare() of "
            "accelerate do so where they find ranks: give them the plain module, or train the "
            f"{name} in a loop of your own without them"
        )

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
        for name, module in self.module.named_modules(memo, prefix, remove_duplicate):
            yield prefix + plain_name(name.removeprefix(prefix)), module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Allow ``to()``, ``double()``, ``cuda()`` and the like only if they change nothing."""
        kinds: dict[tuple[torch.dtype, torch.device], str] = {}
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            kinds.setdefault((tensor.dtype, tensor.device), name)
        for (dtype, device), name in kinds.items():
            result = fn(torch.empty(0, dtype=dtype, device=device))
            if (result.dtype, result.device) != (dtype, device):
                raise StateError(
                    f"{name!r} cannot become {result.dtype} on {result.device}, because this "
                    f"{type(self).__name__} communicates it as {dtype} on {device}: convert the "
                    "model before wrapping it"
                )
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        name = type(self).__name__
        raise StateError(
            f"a {name} holds a group of running ranks, so it cannot be pickled, saved or sent: "
            "save its state_dict()"
        )
