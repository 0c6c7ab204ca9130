"""Tied weights: parameters that several stages share, such as an embedding and the output layer.

[Note: a shared parameter is reduced once]
::

                   stage 0        stage 1
    replica 0   │  w.grad  ─sum─  w.grad  │ 1
    replica 1   │  w.grad  ─sum─  w.grad  │ 1
                      └ mean ┘ 2

    1: over the owners, ranks of one pipeline, in each step
    2: over the replicas of each owner, once gradients are complete

If the wrappers of several stages had the parameter, each would reduce it and shard it differently,
and two wrappers on one rank would both write its ``.grad``. So wrappers ignore it: every owner has
it unsharded, backwards add to its ``.grad`` as in the plain model, and it is reduced here at the
end of steps. Wrappers that replicate it, on different ranks, may also reduce it themselves; then
only step 1 happens here.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Literal, final

import torch
from torch import nn

from echelon.comm.group import Group
from echelon.comm.streams import device_of
from echelon.errors import ArgumentError, ModelMismatch, UnsupportedError
from echelon.modules.memory_overlap import NamedMemory, check_memory
from echelon.modules.parameters import is_claimed
from echelon.pipeline.data_parallel import Replicated, Shardable


@final
class SharedParameter:
    """The copy of a shared parameter on this rank.

    Law: after each step, ``.grad`` is that of the plain model on every owner, with the same bits;
    without ``finalize`` on the rows of this pipeline only. The ``owners`` are the ranks of this
    pipeline that have the parameter, None if it is only this one. The ``replicas`` are the ranks of
    other pipelines that have the same stages; None if there are none, or if a wrapper reduces over
    them.

    Attributes:
        is_counted: whether this rank is the one that counts the parameter in a norm.
    """

    def __init__(self, param: nn.Parameter, owners: Group | None, replicas: Group | None) -> None:
        self.param, self._owners, self._replicas = param, owners, replicas
        self.is_counted = owners is None or owners.rank == 0
        self._before: torch.Tensor | None = None  # the gradient when the step began
        with torch.no_grad():
            for group in (replicas, owners):
                if group is not None:
                    group.broadcast(param.data, 0, label="a parameter that stages share")

    def begin(self) -> None:
        """Begin a step; a gradient that all owners have already must not be summed again."""
        # A copy: the next gradient of a replicated parameter is reduced in the memory of ``.grad``.
        grad = self.param.grad
        self._before = None if grad is None else grad.clone()
        if not self.is_counted:
            self.param.grad = None

    def sum_over_owners(self) -> None:
        """Add up the gradients of all owners at the end of a step. All of them call it.

        This does not wait until gradients are complete, because users scale, clear and add to
        ``.grad`` between steps. All owners do that alike, and it must count once.
        """
        self._before = None
        if self._owners is not None:
            self._reduce(self._owners, "sum")

    def average_over_replicas(self) -> None:
        """Complete the gradient of one or more steps. All owners and replicas call it."""
        if self._replicas is not None:
            self._reduce(self._replicas, "mean")

    def _reduce(self, group: Group, op: Literal["sum", "mean"]) -> None:
        """Reduce ``.grad`` over a group, unless it is None on all of its ranks.

        Raises a ModelMismatch if the parameter is frozen on some: an optimizer would train it there
        by the gradients of the others, while freezing it in the plain model freezes it as a whole.
        """
        grad, is_trained = self.param.grad, self.param.requires_grad
        flags = [grad is not None, is_trained, not is_trained]
        found = device_of(self.param.device).numbers(flags, torch.uint8)
        group.all_reduce(found, "max", label="whether a shared parameter was used")
        is_used, is_trained_somewhere, is_frozen_somewhere = found.tolist()
        if is_trained_somewhere and is_frozen_somewhere:
            raise ModelMismatch(
                "whether they train a parameter that stages share",
                dict(enumerate(group.all_gather_object("trained" if is_trained else "frozen"))),
                "Freeze and unfreeze it on every rank.",
            )
        if is_used:
            total = torch.zeros_like(self.param) if grad is None else grad
            group.all_reduce(total, op, label="gradient of a shared parameter")
            self.param.grad = total

    def forget(self) -> None:
        """Undo a step that failed: restore the gradient that it began with."""
        self.param.grad, self._before = self._before, None


def shared_parameters(
    stages: Sequence[nn.Module | None],
) -> dict[nn.Parameter, dict[int, str]]:
    """The parameters that several stages have, each with its name in each of these stages.

    Example:
        >>> shared = nn.Linear(1, 1, bias=False)
        >>> [*shared_parameters([shared, nn.Tanh(), nn.Sequential(shared)]).values()]
        [{0: 'weight', 2: '0.weight'}]
    """
    places: dict[nn.Parameter, dict[int, str]] = {}
    for index, stage in enumerate(stages):
        for name, param in () if stage is None else _parameters(stage):
            places.setdefault(param, {}).setdefault(index, name)
    return {param: names for param, names in places.items() if len(names) > 1}


def check_memory_of_stages(stages: Sequence[nn.Module | None], homes: Sequence[int]) -> None:
    """Refuse stages with different ``homes`` whose parameters share memory, by an ArgumentError.

    What shares memory is no shared parameter, whose gradient could be summed.
    """
    memories: dict[int, NamedMemory] = {}
    for index, stage in enumerate(stages):
        for what, tensor, moves in () if stage is None else _tensors(stage):
            memory = NamedMemory(f"{what} of stage {index}", tensor, moves, homes[index])
            memories.setdefault(id(tensor), memory)
    check_memory(memories.values(), "Stages have parameters and optimizers of their own")


def find_shared_parameters(
    stages: Sequence[nn.Module | None],
    placement: Sequence[int],
    group: Group,
    replicate: Group | None,
) -> list[SharedParameter]:
    """The shared parameters of this rank. All ranks call it, with ``replicate`` of ``Pipeline``.

    Refuses ranks that do not have the stages of others and so cannot know what they share, and
    wrappers with which a shared parameter would not be reduced or not correctly.
    """
    local = {index: stages[index] for index, rank in enumerate(placement) if rank == group.rank}
    owners_of: list[tuple[nn.Parameter, list[int]]] = []
    problems: list[tuple[type[Exception], str]] = []
    for param, names in shared_parameters(stages).items():
        owners_of.append((param, sorted({placement[index] for index in names})))
        problems += _problems(param, names, local, is_reduced=replicate is not None)
    if replicate is not None and replicate.size > 1:
        problems += _left_alone(local, {param for param, _ in owners_of})
    across_ranks = [ranks for _, ranks in owners_of if len(ranks) > 1]
    sharing_by_rank, problems_by_rank = zip(
        *group.all_gather_object(
            (across_ranks, [(error.__name__, text) for error, text in problems[:1]])
        ),
        strict=True,
    )
    if any(sharing != across_ranks for sharing in sharing_by_rank):
        raise ArgumentError(
            "the ranks see different parameters that stages share, on ranks "
            f"{dict(enumerate(sharing_by_rank))}: give every rank the whole list of stages, "
            "without None"
        )
    for rank, problems_of_rank in enumerate(problems_by_rank):
        for name, text in problems_of_rank:
            error = UnsupportedError if name == UnsupportedError.__name__ else ArgumentError
            raise error(f"on rank {rank} of the pipeline, {text}")
    shared = []
    for param, ranks in owners_of:
        owners = group.subgroup(ranks) if len(ranks) > 1 else None
        replicas = None if is_claimed(param) else replicate
        if group.rank in ranks and (owners is not None or replicas is not None):
            shared.append(SharedParameter(param, owners, replicas))
    return shared


def _problems(
    param: nn.Parameter,
    names: Mapping[int, str],
    local: Mapping[int, nn.Module | None],
    *,
    is_reduced: bool,
) -> Iterator[tuple[type[Exception], str]]:
    """Why the wrappers of this rank's stages cannot be used with a shared parameter."""
    stages = " and ".join(f"stage {index} ({name!r})" for index, name in names.items())
    wrappers = [local[index] for index in names if isinstance(local.get(index), Replicated)]
    advice = (
        "leave it out of all of them with ignored=[parameter] and give ec.Pipeline replicate=, the "
        "ranks that have the same stages; ec.parallelize does both"
    )
    if is_claimed(param):
        if any(isinstance(wrapper, Shardable) for wrapper in wrappers):
            yield (
                UnsupportedError,
                f"{stages} share a parameter that is sharded, so that ranks have different parts "
                f"of one parameter: {advice}",
            )
        elif len(local.keys() & names.keys()) > 1:
            yield (
                UnsupportedError,
                f"{stages} share a parameter on one rank, and the wrapper of one of them reduces "
                f"it before the other is through: {advice}",
            )
    elif not is_reduced and any(map(_claims_others, wrappers)):
        yield (
            ArgumentError,
            f"{stages} share a parameter that their wrappers ignore, so that nobody reduces its "
            "gradient over replicas: give ec.Pipeline replicate=, the ranks that have the same "
            "stages",
        )


def _left_alone(
    local: Mapping[int, nn.Module | None], shared: Container[nn.Parameter]
) -> Iterator[tuple[type[Exception], str]]:
    """Stages of this rank whose gradients nobody would reduce over replicas."""
    for index, stage in local.items():
        if stage is None or any(isinstance(module, Replicated) for module in stage.modules()):
            continue
        for name, param in stage.named_parameters():
            if param.requires_grad and param not in shared:
                yield (
                    ArgumentError,
                    f"stage {index} is in no wrapper, so the replicas of {name!r} would be trained "
                    "each by its own rows: replicate= is for the parameters that stages share. "
                    "Wrap the stages in ec.DDP or ec.FSDP over replicate; ec.parallelize does both",
                )
                return


def _claims_others(wrapper: nn.Module | None) -> bool:
    return wrapper is not None and any(map(is_claimed, wrapper.parameters()))


def _parameters(stage: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of the model, also if a wrapper shows optimizers others."""
    for path, module in stage.named_modules():
        for local, param in module._parameters.items():
            if param is not None:
                yield f"{path}.{local}".lstrip("."), param


def _tensors(stage: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Parameters and buffers, each with what errors call it, and whether it is a parameter."""
    for name, param in _parameters(stage):
        yield f"parameter {name!r}", param, True
    for name, buffer in stage.named_buffers():
        yield f"buffer {name!r}", buffer, False
