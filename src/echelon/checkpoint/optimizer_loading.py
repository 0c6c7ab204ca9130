"""The state of an optimizer from a checkpoint, in memory that is filled when tensors are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from math import prod
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.checkpoint.load_plan import LoadPlan, ReadItem
from echelon.checkpoint.optimizers import TensorFacts, number_of, ranges_of, renamed, state_name
from echelon.checkpoint.sections import Json
from echelon.checkpoint.tensors import is_ordinary
from echelon.errors import CheckpointError
from echelon.modules.sharded_tensor import is_part, local_shard
from echelon.state.optimizer_state import (
    group_options,
    groups_with,
    install_states,
    matches,
    names_by_group,
)
from echelon.state.sharded_state import ShardsByParam
from echelon.state.tensor_shard import TensorShard
from echelon.values.decoding import decode
from echelon.values.value_types import DTYPES

_LEFT_OUT: Final = object()  # in the place of a state that does not fit; None is a value


@final
class OptimizerLoader:
    """Loads the state of one optimizer from a step.

    Law: a parameter gets all of its saved state or none of it, unless the optimizer has a state of
    that shape already, of which then only the ranges that fit are read.

    Args:
        name: in the checkpoint.
        section: the facts that were saved.
        shards: the ranges of all parameters.
        plan: takes note of the tensors to read.

    Attributes:
        found: for each group, the indices of the saved ones that have parameters of this rank in
            it.
    """

    @torch.inference_mode(mode=False)  # Later steps write into the memory that is made here.
    def __init__(
        self, name: str, optimizer: Optimizer, section: Json, shards: ShardsByParam, plan: LoadPlan
    ) -> None:
        self._name, self._optimizer, self._plan = name, optimizer, plan
        self._section = section
        ranges = ranges_of(name, optimizer, shards)
        self._is_other = self._differs_in_class()
        self.found = self._find(ranges)
        self._options: list[dict[str, Any]] = []
        self._saved_options = [
            {
                key: number_of(value, f"{plan.path}: {name}.param_groups[{i}].{key}")
                for key, value in group["options"].items()
            }
            for i, group in enumerate(section["groups"])
        ]
        self._states: dict[nn.Parameter, dict[str, Any]] = {}
        self._converted: set[nn.Parameter] = set()
        self._before: dict[str, Any] | None = None
        for param, members in ranges.items():
            if members and not self._is_other:
                state = self._state_of(param, members)
                if state is not None:
                    self._states[param] = state
                if any(self._is_converted(shard) for shard in members):
                    self._converted.add(param)

    def match(self, by_rank: Sequence[Sequence[Sequence[int]]]) -> dict[str, str]:
        """Choose the saved options of each group, alike on all ranks.

        Args:
            by_rank: what each rank has ``found``.

        Returns:
            By name, why groups do not fit; they keep their own options.
        """
        if self._is_other:
            return {}
        found = [{*chain(*indices)} for indices in zip_longest(*by_rank, fillvalue=())]
        num_saved = len(self._saved_options)
        chosen = matches(found, num_saved)
        self._options = [  # another rank may have more groups
            {**group_options(group), **({} if match is None else self._saved_options[match])}
            for group, match in zip(self._optimizer.param_groups, chosen, strict=False)
        ]
        where = f"{self._name}.param_groups"
        differing = {
            f"{where}[{i}]": "no group of the checkpoint has its parameters and no others"
            for i, match in enumerate(chosen)
            if match is None
        }
        if len(chosen) != num_saved:
            differing[where] = f"saved as a list of {num_saved}, here of {len(chosen)}"
        return differing

    @torch.inference_mode(mode=False)
    def install(self) -> None:
        """Give the optimizer its options and states, whose new memory has been filled before.

        Raises:
            CheckpointError: the optimizer does not take them.
        """
        if self._is_other:
            return
        self._before = dict(vars(self._optimizer))
        try:
            self._install()
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._name} does not take its state: {error!r:.200}", self._plan.path
            ) from error

    def undo(self) -> None:
        """Restore what the optimizer had before ``install``, which replaces and never mutates."""
        if self._before is not None:
            vars(self._optimizer).clear()
            vars(self._optimizer).update(self._before)

    def _install(self) -> None:
        where = f"{self._plan.path}: {self._name}.state_dict()"
        extra: Any = decode(self._section.get("extra", {}), {}, where)
        install_states(self._optimizer, self._states, self._options, extra)
        for param, state in self._states.items():  # torch casts to the dtype of the parameter
            if param in self._converted:
                continue  # which has been converted itself
            installed = self._optimizer.state[param]
            for key, value in state.items():
                if isinstance(value, Tensor):
                    cast = installed.get(key)
                    is_number = isinstance(cast, Tensor) and not value.dim()
                    installed[key] = value.to(cast.device) if is_number else value

    def _differs_in_class(self) -> bool:
        """Note it if another optimizer was saved, of which this one takes nothing.

        Adam and AdamW take each other's state.
        """
        here, saved = type(self._optimizer).__name__, self._section.get("class")
        options = {key for group in self._optimizer.param_groups for key in group_options(group)}
        saved_options = {key for group in self._section["groups"] for key in group["options"]}
        if saved not in (None, here) and saved_options and saved_options != options:
            self._plan.differing[self._name] = f"saved from {saved}, here {here}"
            return True
        return False

    def _is_converted(self, shard: TensorShard) -> bool:
        """Whether a parameter was saved in another dtype than it has here."""
        saved = self._plan.find(shard.names)
        return saved is not None and DTYPES[saved.dtype] != shard.values.dtype

    def _find(self, ranges: ShardsByParam) -> list[list[int]]:
        """Note which parameters the step has, and find the saved groups that have them."""
        by_group = names_by_group(self._optimizer, ranges)
        names = {name for members in by_group for name in members}
        known = {param for group in self._section["groups"] for param in group["params"]}
        self._plan.used |= {f"{self._name}/{name}" for name in names & known}
        self._plan.missing += [f"{self._name}/{name}" for name in sorted(names - known)]
        return [sorted(indices) for indices in groups_with(by_group, self._section["groups"])]

    def _state_of(
        self, param: nn.Parameter, members: Sequence[TensorShard]
    ) -> dict[str, Any] | None:
        """The state of a parameter with its members; None if the step has none that fits."""
        first = self._entries(members[0].name)
        for shard in members[1:]:
            if self._entries(shard.name) != first:
                self._leave_out(
                    members,
                    f"its state differs from that of {shard.name!r}, and both are one flat "
                    "parameter here, which has one state: wrap with use_orig_params=True",
                )
                return None
        if first is None:
            return None
        state = {key: self._value(param, members, key, facts) for key, facts in first.items()}
        if all(value is not _LEFT_OUT for value in state.values()):
            return state
        if len(members) > 1:
            self._leave_out(
                members,
                "it is part of a flat parameter, which gets no state because that of another "
                "part does not fit: wrap with use_orig_params=True",
            )
        return None

    def _leave_out(self, members: Sequence[TensorShard], problem: str) -> None:
        self._plan.differing[f"{self._name}/{members[0].name}"] = problem

    def _entries(self, param: str) -> Mapping[str, Json] | None:
        """What the section says of the states of a parameter, by key; None if it has none."""
        states = self._section["state"]
        by_rank = states["by_rank"].get(param)
        if by_rank is not None and not self._plan.same_size:
            self._plan.not_restored.append(f"{self._name}/{param}")
            by_rank = None
        entries: Mapping[str, Json] | None
        entries = states["values"].get(param) if by_rank is None else by_rank[self._plan.rank]
        return entries

    def _value(
        self, param: nn.Parameter, members: Sequence[TensorShard], key: str, facts: Json
    ) -> Any:
        """A state, with memory that is read later if it is a tensor with dims."""
        tensor = TensorFacts.of(facts)
        if tensor is None:
            return number_of(facts, f"{self._plan.path}: {self._name}.state.{key}")
        if not tensor.per_element:
            return self._value_of_other_shape(param, members[0], key, tensor.dtype)
        sources = [
            self._plan.match(renamed(shard, self._name, key), tensor.dtype) for shard in members
        ]
        live = self._optimizer.state.get(param, {}).get(key)
        live = local_shard(live) if is_part(live) else live  # as of a state made with the optimizer
        is_live = (
            isinstance(live, Tensor)
            and (live.shape, live.dtype) == (local_shard(param).shape, tensor.dtype)
            and is_ordinary(live)
        )
        if is_live:
            values = live.detach()
        elif None in sources:
            return _LEFT_OUT
        else:
            self._plan.count_new_memory(
                sum(shard.numel for shard in members) * tensor.dtype.itemsize
            )
            values = torch.empty_like(local_shard(param), dtype=tensor.dtype)
        items = self._plan.in_place if is_live else self._plan.new
        parts = [values]
        if len(members) > 1:
            parts = list(values.view(-1).split([shard.numel for shard in members]))
        for shard, saved, part in zip(members, sources, parts, strict=True):
            if saved is not None:
                items.append(ReadItem(saved, shard.start, part))
        return values

    def _value_of_other_shape(
        self, param: nn.Parameter, shard: TensorShard, key: str, dtype: torch.dtype
    ) -> Any:
        """Memory for a state that is not shaped like its parameter, which is read later."""
        name = state_name(self._name, shard.name, key)
        saved, saved_param = self._plan.find([name]), self._plan.find(shard.names)
        problem = None
        if saved is None:
            problem = "is not in the checkpoint"
        elif not shard.is_whole:
            problem = "cannot be cut"
        elif saved_param is not None and saved_param.shape != shard.shape:
            problem = f"is of a parameter saved as {list(saved_param.shape)}"
        if saved is None or problem is not None:
            self._plan.differing[name] = str(problem)
            return _LEFT_OUT
        source = self._plan.match(replace(shard, names=(name,), shape=saved.shape), dtype)
        if source is None:
            return _LEFT_OUT
        self._plan.count_new_memory(prod(saved.shape) * dtype.itemsize)
        values = torch.empty(saved.shape, dtype=dtype, device=param.device)
        self._plan.new.append(ReadItem(source, 0, values))
        return values
