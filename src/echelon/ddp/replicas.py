"""What makes ranks replicas: parameters that stay equal, and buffers that are made equal again.

[Note: when buffers are sent]
A rank cannot know by itself whether the buffers of another rank have changed, and a broadcast that
only some ranks issue hangs. So each rank writes whether its buffers have changed into a notice of
the last gradient bucket. After the reduction all ranks read the same sum, so they agree without
further communication. If it is not zero, the next forward in training mode sends the buffers.

[Note: forwards that write]
A forward that wrote a parameter may have written what its rank alone has seen. A notice of the last
bucket makes all ranks compare at once then; otherwise ``replica_check`` says when they do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import final

import torch
from torch import Tensor, nn

from echelon.comm.buffers import is_expanded
from echelon.comm.group import Group
from echelon.ddp.buckets import compute_buckets
from echelon.errors import StateError
from echelon.modules.parameters import LateAnswer, is_claimed
from echelon.modules.replica_check import ReplicaCheck
from echelon.ranges import Placement, pack
from echelon.state.sharded_state import ShardedState, named_extras, named_state
from echelon.state.tensor_shard import Replication, whole

_version = attrgetter("_version")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


@final
class TrackedBuffers:
    """The buffers of ``module``, and the versions that the ranks last agreed on.

    A buffer that is replaced (``module.mean = tensor``) is tracked; one registered later is not.
    """

    def __init__(self, module: nn.Module) -> None:
        self._slots = [
            (f"{path}.{name}".lstrip("."), submodule._buffers, name)
            for path, submodule in module.named_modules()
            for name, buffer in submodule._buffers.items()
            if buffer is not None
        ]
        self._known: list[tuple[Tensor, int, int]] = []
        self.remember()

    def __len__(self) -> int:
        return len(self._slots)

    def named(self) -> list[tuple[str, Tensor]]:
        """The buffers as they are now, with their names."""
        return [
            (full_name, tensor)
            for full_name, buffers, name in self._slots
            if (tensor := buffers.get(name)) is not None
        ]

    def tensors(self) -> list[Tensor]:
        """The buffers as they are now."""
        return [tensor for _, tensor in self.named()]

    def changed(self) -> bool:
        """Whether a buffer, or its memory, was replaced or written since ``remember``."""
        now = self.tensors()
        return len(now) != len(self._known) or any(
            tensor is not known or tensor._version != version or _address(tensor) != address
            for tensor, (known, version, address) in zip(now, self._known, strict=True)
        )

    def remember(self) -> None:
        """Remember the present versions as those that the ranks agree on."""
        self._known = [(tensor, tensor._version, _address(tensor)) for tensor in self.tensors()]


def _address(tensor: Tensor) -> int:
    """Where its elements lie, which ``tensor.data = other`` changes; 0 if it does not tell."""
    tells = type(tensor) is Tensor and tensor.layout is torch.strided
    return tensor.data_ptr() if tells else 0


@torch.no_grad()
def broadcast_parameters(
    params: Iterable[Tensor], group: Group, src: int, bucket_bytes: int
) -> None:
    """Copy ``params`` of rank ``src`` to all ranks, in place, in a few large broadcasts."""
    for members in _coalesced(list(params), bucket_bytes):
        if len(members) == 1 and members[0].is_contiguous():
            group.broadcast(members[0], src, label="parameters")
            continue
        flat, views, _ = _packed(members, group)
        group.broadcast(flat, src, label="parameters")
        if group.rank != src:
            torch._foreach_copy_(members, views)


@torch.no_grad()
def broadcast_buffers(
    named: Sequence[tuple[str, Tensor]], group: Group, src: int, bucket_bytes: int
) -> None:
    """Copy buffers of rank ``src`` to all ranks, in place, in a few large broadcasts.

    A buffer that has the values of rank ``src`` already is not written: it may be a constant that
    a graph has saved, or lie in memory that nobody may write.
    """
    fixed: list[Tensor] = []
    for members in _coalesced([tensor for _, tensor in named], bucket_bytes):
        flat, views, placement = _packed(members, group)
        before = flat.clone()
        group.broadcast(flat, src, label="buffers")
        if group.rank != src:
            changed = _changed_slots(before, flat, placement)
            fixed += [members[i] for i in changed if is_expanded(members[i])]
            changed = [i for i in changed if not is_expanded(members[i])]
            if changed:
                torch._foreach_copy_([members[i] for i in changed], [views[i] for i in changed])
    for name, tensor in named:  # after the last broadcast, in which the other ranks take part
        if any(tensor is other for other in fixed):
            raise StateError(
                f"buffer {name!r} was expanded, so several of its elements are one place in "
                f"memory, and its values on rank {group.rank} are not those of rank {src}, which "
                "cannot be written there: make it with .contiguous(), or with the same values on "
                "every rank"
            )


def _changed_slots(before: Tensor, after: Tensor, placement: Placement) -> list[int]:
    """The members of a packed buffer of which a bit has changed."""
    words = _WORDS.get(before.element_size(), before.dtype)
    changed = (before.view(words) != after.view(words)).nonzero().view(-1)
    starts = torch.tensor(placement.starts, device=changed.device)
    slots = torch.bucketize(changed, starts, right=True).unique() - 1
    return [int(slot) for slot in slots.tolist()]


def _coalesced(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """``tensors`` in parts of one dtype, of at most so many bytes."""
    buckets = compute_buckets(
        [tensor.nbytes for tensor in tensors],
        bucket_bytes,
        kinds=[tensor.dtype for tensor in tensors],
        order=range(len(tensors)),
    )
    return [[tensors[i] for i in bucket] for bucket in buckets]


def _packed(members: list[Tensor], group: Group) -> tuple[Tensor, list[Tensor], Placement]:
    """A copy of ``members`` end to end, its views in their shapes, and where each begins."""
    placement = pack([tensor.numel() for tensor in members])
    flat = torch.empty(placement.numel, dtype=members[0].dtype, device=group.device)
    views = [
        flat[start : start + tensor.numel()].view(tensor.shape)
        for start, tensor in zip(placement.starts, members, strict=True)
    ]
    # Also where they are replaced: a dry run, which receives nothing, goes on with its values.
    torch._foreach_copy_(views, members)
    return flat, views, placement


@final
class ReplicaWatch:
    """Has the parameters of all ranks compared now and then, and after a forward that wrote one.

    Args:
        named: the parameters that all ranks keep equal.
        every: after how many reductions, once there were as many; 0: never.

    Attributes:
        is_written: whether a forward of this rank wrote a parameter since all ranks were told.
        check: compares them. All ranks count a reduction at its beginning.
        answer: the reduced ``is_written`` of all ranks, zero if no rank has.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], group: Group, every: int) -> None:
        self.is_written = False
        self._named = list(named)
        self.check = ReplicaCheck(
            lambda: self._named,
            lambda: (),
            group,
            None,
            every=every,
            remedy="model.broadcast_parameters(0)",
        )
        self._params = [param for _, param in named]
        self._placed = [p for p in self._params if type(p) is nn.Parameter]
        self._versions: tuple[list[int], list[int]] = [], []
        self.answer = LateAnswer()

    def begin_forward(self) -> None:
        """Remember how often parameters were written."""
        self._versions = self._versions_now()

    def end_forward(self) -> None:
        """Note whether the forward wrote into a parameter, or replaced its memory."""
        if self._versions_now() != self._versions:
            self.is_written = True

    def _versions_now(self) -> tuple[list[int], list[int]]:
        # Twice in each forward, over all parameters: loops that stay in C.
        return list(map(_version, self._params)), list(map(Tensor.data_ptr, self._placed))

    def compare_if_written(self, *, at_once: bool) -> None:
        """Compare if a forward of any rank wrote; as ``TrainableParameters.compare``."""
        if self.check.is_on and self.answer.is_yes(at_once=at_once):
            self.check.compare()


def replicated_state(
    module: nn.Module, group: Group, broadcast_buffers: Collection[Tensor]
) -> ShardedState:
    """The state of ``module``, of which every rank of ``group`` holds all.

    Rank 0's values of ``broadcast_buffers`` count; of other buffers every rank has its own values.
    """
    broadcast_ids = {id(buffer) for buffer in broadcast_buffers}

    def replication(tensor: Tensor) -> Replication:
        if isinstance(tensor, nn.Parameter):
            return Replication.IDENTICAL if is_claimed(tensor) else Replication.PER_RANK
        return Replication.PRIMARY if id(tensor) in broadcast_ids else Replication.PER_RANK

    shards = [
        (tensor, whole(names, tensor, group.rank, group.size, replication(tensor)))
        for names, tensor in named_state(module)
    ]
    return ShardedState(
        tensors=tuple(shard for _, shard in shards),
        params={tensor: (shard,) for tensor, shard in shards if isinstance(tensor, nn.Parameter)},
        extras=tuple(named_extras(module)),
        axes=(group,),
    )
