"""What the ranks of a pipeline know of the values of a step before it begins.

Where messages have no tags, as over NCCL, a value must have the spec that its receiver expects. So
steps have *kinds*: two steps are of one kind if the arguments of all ranks, the modes of their
stages and of torch are alike. Ranks compare kinds in the collective in which they agree on the rows
of a batch. In the first steps of a kind each value says its own spec, and both sides remember it;
when two steps have given the same, messages have tensors only::

    step of this kind   1      2      3 ...           if step 2 gives something else than step 1,
    values say specs    yes    yes    no              they say them in all steps of the kind

Law: all ranks know the same, because each hears what has changed on the others in the last step.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from echelon.errors import ArgumentError
from echelon.pipeline.boundary import BoundarySpec, TensorSpec

_MAX_KINDS = 64  # that are remembered; those of a padded batch of text are few

KindFacts = tuple[int, int]
"""Of a rank: a digest of what its part in a step is like, and whether its last step changed."""

_Key = tuple[int, int]  # a boundary and a microbatch


@final
class StepSpecs:
    """What is known of the values of a step, on this rank, by boundary and microbatch.

    Attributes:
        training: whether backwards follow.
        is_known: messages have what is known; else each value says its own spec.
        has_changed: whether a value was not what was known.
    """

    def __init__(self, *, training: bool) -> None:
        self.training = training
        self.is_known = False
        self.has_changed = False
        self.values: dict[_Key, BoundarySpec] = {}
        self.unused: dict[_Key, tuple[bool, ...]] = {}  # which gradients do not come back

    def note_value(self, key: _Key, spec: BoundarySpec) -> None:
        """Remember the spec of a value that was not known."""
        self.values[key] = spec
        self.has_changed = True

    def note_unused(self, key: _Key, unused: Sequence[bool]) -> None:
        """Remember which tensors of a value the next stage did not use."""
        if self.unused.get(key) != tuple(unused):
            self.unused[key] = tuple(unused)
            self.has_changed = True

    def require_value(self, key: _Key, spec: BoundarySpec) -> None:
        """Refuse a value that its receiver does not expect."""
        if not self.values[key].is_identical(spec):
            _refuse(key, f"gave {_text(spec)}", f"gave {_text(self.values[key])}")

    def require_unused(self, key: _Key, unused: Sequence[bool]) -> None:
        """Refuse gradients of other tensors than their receiver expects."""
        if self.unused[key] != tuple(unused):
            texts = [_numbers(mask) for mask in (unused, self.unused[key])]
            _refuse(key, f"had its outputs {texts[0]} not used", f"had {texts[1]} not used")


def _refuse(key: _Key, now: str, before: str) -> None:
    boundary, microbatch = key
    raise ArgumentError(
        f"stage {boundary} {now} for microbatch {microbatch}, and {before} in earlier steps whose "
        "arguments were alike. Messages of this group have no tags, so its ranks agree on them "
        "before a step: give the stages an argument that changes whenever this does (a number is "
        "enough), or let the stage give the same always"
    )


def _text(spec: BoundarySpec) -> str:
    parts = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        + (" with a gradient" if leaf.requires_grad else "")
        if isinstance(leaf, TensorSpec)
        else f"{leaf!r:.40}"
        for leaf in spec.leaves
    ]
    return f"({', '.join(parts)})"


def _numbers(unused: Sequence[bool]) -> list[int]:
    return [n for n, is_unused in enumerate(unused) if is_unused]


@final
class _Kind:
    """What the ranks know of steps of one kind."""

    def __init__(self, *, training: bool) -> None:
        self.specs = StepSpecs(training=training)
        self.num_steps = 0
        self.varies = False

    def note(self, *, has_changed: bool) -> None:
        """Count a step; whether any rank has seen something new in it."""
        self.varies = self.varies or (has_changed and self.num_steps > 0)
        self.num_steps += 1


@final
class StepKinds:
    """The kinds of steps that a pipeline has had.

    Args:
        modules: the stages of this rank.
        agrees: whether ranks must know the values of a step before; if not, nothing is compared.
    """

    def __init__(self, modules: Collection[nn.Module], *, agrees: bool) -> None:
        self._modules, self._agrees = tuple(modules), agrees
        self._kinds: OrderedDict[tuple[int, ...], _Kind] = OrderedDict()
        self._last: _Kind | None = None

    def facts(self, arguments: Any, *, training: bool) -> KindFacts:
        """What other ranks must know of this one before a step with these arguments."""
        if not self._agrees:
            return 0, 0
        has_changed = self._last is not None and self._last.specs.has_changed
        return _digest((training, *_modes(self._modules), *_likeness(arguments))), has_changed

    def begin(self, facts: Iterable[KindFacts], *, training: bool) -> StepSpecs:
        """What is known of a step with these facts of all ranks. All ranks call it."""
        if not self._agrees:
            return StepSpecs(training=training)
        digests, changes = zip(*facts, strict=True)
        if self._last is not None:
            self._last.note(has_changed=any(changes))
        kind = self._kinds.pop(digests, None) or _Kind(training=training)
        self._kinds[digests] = self._last = kind
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)
        kind.specs.has_changed = False
        kind.specs.is_known = kind.num_steps > 1 and not kind.varies
        return kind.specs


def _digest(value: Any) -> int:
    """A number that differs where the texts of two values do. It fits into an int64."""
    data = repr(value).encode(errors="backslashreplace")
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


def _likeness(arguments: Any) -> tuple[Any, ...]:
    """What two calls have in common whose values have equal specs, as far as arguments tell."""
    leaves, treespec = pytree.tree_flatten(arguments)
    return (treespec, *map(_leaf_likeness, leaves))


def _leaf_likeness(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf


def _modes(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """The state of torch and of stages on which dtypes and gradients of their outputs depend."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    flags = [
        flag
        for module in modules
        for flag in (
            *(part.training for part in module.modules()),
            *(param.requires_grad for param in module.parameters()),
        )
    ]
    return autocast, torch.get_default_dtype(), flags
