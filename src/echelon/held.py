"""What one rank holds of a model: ranges of its tensors, under the names of the plain model.

::

    plain model    | weight (3x4) ............ | bias (3) |        by name, flattened
    rank 0 holds   | weight[0:8]  |                                one range of one tensor
    rank 1 holds                  | weight[8:12] | bias[0:3] |

Every technique says what it holds in these terms, so whoever reads or writes a model needs to know
none of them, and any cut can become any other by the arithmetic of ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Protocol, final, runtime_checkable

from torch import Tensor, nn

from echelon.world.group import Group

__all__ = ["Extra", "Held", "Holder", "Holdings", "Kept", "named_extras", "named_state"]

Shape = tuple[int, ...]

_COMPILED = "_orig_mod."  # what torch.compile puts before the names of a module


class Kept(Enum):
    """How the ranks that hold one range keep it alike."""

    EQUAL = "all copies have the same bits"
    FIRST = "the first copy counts; others take it over when they next train"
    OWN = "nobody makes the copies alike, so each rank may have its own values"


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Held:
    """A range of one tensor of the plain model, in this rank's memory.

    Attributes:
        names: of the tensor in the plain model; the first counts, others are tied to it.
        shape: of the whole tensor.
        start: first element of the range, in the flattened tensor.
        values: the range itself, of any shape; its elements in row-major order are the range.
        copy: which of the ranks that hold this very range this one is.
        num_copies: how many hold it.
        kept: how the copies are kept alike.
    """

    names: tuple[str, ...]
    shape: Shape
    start: int
    values: Tensor
    copy: int = 0
    num_copies: int = 1
    kept: Kept = Kept.EQUAL

    @property
    def name(self) -> str:
        """The name that counts."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """Length of the range, in elements."""
        return self.values.numel()

    @property
    def is_whole(self) -> bool:
        """Whether the range is all of the tensor."""
        return self.numel == prod(self.shape)

    def renamed(self, rename: Callable[[str], str]) -> Held:
        """The same under other names."""
        return replace(self, names=tuple(map(rename, self.names)))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Extra:
    """What a module adds to its state by ``get_extra_state``, and the module that takes it back."""

    name: str
    module: nn.Module


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Holdings:
    """All that one rank holds of a model.

    Attributes:
        tensors: parameters and persistent buffers.
        params: for each parameter object that an optimizer may have, the ranges that its memory is,
            end to end.
        extras: further state of modules.
        axes: the groups over which the model is shared, one for each axis of the mesh; together
            their sizes give the number of ranks that share it.
        before_write: called before ``values`` are written.
    """

    tensors: tuple[Held, ...]
    params: Mapping[nn.Parameter, tuple[Held, ...]]
    extras: tuple[Extra, ...] = ()
    axes: tuple[Group, ...] = ()
    before_write: Callable[[], None] = lambda: None

    def renamed(self, rename: Callable[[str], str]) -> Holdings:
        """The same under other names."""
        changed = {id(one): one.renamed(rename) for one in self.tensors}
        return replace(
            self,
            tensors=tuple(changed.values()),
            params={
                param: tuple(changed.get(id(one)) or one.renamed(rename) for one in own)
                for param, own in self.params.items()
            },
            extras=tuple(Extra(rename(one.name), one.module) for one in self.extras),
        )


@runtime_checkable
class Holder(Protocol):
    """A module that knows what it holds of the plain model; nothing else need look inside."""

    def holdings(self) -> Holdings:
        """What this rank holds, under the plain names. Nothing is communicated.

        Raises:
            StateError: in the middle of a step.
        """


def named_state(module: nn.Module) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Parameters and persistent buffers of a plain module, each once, with all of its names.

    The order is that of ``state_dict``, by the first name. What ``torch.compile`` puts into names
    is left out.

    Example:
        >>> one = nn.Linear(1, 1, bias=False)
        >>> [names for names, _ in named_state(nn.Sequential(one, one))]
        [('0.weight', '1.weight')]
    """
    found: dict[int, tuple[list[str], Tensor]] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        persistent = {
            name: buffer
            for name, buffer in owner._buffers.items()
            if name not in owner._non_persistent_buffers_set
        }
        for local, tensor in (owner._parameters | persistent).items():
            if tensor is not None:
                name = f"{path}.{local}".lstrip(".").replace(_COMPILED, "")
                found.setdefault(id(tensor), ([], tensor))[0].append(name)
    for names, tensor in found.values():
        yield tuple(names), tensor


def named_extras(module: nn.Module) -> Iterator[Extra]:
    """The modules that have further state, each once."""
    for path, owner in module.named_modules():
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            yield Extra(f"{path}._extra_state".lstrip(".").replace(_COMPILED, ""), owner)
