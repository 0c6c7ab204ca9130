"""Tensors of which this rank holds a part, and which say so by their Python class.

``ShardedParameter`` is the class of a parameter while it is shown as this rank's shard, and
``ShardedTensor`` that of its gradient and of all that is computed from them elementwise. Their
memory is that of the shard under another class: code of C++ and code under
``DisableTorchFunctionSubclass``, such as all of ours, sees the shard. Code of users sees the whole:
each function of torch is looked up in ``RULES``, and a function without a rule is refused.

``KeptGradient`` is the class of ``.grad`` while gradients are kept that are not reduced yet. It has
no values, and rules of its own.

[Note: what a rule may do]
A rule gives what the whole tensor would give: facts about it (``shape``), the same function on the
shards (elementwise), or a number that the ranks combine. All ranks call what communicates, as they
run one script.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, cast, final

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils.weak import WeakIdKeyDictionary

from echelon.comm.call_arguments import PartOfATensor
from echelon.comm.group import Group
from echelon.errors import StateError
from echelon.modules.memory_writes import tensors_in

Shape = tuple[int, ...]
Rule = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]

# By function of torch. ``sharded_rules`` fills it; a function that is not in it is refused.
RULES: dict[Callable[..., Any], Rule] = {}
KEPT_RULES: dict[Callable[..., Any], Rule] = {}  # of ``KeptGradient``
_gradient: Any = Tensor.grad  # the attribute of every tensor
# Both are functions of C; those of ``ShardedParameter`` are not. A class has rules for a gradient,
# so they are called in DisableTorchFunctionSubclass().
grad_of: Callable[[Tensor], Tensor | None] = _gradient.__get__
set_grad: Callable[[Tensor, Tensor | None], None] = _gradient.__set__
_MAX_ALIASES = 8  # that are remembered before those that nobody has any more are dropped


@final
@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """Of which tensor this rank holds a part, and which part.

    Attributes:
        name: the name of the parameter, for errors.
        unit: the unit that it belongs to, for errors.
        shape: of the whole tensor.
        ranges: by rank, the first element in the flattened tensor and the number of elements.
        group: the ranks that hold the parts; None where this rank holds the whole tensor.
        by_rows: whether the part has the shape of rows of dim 0, and not one dim.
        is_flat: whether it is a flat parameter, which is in no graph: those of the model are.
        is_staged: whether other ranks have other tensors, of other stages of a pipeline.
        source: of a gradient of a stage, the id of its parameter.
        pieces: of which tensors this is the concatenation, each flattened; empty where it is one.
        before_write: called before a write into the part, which other ranks may read.
        aliases: other tensors with the memory of the part, which users may keep.
    """

    name: str
    unit: str
    shape: Shape
    ranges: Sequence[tuple[int, int]] = ()
    group: Group | None = None
    by_rows: bool = False
    is_flat: bool = False
    is_staged: bool = False
    source: int | None = None
    pieces: tuple[Sharding, ...] = ()
    before_write: Callable[[], None] | None = None
    aliases: list[weakref.ref[Tensor]] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def local(self) -> tuple[int, int]:
        """The first element of this rank's part, and how many it has."""
        return (0, self.numel) if self.group is None else self.ranges[self.group.rank]

    @property
    def local_shape(self) -> Shape:
        """The shape of this rank's part."""
        if self.pieces:
            return (sum(piece.local[1] for piece in self.pieces),)
        return self.local_shape_of(self.local[1])

    def local_shape_of(self, numel: int) -> Shape:
        """The shape of a part of so many elements."""
        if self.group is None:
            return self.shape
        if not self.by_rows or not self.shape:
            return (numel,)
        row = math.prod(self.shape[1:])
        return (numel // row if row else 0, *self.shape[1:])

    def is_like(self, other: Sharding) -> bool:
        """Whether all ranks hold the same elements of both."""
        if self is other:
            return True
        if self.pieces or other.pieces:
            return len(self.pieces) == len(other.pieces) and all(
                map(Sharding.is_like, self.pieces, other.pieces)
            )
        return (
            self.shape == other.shape
            and self.ranges == other.ranges
            and same_ranks(self.group, other.group)
        )

    def fresh(self) -> Sharding:
        """The same part of a tensor in memory of its own, which nobody else reads."""
        return replace(self, before_write=None, aliases=[])

    def flattened(self, shape: Shape) -> Sharding:
        """The same elements, viewed in another shape; the part has one dim."""
        return replace(self, shape=shape, by_rows=False)

    def rows_in(self, shape: Shape) -> Sharding:
        """The same rows of dim 0, of a tensor of another shape."""
        assert self.by_rows
        old, new = math.prod(self.shape[1:]), math.prod(shape[1:])
        ranges = tuple(
            (start // old * new, numel // old * new) if old else (0, 0)
            for start, numel in self.ranges
        )
        return replace(self.fresh(), shape=shape, ranges=ranges)

    def part_of(self, value: Tensor) -> Tensor:
        """This rank's part of a tensor of the whole shape."""
        if self.pieces:
            parts = value.reshape(-1).split([piece.numel for piece in self.pieces])
            taken = zip(self.pieces, parts, strict=True)
            return torch.cat([p.part_of(part.view(p.shape)).reshape(-1) for p, part in taken])
        start, numel = self.local
        return value.reshape(-1)[start : start + numel].view(self.local_shape)

    def split(self, local: Tensor) -> list[tuple[Sharding, Tensor]]:
        """This rank's parts of the tensors of which this is the concatenation."""
        if not self.pieces:
            return [(self, local)]
        parts = local.split([piece.local[1] for piece in self.pieces])
        return list(zip(self.pieces, parts, strict=True))

    def gather(self, local: Tensor) -> Tensor:
        """The whole tensor from the parts of all ranks. All ranks call it."""
        if self.pieces:
            parts = [piece.gather(part).view(-1) for piece, part in self.split(local)]
            return torch.cat(parts).view(self.shape)
        if self.group is None:
            return local
        sent = local.detach().reshape(-1).to(self.group.device)
        whole = sent.new_empty(self.numel)
        parts = whole.split([numel for _, numel in self.ranges])
        self.group.all_gather(parts, sent, label=f"{self.name}, which all ranks use")
        return whole.view(self.shape).to(local.device)

    def describe(self) -> str:
        """Which part of what this rank holds, for errors."""
        whose = f"rank {self.group.rank} holds " if self.group is not None else ""
        if self.pieces:
            return f"{self.name}, {whose}parts of {self.numel} elements"
        start, numel = self.local
        elements = f"elements {start} to {start + numel - 1}" if numel else "none"
        return f"{self.name!r} of unit {self.unit!r}, {whose}{elements} of {list(self.shape)}"


def same_ranks(group: Group | None, other: Group | None) -> bool:
    """Whether two groups have the same ranks."""
    if group is None or other is None:
        return group is other
    return group is other or group.ranks == other.ranks


class _SaysItIsAPart(PartOfATensor):
    """What the two classes have in common."""

    __slots__ = ()

    def describe_part(self) -> str:
        """Which part of what this rank holds, for errors."""
        return sharding_of(cast(Tensor, self)).describe()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if KeptGradient in types:
            return NotImplemented  # its own rules know what to do
        rule = RULES.get(func)
        if rule is call_plain and args:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        named = dict(kwargs or {})
        if rule is None:
            refuse(func, args, named)
        return rule(func, args or (named.pop(next(iter(named))),), named)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            f"{sharding_of(cast(Tensor, self)).describe()} cannot be pickled, copied by copy.copy "
            "or saved by torch.save: save model.state_dict(), which all ranks call, or ec.save; "
            "ec.local_shard(tensor).clone() is this rank's part"
        )


class ShardedTensor(_SaysItIsAPart, Tensor):
    """A tensor of which this rank holds a part: a gradient, or what was computed from parts.

    Attributes:
        uses_parameters: whether something was written into it that requires a gradient. Autograd
            does not record that, since it would refuse writes into gradients.
    """

    _sharding: Sharding
    uses_parameters = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return cast(Tensor, memo.setdefault(id(self), self.detach().clone()))


class KeptGradient(ShardedTensor):
    """What ``.grad`` is while gradients of this rank are kept that are not reduced yet.

    It has the facts of a gradient and no values: its memory is one element that is not a number.
    What is kept belongs to it, so whoever takes it off ``.grad`` drops that.

    Attributes:
        unsharded: the gradients that are kept, of the parameter or of each in a flat one; empty
            when they were taken.
        reduced: what ``.grad`` was before.
        is_lost: whether a backward took them and was aborted, so that it can only be dropped.
    """

    unsharded: list[Tensor | None]
    reduced: Tensor | None
    is_lost = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        rule, named = KEPT_RULES.get(func), dict(kwargs or {})
        if rule is None:
            kept = next(part for part in parts_in((args, named)) if isinstance(part, KeptGradient))
            refuse_kept(kept, f"{name_of(func)}()")
        return rule(func, args or (named.pop(next(iter(named))),), named)

    def hand_over(self) -> tuple[list[Tensor | None], Tensor | None]:
        """Return what is kept and what ``.grad`` was before, which this object forgets."""
        taken = self.unsharded, self.reduced
        self.unsharded, self.reduced = [], None
        return taken

    @property
    def kept_nbytes(self) -> int:
        """The bytes of what is kept."""
        return sum(gradient.nbytes for gradient in self.unsharded if gradient is not None)


def kept_gradient(
    like: Tensor, sharding: Sharding, unsharded: list[Tensor | None], reduced: Tensor | None
) -> KeptGradient:
    """Make a ``KeptGradient`` with the memory of ``like``."""
    kept: KeptGradient = Tensor._make_subclass(KeptGradient, like)
    kept._sharding, kept.unsharded, kept.reduced = sharding, unsharded, reduced
    return kept


def memory_of_gradient(gradient: Tensor) -> list[Tensor]:
    """The tensors with the values of a gradient: itself, or what is kept in its place."""
    if not isinstance(gradient, KeptGradient):
        return [gradient]
    return [held for held in (*gradient.unsharded, gradient.reduced) if held is not None]


class ShardedParameter(_SaysItIsAPart, nn.Parameter):
    """A parameter while it is shown as this rank's part of it."""

    @property
    def grad(self) -> Tensor | None:
        """As for any tensor; zero_grad() reads and drops each, so these two ask for no rule."""
        with DisableTorchFunctionSubclass():
            return grad_of(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            set_grad(self, value)
            return
        with DisableTorchFunctionSubclass():
            set_grad(self, None)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            copy = nn.Parameter(unmarked(self).detach().clone(), self.requires_grad)
            memo[id(self)] = show_as_part(copy, sharding_of(self).fresh())
        return cast(nn.Parameter, memo[id(self)])


# By parameter, whether it is shown as this rank's part or whole.
_shardings: WeakIdKeyDictionary = WeakIdKeyDictionary()


def register(param: nn.Parameter, sharding: Sharding) -> None:
    """Record of which parameter ``param`` is a part whenever its class is ShardedParameter."""
    _shardings[param] = sharding


def forget(param: nn.Parameter) -> None:
    """Record that ``param`` is a whole parameter for good."""
    _shardings.pop(param, None)


def show_as_part(param: nn.Parameter, sharding: Sharding) -> nn.Parameter:
    """Make ``param``, whose memory is a part, say so."""
    register(param, sharding)
    param.__class__ = ShardedParameter
    return param


def sharding_of(tensor: Tensor) -> Sharding:
    """Of which tensor this rank holds a part; ``tensor`` has one of the two classes."""
    if isinstance(tensor, ShardedTensor):
        return tensor._sharding
    return cast(Sharding, _shardings[tensor])


def whole_shape(tensor: Tensor) -> Shape:
    """The shape of a tensor, of a part that of the whole."""
    return sharding_of(tensor).shape if is_part(tensor) else tuple(tensor.shape)


def is_part(tensor: object) -> bool:
    """Whether ``tensor`` says that it is a part."""
    return isinstance(tensor, _SaysItIsAPart)


def mark(tensor: Tensor, sharding: Sharding) -> ShardedTensor:
    """The same memory, as a part."""
    plain = unmarked(tensor)
    if plain.requires_grad:
        marked = plain.as_subclass(ShardedTensor)
    else:  # as_subclass would make a view, on which ``detach_()`` is refused
        marked = cast(ShardedTensor, plain.detach())
        marked.__class__ = ShardedTensor
    marked._sharding = sharding
    return marked


def unmarked(tensor: Tensor) -> Tensor:
    """The same memory as a plain tensor."""
    if type(tensor) is Tensor:
        return tensor
    if isinstance(tensor, KeptGradient):
        refuse_kept(tensor, "reading the values")
    with DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded parameter or gradient, as a plain tensor on the same memory.

    Its shape is that of the part: 1D with ``layout="flat"``, rows with ``"rows"``. A tensor that is
    not sharded is returned whole. A write into the part of a parameter is seen by all ranks
    in the next forward; where an evaluation came before that no reduction has followed, call
    ``model.await_readers()`` first.

    Example:
        >>> local_shard(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """
    with DisableTorchFunctionSubclass():
        return unmarked(tensor).detach() if is_part(tensor) else tensor.detach()


def remember_alias(sharding: Sharding, alias: Tensor) -> None:
    """Note that a user may keep ``alias``, which has the memory of a part."""
    aliases = sharding.aliases
    if len(aliases) >= _MAX_ALIASES:
        aliases[:] = [kept for kept in aliases if kept() is not None]
    aliases.append(weakref.ref(alias))


def part_aliases(sharding: Sharding, shard: Tensor) -> None:
    """Give what users have kept of ``shard`` memory of its own, before it is overwritten."""
    kept, sharding.aliases[:] = [alias() for alias in sharding.aliases], []
    address = shard.data_ptr()
    with DisableTorchFunctionSubclass(), torch.no_grad():
        for alias in kept:
            if alias is not None and alias.data_ptr() == address:
                alias.data = alias.detach().clone()


def call_plain(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch on the parts themselves."""
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


# Refusals ------------------------------------------------------------------------------------


def name_of(func: Callable[..., Any]) -> str:
    """What users call a function of torch; for an attribute the name of the attribute."""
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    return str(getattr(owner, "__name__", name)) if name in ("__get__", "__set__") else name


def parts_in(values: Any) -> list[Tensor]:
    """The parts in the arguments of a call."""
    return [tensor for tensor in tensors_in(values) if is_part(tensor)]


def refuse_kept(gradient: KeptGradient, what: str) -> NoReturn:
    """Raise the error for a use of a gradient that has no values yet, or never again."""
    if gradient.is_lost:
        raise StateError(
            f"{what} of the gradient of {sharding_of(gradient).describe()}: a backward that raised "
            "had taken the gradients that no_sync() had kept, to reduce them with its own, so "
            "they are lost. Call zero_grad() and repeat the backwards of this step"
        )
    raise StateError(
        f"{what} of the gradient of {sharding_of(gradient).describe()}: backwards under no_sync() "
        "have kept gradients of this rank's rows that are not reduced yet, so .grad has no values. "
        "Reduce them first, by sync_gradients() or a backward outside of no_sync() (in a pipeline "
        "by a step() that finalizes), and scale the loss in place of .grad; zero_grad() drops them"
    )


def refuse(
    func: Callable[..., Any], args: Any, kwargs: Any, why: str = "needs the whole tensor"
) -> NoReturn:
    """Raise the error for a use of a part that cannot mean the whole."""
    sharding = sharding_of(parts_in((args, kwargs))[0])
    raise StateError(
        f"{name_of(func)}() {why}, and its argument is sharded: {sharding.describe()}. Use a "
        "parameter inside of the forward of its unit, which is the module that the model calls (a "
        "module that it never calls shall be no unit), or inside `with model.full_parameters():` "
        "(writeback=True to change it), which all ranks enter; initialise with model.apply(fn); "
        "ec.local_shard(tensor) is this rank's part"
    )
