"""What the ranks of a test hold, put together and compared with the plain model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from echelon.checkpoint.items import group_of
from echelon.comm.group import Group
from echelon.modules.sharded_tensor import local_shard
from echelon.state.sharded_state import ModelParts, ShardedState
from echelon.state.tensor_shard import Replication, TensorShard


@dataclass(frozen=True)
class Seen:
    """A range as another rank sees it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    start: int
    copy: int
    num_copies: int
    replication: Replication
    values: Tensor

    @classmethod
    def of(cls, one: TensorShard) -> Seen:
        values = one.values.detach().cpu().reshape(-1).clone()
        return cls(
            one.names, one.shape, one.start, one.copy, one.num_copies, one.replication, values
        )


def holdings_of(model: nn.Module, group: Group | None) -> ShardedState:
    """What this rank holds of ``model``; every rank of ``group`` has a copy of what is plain."""
    copy, num_copies = (0, 1) if group is None else (group.rank, group.size)
    return ModelParts([(str, model)]).state(copy, num_copies)


def shared_group(models: Sequence[nn.Module], given: Group | None = None) -> Group | None:
    """The group of all ranks that share ``models``."""
    parts = [ModelParts([(str, model)]) for model in models]
    return group_of([axis for part in parts for axis in part.axes], given)


def joined(holdings: ShardedState, group: Group) -> dict[str, Tensor]:
    """The tensors of the model, by all of their names. All ranks call it.

    Asserts that ranges cover each of them exactly once, that copies are numbered, and that those
    are alike which are said to be.
    """
    check_params(holdings)
    told: list[list[Seen]] = group.all_gather_object(
        [Seen.of(one) for one in holdings.tensors], pickle=True
    )
    ranges: dict[tuple[str, ...], list[Seen]] = {}
    for own in told:
        assert len({one.names for one in own}) == len(own), "a rank says a tensor twice"
        for one in own:
            ranges.setdefault(one.names, []).append(one)
    found: dict[str, Tensor] = {}
    for names, parts in ranges.items():
        assert not found.keys() & set(names), names
        try:
            whole = _whole(parts)
        except AssertionError as error:
            error.add_note(f"of {names}: {[(p.start, len(p.values), p.copy) for p in parts]}")
            raise
        found |= dict.fromkeys(names, whole)
    return found


def _whole(parts: list[Seen]) -> Tensor:
    shape = parts[0].shape
    assert {one.shape for one in parts} == {shape}
    assert len({one.replication for one in parts}) == 1
    by_start: dict[int, list[Seen]] = {}
    for one in parts:
        if one.values.numel():
            by_start.setdefault(one.start, []).append(one)
    end, values = 0, [parts[0].values[:0]]
    for start, copies in sorted(by_start.items()):
        assert start == end
        assert {one.num_copies for one in copies} == {len(copies)}
        first, *others = sorted(copies, key=lambda one: one.copy)
        assert sorted(one.copy for one in copies) == list(range(len(copies)))
        for other in others:
            assert other.values.shape == first.values.shape
            if first.replication is Replication.IDENTICAL:
                assert torch.equal(other.values, first.values)
        values.append(first.values)
        end += first.values.numel()
    assert end == prod(shape)
    return torch.cat(values).view(shape)


def check_params(holdings: ShardedState) -> None:
    """The ranges of a parameter are its memory, end to end."""
    known = set(map(id, holdings.tensors))
    for param, own in holdings.params.items():
        assert known.issuperset(map(id, own))
        whole = local_shard(param).reshape(-1)
        assert torch.equal(torch.cat([whole[:0], *(one.values.reshape(-1) for one in own)]), whole)
        for one in own:
            if one.numel:
                memory = one.values.untyped_storage().data_ptr()
                assert memory == local_shard(param).untyped_storage().data_ptr()


def check_optimizer(holdings: ShardedState, optimizer: torch.optim.Optimizer) -> None:
    """The state of every parameter can be cut as its ranges are."""
    assert optimizer.state
    for param, state in optimizer.state.items():
        lengths = [one.numel for one in holdings.params[param]]
        for value in state.values():
            if isinstance(value, Tensor) and value.dim():
                assert value.numel() == sum(lengths)


@torch.no_grad()
def write(holdings: ShardedState, whole: Mapping[str, Tensor]) -> None:
    """All that a load does: write this rank's ranges of a whole state."""
    holdings.before_write()
    for one in holdings.tensors:
        flat = whole[one.name].detach().reshape(-1)[one.start : one.start + one.numel]
        one.values.copy_(flat.view(one.values.shape))


def filled(model: nn.Module, seed: int) -> nn.Module:
    """The model with other values, the same ones for each seed."""
    generator = torch.Generator().manual_seed(seed)
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=generator, dtype=value.dtype) + 0.1)
        else:
            value.fill_(seed)
    return model
