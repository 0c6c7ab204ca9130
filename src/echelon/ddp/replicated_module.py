"""A module of which each rank keeps a copy: its state, its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon import checks
from echelon.comm.group import Group
from echelon.ddp.options import DDPOptions
from echelon.ddp.reducer import Reducer
from echelon.ddp.replicas import TrackedBuffers, replicated_state
from echelon.errors import StateError
from echelon.modules.wrapper import Wrapper, no_assign
from echelon.state.model_state import copy_of, state_of_copies
from echelon.state.optimizer_state import HasOptimizerState, state_nbytes
from echelon.state.sharded_state import ParameterShards, ShardedState, parameter_shards_in


@dataclass(frozen=True, slots=True)
class DDPMemoryStats:
    """The bytes that this rank holds for a replicated model, on the device of the group.

    Attributes:
        parameters: the whole parameters.
        buffers: the buffers of the module.
        buckets: what gradients travel in; reduced gradients are views of it.
        gradients: gradients that are in memory of their own.
        optimizer: the state of the optimizer, or None if none was given.
    """

    parameters: int
    buffers: int
    buckets: int
    gradients: int
    optimizer: int | None

    @property
    def current(self) -> int:
        """All of them together."""
        return sum(self.by_category().values())

    def by_category(self) -> dict[str, int]:
        """The bytes by name, for a drawing; ``optimizer`` only where it is known."""
        nbytes = {
            "parameters": self.parameters,
            "buffers": self.buffers,
            "buckets": self.buckets,
            "gradients": self.gradients,
        }
        return nbytes if self.optimizer is None else {**nbytes, "optimizer": self.optimizer}


class ReplicatedModule(Wrapper, HasOptimizerState):
    """What a replicated model is when it does not train; ``DDP`` makes it and trains it."""

    _group: Group
    _options: DDPOptions
    _reducer: Reducer
    _tracked_buffers: TrackedBuffers
    _attached: bool

    def _check_attached(self) -> None:
        if not self._attached:
            raise StateError("this DDP was taken off its module by unwrap(): wrap the module again")

    @property
    def group(self) -> Group:
        """The ranks that hold a copy."""
        return self._group

    def memory_stats(self, optimizer: torch.optim.Optimizer | None = None) -> DDPMemoryStats:
        """The bytes that this rank holds now. Nothing is communicated.

        Args:
            optimizer: whose state is counted, too.
        """
        params = list(self.module.parameters())
        buckets = self._reducer.buckets
        views = {view.data_ptr() for bucket in buckets for view in bucket.grad_views}
        apart = (p.grad for p in params if p.grad is not None and p.grad.data_ptr() not in views)
        return DDPMemoryStats(
            parameters=_nbytes(params),
            buffers=_nbytes(self.module.buffers()),
            buckets=sum(bucket.held_nbytes for bucket in buckets),
            gradients=_nbytes(apart),
            optimizer=None if optimizer is None else state_nbytes(optimizer),
        )

    # Of this rank ----------------------------------------------------------------------------

    def holdings(self) -> ShardedState:
        """The state of the plain model, of which every rank has a copy; without communication.

        Raises:
            StateError: inside backward, or the wrapper was taken off.
            ArgumentError: a buffer cannot be saved.
        """
        self._check_attached()
        if self._reducer.is_in_backward:
            raise StateError("holdings() inside backward: ask after loss.backward()")
        sent = self._tracked_buffers.tensors() if self._options.broadcast_buffers else ()
        return replicated_state(self.module, self._group, sent)

    def parameter_shards(self) -> tuple[ParameterShards, ...]:
        """All parameters, whole."""
        return tuple(parameter_shards_in(self.module))

    def shared_over(self) -> tuple[Group, ...]:
        """The group, as one of the axes of a mesh."""
        return (self._group,)

    # Like the plain module -------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the module, with the plain module's keys."""
        return self.module.state_dict(*args, **kwargs)

    def whole_state_dict(self, rank0_only: bool = False, cpu: bool = True) -> dict[str, Any]:
        """Copies of what ``state_dict`` returns, as ``FSDP.whole_state_dict`` gives them.

        Nothing is communicated.

        Args:
            rank0_only: other ranks get an empty dict.
            cpu: every copy goes to the memory of the host when it is made.

        Raises:
            ArgumentError: an argument is no bool.
        """
        checks.flag("rank0_only", rank0_only)
        checks.flag("cpu", cpu)
        if rank0_only and self._group.rank:
            return {}
        device = torch.device("cpu") if cpu else None
        copies = {
            id(param): copy_of(param.detach(), device or param.device)
            for param in self.module.parameters()
        }
        return state_of_copies(self.module, copies, device=device)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load into the module, with the plain module's keys, in place.

        Raises:
            ArgumentError: with ``assign``, which would replace the parameters that are reduced.
        """
        if assign:
            raise no_assign("DDP reduces")
        return self.module.load_state_dict(state_dict, strict=strict)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
