"""The part of ``Pipeline`` that does not train: its parameters and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import methodcaller
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from echelon.checks import flag, instance, mapping
from echelon.comm.group import Group
from echelon.errors import ArgumentError, StateError, UnsupportedError
from echelon.modules.compiled import keep_plain_names
from echelon.modules.optimizer_trial import Cut
from echelon.modules.parameters import ModuleSnapshot
from echelon.modules.partial_steps import refuse_other_steps
from echelon.pipeline.shared_parameters import shared_parameters
from echelon.pipeline.stage_memory import StageMemoryStats, memory_of_stages
from echelon.pipeline.stage_state import (
    StageShards,
    full_state,
    gather_optimizer_state,
    load_sharded_state,
    name_in_model,
    names_on_all_ranks,
    names_that_fit,
    parameter_name,
    sharded_state,
    shards_by_param,
    stage_parameters,
    state_in_stage,
)
from echelon.state.optimizer_state import check_params, load_optimizer_state
from echelon.state.sharded_state import HasShards, ParameterShards, ShardedState, ShardsByParam

_T = TypeVar("_T", bound=Tensor)


class StagedModule(nn.Module, HasShards):
    """Some stages of a model, with names of the whole model; ``Pipeline`` trains them.

    Attributes:
        stages: the stages of this rank, by number.
    """

    stages: nn.ModuleDict
    _nothing_to_train: nn.Parameter | None = None

    def _attach(
        self,
        modules: Mapping[int, nn.Module],
        stages: Sequence[nn.Module | None],
        placement: Sequence[int],
        group: Group,
        replicate: Group | None,
        num_ranks: int,
    ) -> None:
        for stage in modules.values():
            keep_plain_names(stage)
            if group.size > 1:
                what = "a Pipeline gives each rank its stages"
                refuse_other_steps(stage.parameters(), what, Cut.PARAMETERS, owner=self)
        self.stages = nn.ModuleDict({str(index): stage for index, stage in modules.items()})
        self._first_names = _first_names(stages)
        self._placement, self._group = placement, group
        self._shards = StageShards(modules, stages, group, replicate, num_ranks)
        self._snapshot = ModuleSnapshot(self)
        names = [self._name_of(key) for key in super().state_dict(keep_vars=True)]
        self._names_of_all = frozenset(chain.from_iterable(group.all_gather_object(names)))

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        """Keep a value; a module beside the stages, such as a loss, is no part of the model.

        Raises:
            ArgumentError: the loss has parameters to train, which belong to no stage.
            UnsupportedError: something with a state, which would be in no state of the model.
        """
        if name == "stages":
            super().__setattr__(name, value)
            return
        if not name.startswith("_") and _has_state(value):
            raise _no_state(name)
        if isinstance(value, nn.Module) and any(p.requires_grad for p in value.parameters()):
            raise ArgumentError(
                f"{name.removeprefix('_')} is a {type(value).__name__} with parameters to train, "
                "and a Pipeline trains and saves those of its stages only: make them parameters of "
                "the last stage, which gives them to the loss with its output, or freeze them by "
                "requires_grad_(False)"
            )
        object.__setattr__(self, name, value)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Refused: the state of a Pipeline is that of its stages."""
        raise _no_state(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refused, as ``register_buffer``."""
        raise _no_state(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refused, as ``register_buffer``."""
        raise _no_state(name)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages for an optimizer, such as flat parameters.

        They have the names of the whole model; a parameter that several stages share has its first.
        A rank that has nothing to train has one more, ``nothing_to_train``, which has no elements
        and never a gradient: no optimizer of torch takes an empty list. It has no place in states.
        """
        if not recurse:
            return
        start, trains = f"{prefix}." if prefix else "", False
        members = methodcaller("named_parameters", "", True, remove_duplicate)
        for name, param in self._named(members, parameter_name, remove_duplicate):
            trains |= param.requires_grad
            yield start + self._first_names.get(name, name), param
        if self._group.size > 1 and not trains:
            if self._nothing_to_train is None:
                self._nothing_to_train = nn.Parameter(torch.empty(0, device=self._group.device))
            yield f"{start}nothing_to_train", self._nothing_to_train

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this rank's stages, with the names of the whole model."""
        start = f"{prefix}." if prefix else ""
        members = methodcaller("named_buffers", "", True, remove_duplicate)
        for name, buffer in (
            self._named(members, name_in_model, remove_duplicate) if recurse else ()
        ):
            yield start + name, buffer

    def _named(
        self,
        members: Callable[[nn.Module], Iterator[tuple[str, _T]]],
        name_of: Callable[[nn.Module, int, str], str],
        remove_duplicate: bool,
    ) -> Iterator[tuple[str, _T]]:
        """Members of this rank's stages, each once, with the names that ``name_of`` makes."""
        seen: set[_T] = set()
        for index, stage in self.stages.items():
            for name, member in members(stage):
                if not (remove_duplicate and member in seen):
                    seen.add(member)
                    yield name_of(stage, int(index), name), member

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of this rank's stages, with the names of the whole model.

        These are the names of the model if ``ec.pipeline.split`` made the stages, and otherwise
        those of ``nn.Sequential(*stages)``.
        """
        state = super().state_dict(*args, **kwargs)
        for key in list(state):
            state[self._name_of(key)] = state.pop(key)
        versions = getattr(state, "_metadata", {})
        for path in [path for path in versions if path.startswith("stages.")]:
            versions[self._name_of(f"{path}.").rstrip(".")] = versions.pop(path)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load this rank's stages from their state, or from a state of the whole model.

        Raises:
            ArgumentError: with ``strict``, a key is missing or belongs to no stage of any rank.
        """
        mapping("state_dict", state_dict)
        names, report = names_that_fit(
            self._local_modules,
            state_dict,
            "the state dict",
            of_others=self._names_of_all,
            strict=strict,
        )
        for index, stage in self._local_modules.items():
            local_state = state_in_stage(stage, index, state_dict, names[index])
            stage.load_state_dict(local_state, strict=False, assign=assign)
        return report

    def whole_state_dict(self, rank0_only: bool = False, cpu: bool = True) -> dict[str, Any]:
        """Copies of the state of the whole model, with its names. All ranks call it.

        Args:
            rank0_only: whether other ranks of the pipeline get an empty dict; they hold one stage
                at a time.
            cpu: whether the copies are in the memory of the host instead of on the device.

        Raises:
            ArgumentError: an argument is not a bool.
        """
        flag("rank0_only", rank0_only)
        flag("cpu", cpu)
        self._group.barrier(label="whole_state_dict(), which all ranks call")
        keep = self._group.rank == 0 or not rank0_only
        device = torch.device("cpu") if cpu else None
        return full_state(
            self._local_modules, self._placement, self._group, keep=keep, device=device
        )

    def sharded_state_dict(self) -> dict[str, Any]:
        """Copies of what this rank keeps of its stages, with the names of the whole model.

        Nothing is communicated. An ``FSDP`` stage is what its ``sharded_state_dict`` returns; all
        other stages are complete.
        """
        return sharded_state(self._local_modules)

    def load_sharded_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load what ``sharded_state_dict`` returned on this rank. Nothing is communicated.

        Raises:
            ArgumentError: keys (if ``strict``), sizes or dtypes do not fit.
        """
        return load_sharded_state(self._local_modules, state, strict=strict)

    def holdings(self) -> ShardedState:
        """The shards of the plain model that this rank holds, by its names. Does not communicate.

        Each rank that has a shared parameter holds it once, under all its names.
        """
        state = self._shards.holdings()
        return replace(state, params={**state.params, **self._placeholder})

    def parameter_shards(self) -> tuple[ParameterShards, ...]:
        """The shards of the parameters of this rank's stages. Does not communicate."""
        of_stages = stage_parameters(self._local_modules, self._first_names)
        return (*of_stages, ParameterShards(by_param=self._placeholder))

    def shared_over(self) -> tuple[Group, ...]:
        """The ranks of the pipeline, and the groups over which stages are replicated or sharded."""
        return self._shards.axes

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole state of ``optimizer`` by the names of the whole model. All ranks call it.

        It is that of an optimizer over the plain model:
        ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}``.

        Raises:
            ArgumentError: the optimizer has the state of a parameter that is in no stage here.
            StateError: the optimizers of the ranks hold different states or groups.
        """
        shards = self.parameter_shards()
        check_params(optimizer, shards_by_param(shards), exact=False)
        self._group.barrier(label="optimizer_state_dict(), which all ranks call")
        return gather_optimizer_state(optimizer, shards, self._group)

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load a whole state by name; every rank takes its share. All ranks call it.

        Raises:
            ArgumentError: names, groups or shapes do not fit; nothing was loaded.
            StateError: the optimizers of the ranks have different groups.
        """
        by_param = shards_by_param(self.parameter_shards())
        check_params(optimizer, by_param, exact=False)
        names = names_on_all_ranks(optimizer, by_param, self._group)
        load_optimizer_state(optimizer, by_param, state, names)

    def memory_stats(self, optimizer: torch.optim.Optimizer | None = None) -> StageMemoryStats:
        """The bytes that this rank holds for its stages, by category. Does not communicate.

        Args:
            optimizer: to weigh its state too.
        """
        instance("optimizer", optimizer, torch.optim.Optimizer, or_none=True)
        return memory_of_stages(self._local_modules, optimizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise StateError(
            "a Pipeline holds a group of running ranks and what its stages exchange, so it cannot "
            "be copied: copy the stages before you make the Pipeline, or make another one and give "
            "it the state: other.load_state_dict(pipe.state_dict()). To average its parameters, "
            "use ec.EMA(pipe)"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise StateError(
            "a Pipeline holds a group of running ranks, so it cannot be pickled, saved or sent: "
            "save with ec.save, or what whole_state_dict() returns, which all ranks call"
        )

    def _local_params(self) -> Sequence[nn.Parameter]:
        """The parameters of this rank's stages; to walk the modules in each step takes longer."""
        if not self._snapshot.is_current():
            self._snapshot.take(self)
        return self._snapshot.params

    @property
    def _placeholder(self) -> ShardsByParam:
        """What an optimizer may have besides parameters of stages: it is no range of the model."""
        return {} if self._nothing_to_train is None else {self._nothing_to_train: ()}

    @property
    def _local_modules(self) -> dict[int, nn.Module]:
        return {int(index): stage for index, stage in self.stages.items()}

    def _name_of(self, key: str) -> str:
        """The name in the whole model of what is called ``key`` here: ``stages.INDEX.REST``."""
        _, index, rest = key.split(".", 2)
        return name_in_model(self.stages[index], int(index), rest)


def _has_state(value: object) -> bool:
    if isinstance(value, nn.Module):
        return bool(value.state_dict())
    return isinstance(value, nn.Parameter | nn.Buffer)


def _no_state(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name!r} would be in no state of the Pipeline, which is that of its stages: register it "
        "in a stage before you make the Pipeline"
    )


def _first_names(stages: Sequence[nn.Module | None]) -> dict[str, str]:
    """The first name of each shared parameter, by each of its other names."""
    first_names: dict[str, str] = {}
    for names in shared_parameters(stages).values():
        first, *others = [
            name_in_model(stage, index, name)
            for index, name in names.items()
            if (stage := stages[index]) is not None
        ]
        first_names |= dict.fromkeys(others, first)
    return first_names
