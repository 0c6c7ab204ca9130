"""Which parameters of a module a wrapper reduces, and what may change in them afterwards.

``ignored_parameters`` are those that a wrapper leaves alone. ``claim`` records the wrapper of the
others. ``ModuleSnapshot`` knows whether the module has the parameters that it had,
``ParameterGuard`` refuses others, and ``TrainableParameters`` detects that the ranks have frozen
different ones.

[Note: when freezing is compared]
A rank does not know whether the others have frozen and unfrozen the same parameters, and a
collective that only some ranks issue would hang. So each rank adds a flag for its own changes to
something that all ranks reduce anyway: DDP to the last bucket, FSDP to the list of used parameters.
All ranks read the same answer, and compare names if it is not zero.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, final

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from echelon.comm.agreement import ObjectGatherer, compare
from echelon.comm.streams import StreamEvent, device_of
from echelon.errors import ArgumentError, StateError
from echelon.modules.compiled import plain_name

_requires_grad = attrgetter("requires_grad")

# Which parameters are left out -----------------------------------------------------------------


def ignored_parameters(
    module: nn.Module, ignored: Sequence[nn.Module | nn.Parameter]
) -> list[nn.Parameter]:
    """The parameters that the wrapper neither reduces nor shards.

    Raises ArgumentError if an item is not in the model, or if an ignored module shares a parameter
    with one that is not ignored.
    """
    if not isinstance(ignored, Iterable):
        raise ArgumentError(f"ignored is {ignored!r:.80}; give a list of modules and parameters")
    ignored = list(ignored)  # an iterator could be read only once
    params = dict.fromkeys(module.parameters())
    modules = set(module.modules())
    skip: dict[nn.Parameter, None] = {}
    inside: set[nn.Module] = set()
    for item in ignored:
        if isinstance(item, nn.Parameter) and item in params:
            skip[item] = None
        elif isinstance(item, nn.Module) and item in modules:
            inside.update(item.modules())
            skip.update(dict.fromkeys(item.parameters()))
        else:
            raise ArgumentError(f"ignored has {item!r:.80}, which is not in the model")
    for name, submodule in module.named_modules():
        if submodule in inside:
            continue
        for local, param in submodule._parameters.items():
            if param in skip and not any(param is item for item in ignored):
                raise ArgumentError(
                    f"parameter {local!r} of module {name!r} is shared with an ignored module: "
                    "ignore both, or neither"
                )
    return list(skip)


# Which wrapper reduces a parameter: a second one would reduce its gradient again ---------------

# By parameter, weakly: the name of its wrapper, and a function that tells whether that is alive.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def claim(params: Iterable[nn.Parameter], owner: nn.Module, *, outlives_owner: bool) -> None:
    """Record that ``owner`` reduces ``params``.

    With ``outlives_owner`` that holds after ``owner`` is dropped, too: they are shards then.
    """
    reference = weakref.ref(owner)

    def is_alive() -> bool:
        return outlives_owner or reference() is not None

    for param in params:
        _owners[param] = type(owner).__name__, is_alive


def disclaim(params: Iterable[nn.Parameter]) -> None:
    """Record that no wrapper reduces ``params``."""
    for param in params:
        _owners.pop(param, None)


def _owner_of(param: nn.Parameter) -> str | None:
    """The name of the wrapper that reduces ``param``; None without one."""
    name, is_alive = _owners.get(param, ("", lambda: False))
    return name if is_alive() else None


def is_claimed(param: nn.Parameter) -> bool:
    """Whether a wrapper reduces the gradient of ``param``."""
    return _owner_of(param) is not None


def check_not_wrapped(module: nn.Module) -> None:
    """Raise an ArgumentError if a wrapper reduces a parameter of the module already."""
    for name, param in module.named_parameters():
        owner = _owner_of(param)
        if owner is not None:
            raise ArgumentError(
                f"parameter {name!r} belongs to {owner} already: wrap the plain module once (a DDP "
                "is taken off by unwrap(); what FSDP gathers together is said with units=...)"
            )


# What may change after wrapping ----------------------------------------------------------------


@final
class ModuleSnapshot:
    """What a module consisted of, to find out fast whether that has changed.

    It is asked in every step, so it compares flat lists, with hardly any Python for each item.
    Dynamo traces it as a part of the forward of ``DDP``.

    Attributes:
        params: the parameters of the module, when the snapshot was taken.
    """

    def __init__(self, module: nn.Module) -> None:
        self.take(module)

    def take(self, module: nn.Module) -> None:
        """Remember what the module consists of now; it does not keep the module itself alive."""
        tables: list[dict[str, Any]] = [
            table for m in module.modules() for table in (m._parameters, m._modules)
        ]
        self._tables, self._names = tables, list(map(list, tables))
        self._items = [item for table in tables for item in table.values()]
        self.params = list(module.parameters())
        self._dtypes = [param.dtype for param in self.params]
        self._trained = [param.requires_grad for param in self.params]

    def is_current(self) -> bool:
        """Whether the module has the same parameters, of the same dtypes, and trains the same."""
        items = chain.from_iterable(map(dict.values, self._tables))
        return (
            list(map(list, self._tables)) == self._names
            and all(map(is_, items, self._items))
            and [param.dtype for param in self.params] == self._dtypes
            and [param.requires_grad for param in self.params] == self._trained
        )


@final
class ParameterGuard:
    """Detects that a wrapped module has other parameters, whose gradients would not be reduced.

    It checks at every forward, and walks the module only if something has changed. ``owner`` is the
    name of the wrapper. With ``keeps_names``, a parameter under another name is refused, as in a
    module that was pruned or parametrized after it was sharded.
    """

    def __init__(self, module: nn.Module, owner: str, *, keeps_names: bool = False) -> None:
        self._module, self._owner = module, owner
        self._names = {param: plain_name(name) for name, param in module.named_parameters()}
        self._keeps_names = keeps_names
        self._known = {param: (param.dtype, param.requires_grad) for param in module.parameters()}
        self._snapshot = ModuleSnapshot(module)

    def check(self) -> None:
        """Raise a StateError if a parameter was added, replaced, converted or unfrozen."""
        if self._snapshot.is_current():
            return
        for name, param in self._module.named_parameters():
            self._check_parameter(name, param)
        self._snapshot.take(self._module)  # only harmless changes, such as a frozen parameter

    def _check_parameter(self, name: str, param: nn.Parameter) -> None:
        dtype, was_trainable = self._known.get(param, (param.dtype, None))
        before = self._names.get(param)
        if self._keeps_names and before not in (None, plain_name(name)):
            raise StateError(
                f"parameter {before!r} became {name!r} after {self._owner} wrapped the model, as "
                "prune, spectral_norm and parametrizations do, and what they made was made from "
                "this rank's part: change the model first and wrap it then"
            )
        problem, remedy = None, "change the model first and wrap it then"
        if was_trainable is None and param.requires_grad and not isinstance(param, nn.Parameter):
            problem = "was exchanged for another tensor, as torch.func.functional_call does,"
            remedy = (
                "give functional_call the module inside of a DDP (model.module), whose gradients "
                "are then of this rank alone, or the model before it is sharded"
            )
        elif was_trainable is None and param.requires_grad:
            problem = "was added or replaced"
        elif param.dtype is not dtype:
            problem = f"was converted from {dtype} to {param.dtype}"
        elif was_trainable is False and param.requires_grad:
            problem = "was frozen, and unfrozen"
            remedy = (
                "wrap the model while everything that is ever trained requires a gradient, and "
                "freeze it then; that, and to unfreeze it again, is allowed between any two steps"
            )
        if problem is not None:
            raise StateError(
                f"parameter {name!r} {problem} after {self._owner} wrapped the model, so its "
                f"gradient would not be reduced: {remedy}"
            )


@final
class LateAnswer:
    """A number that ranks have reduced on their device, read when all of them read it.

    What follows from it may be a collective. So the kind of device decides when it is read, and not
    whether this rank's device is ready.
    """

    def __init__(self) -> None:
        self._copy: tuple[Tensor, StreamEvent] | None = None
        self._waits = False

    def take(self, answer: Tensor) -> None:
        """Begin to copy it to the host."""
        device = device_of(answer.device)
        host = device.host_memory(1, answer.dtype)
        host.copy_(answer, non_blocking=True)
        self._copy = host, device.current_stream().record_event()
        self._waits = device.reading_waits

    def is_yes(self, *, at_once: bool = True) -> bool:
        """Whether it is not zero, once; unless ``at_once``, False where reading it would wait."""
        if self._copy is None or (self._waits and not at_once):
            return False
        answer, event = self._copy
        self._copy = None
        event.synchronize()
        return bool(answer)


@final
class TrainableParameters:
    """Which parameters of a model require gradients, as its ranks have last agreed.

    Attributes:
        answer: the reduced ``changed`` of all ranks, zero if no rank has.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], ranks: ObjectGatherer) -> None:
        self._names = [name for name, _ in named]
        self._params = [param for _, param in named]
        self._ranks = ranks
        self._agreed = self._now()
        self.answer = LateAnswer()

    def _now(self) -> list[bool]:
        return list(map(_requires_grad, self._params))

    def changed(self) -> bool:
        """Whether this rank has frozen or unfrozen a parameter since the ranks agreed."""
        return self._now() != self._agreed

    def compare(self, *, at_once: bool, has_batch: bool = True) -> None:
        """Compare with the other ranks, if a rank has changed. All ranks call it.

        Without ``at_once`` a later call compares on devices where reading the answer waits. A rank
        without a batch (``has_batch``) takes over what the others have. A difference is a
        ModelMismatch on every rank, which names the parameter.
        """
        if not self.answer.is_yes(at_once=at_once):
            return
        frozen = [n for n, trained in zip(self._names, self._now(), strict=True) if not trained]
        by_rank = self._ranks.all_gather_object(frozen if has_batch else None)
        usual = next(names for names in by_rank if names is not None)
        frozen_names = set(usual)
        self._agreed = [name not in frozen_names for name in self._names]
        compare(
            "whether they train parameter",
            [self._facts(usual if names is None else names) for names in by_rank],
            "Freeze and unfreeze the same parameters on every rank.",
        )

    def _facts(self, frozen: Sequence[str]) -> dict[str, str]:
        names = set(frozen)
        return {name: "frozen" if name in names else "trained" for name in self._names}
