"""The state of a model by the names of the plain model: making copies, and loading in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echelon.errors import ArgumentError, EchelonError
from echelon.errors.message_text import misfit_text
from echelon.modules.compiled import plain_state
from echelon.modules.sharded_tensor import local_shard
from echelon.state.state_copy import as_copy


class LoadReport(NamedTuple):
    """Keys of a state dict that do not fit, as ``nn.Module.load_state_dict`` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@torch.inference_mode(mode=False)  # the copy outlives the caller's mode
def copy_of(value: Any, device: torch.device | None = None) -> Any:
    """A copy of a tensor, on its own device or another; any other value is returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(device or value.device, copy=True)


def state_of_copies(
    module: nn.Module,
    copies: Mapping[int, Tensor],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """The state dict of ``module`` with ``copies``, by ``id`` of parameters; the rest is copied.

    Code of modules makes it from the copies, as the plain module would from its parameters. All
    copies refuse to be written into. What a given ``destination`` has already is left as it is.
    """
    named = {**(kwargs or {}), "keep_vars": True}
    given = dict(named.get("destination") or (args[0] if args else None) or {})
    with _parameters_replaced(module, copies):
        state: dict[str, Any] = module.state_dict(*args, **named)
    marked = {id(value): as_copy(value) for value in copies.values()}
    for key, value in state.items():
        if isinstance(value, Tensor) and given.get(key) is not value:
            known = marked.get(id(value))
            state[key] = as_copy(copy_of(value, device)) if known is None else known
    return state


@contextmanager
def _parameters_replaced(module: nn.Module, values: Mapping[int, Any]) -> Iterator[None]:
    """Let all modules have ``values`` in the place of parameters of these ``id``."""
    own = [(inner._parameters, dict(inner._parameters)) for inner in module.modules()]
    try:
        for shown, params in own:
            shown.update({name: values.get(id(param), param) for name, param in params.items()})
        yield
    finally:
        for shown, params in own:
            shown.update(params)


def check_state(state: object) -> None:
    """Refuse what is no state dict."""
    if not isinstance(state, Mapping):
        raise ArgumentError(f"the state is {state!r:.80}; give a dict of tensors by name")


def load_model_state(
    module: nn.Module, memory: Mapping[int, Tensor], state: Mapping[str, Any], *, strict: bool
) -> LoadReport:
    """Let the code of all modules load a state in place, as ``nn.Module.load_state_dict`` does.

    Args:
        memory: what is written in the place of tensors of the module, by ``id``.

    Raises:
        ArgumentError: shapes, dtypes or, if ``strict``, keys do not fit; no tensor has changed.
    """
    check_state(state)
    try:
        with torch.no_grad(), _Loading(module, memory):
            report = LoadReport(*module.load_state_dict(plain_state(module, state), strict=False))
            if strict and any(report):
                raise ArgumentError(f"the state dict does not fit: {misfit_text(*report, [])}")
    except EchelonError:
        raise
    except RuntimeError as error:  # in which torch puts together what modules do not take
        raise ArgumentError(f"the state dict does not fit: {error}") from error
    return report


@final
class _Loading(TorchFunctionMode):
    """Directs what is copied into tensors of a module; after an error they are as before."""

    def __init__(self, module: nn.Module, memory: Mapping[int, Tensor]) -> None:
        super().__init__()
        tensors = (*module.parameters(), *module.buffers())
        self._memory = {id(tensor): memory.get(id(tensor), tensor) for tensor in tensors}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.copy_ and (memory := self._memory.get(id(args[0]))) is not None:
            if len(args) > 1 and not torch.can_cast(args[1].dtype, memory.dtype):
                raise ArgumentError(f"{args[1].dtype} would lose what {memory.dtype} does not have")
            local = local_shard(memory)
            self._before.setdefault(id(memory), (local, local.clone()))
            args = (memory, *args[1:])
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is not None:
            for local, before in self._before.values():
                local.copy_(before)
