"""What ranks train on: whether all have the same rows, and whether one has more batches.

Both are silent mistakes: the training runs, on a part of the data or with batches of two epochs in
one step. Each rank notes in a few numbers what it sees, where the other ranks of its host can read
them without waiting (``StepRows``). The first rank of a group compares, and tells once on standard
error. Nothing is communicated, so nothing can hang, and no training ends by it.

[Note: no false alarms]
Rows are compared only of training, in the first forwards. A constant batch says nothing, nor does
the same batch in each step, as in a benchmark. A pass over a ``DataLoader`` counts only if an
optimizer has made steps in it, so evaluation does not; nor does ``join``, where ranks may differ.

[Note: nothing waits]
Where reading a value would wait for the device, a few elements are copied to the host while it goes
on, and read in the first forward that finds them there.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.comm.streams import StreamEvent, device_of
from echelon.diagnosis import rank_time
from echelon.diagnosis.step_rows import StepRows
from echelon.errors.message_text import ranks_text, say
from echelon.modules.nested import tensors

NUM_BATCHES = 3  # whose rows are compared
_NUM_SAMPLES = 16  # elements of each of the first tensors
_MOST_TENSORS = 2
_OFTEN, _SELDOM = 64, 8  # each of the first forwards compares, and every eighth after them
_FORWARDS = 1 << 20  # after so many nothing is compared any more


@final
class DataWatch:
    """Watches what one wrapper of a model is trained on.

    Args:
        group: the ranks that train together, each on rows of its own_rows.
    """

    def __init__(self, group: Group) -> None:
        self._ranks = tuple(group.ranks)
        self._compares = group.rank == 0 and group.size > 1
        self._num_forwards = 0 if group.size > 1 else _FORWARDS
        self._peers: dict[int, StepRows] = {}
        self._digests: list[int] = []
        self._copies: list[_Copies] = []  # of batches that are not read yet

    def begin_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Begin a forward with gradients: note what it is given, and compare what ranks have noted.

        It costs a few microseconds after the first forwards.
        """
        rank_time.begin_forward()
        if self._num_forwards >= _FORWARDS or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return
        own_rows = rank_time.rows()
        if own_rows is None:  # nothing is measured here
            return
        self._num_forwards += 1
        if self._num_forwards <= NUM_BATCHES:
            self._copies.append(_copies_in((args, kwargs)))
        while self._copies and self._copies[0].are_there():
            self._note(own_rows, self._copies.pop(0))
        if (
            self._num_forwards > NUM_BATCHES
            and self._compares
            and (self._num_forwards < _OFTEN or not self._num_forwards % _SELDOM)
        ):
            self._compare(own_rows)

    def _note(self, own_rows: StepRows, copies: _Copies) -> None:
        digest = copies.digest()
        if digest is None or digest in self._digests:
            self._digests, self._copies = [], []
            self._num_forwards = max(self._num_forwards, NUM_BATCHES)
            own_rows.note_rows(0)
            return
        self._digests.append(digest)
        if len(self._digests) == NUM_BATCHES:
            own_rows.note_rows(zlib.crc32(repr(self._digests).encode()) or 1)

    def _compare(self, own_rows: StepRows) -> None:
        if len(self._peers) < len(self._ranks):
            known = own_rows.peers()
            self._peers = {rank: known[rank] for rank in self._ranks if rank in known}
        if len(self._peers) < 2:  # the others are on other hosts, or not seen yet
            return
        if self._digests and not own_rows.has_told_rows:
            noted = [rows.noted_rows for rows in self._peers.values()]
            if all(noted):
                own_rows.has_told_rows = True
                if len(set(noted)) == 1:
                    _tell(_same_rows(list(self._peers)))
        ends = {rank: rows.steps_of_epoch for rank, rows in self._peers.items()}
        if all(ends.values()):
            self._num_forwards = _FORWARDS
        if len({steps for steps in ends.values() if steps}) > 1 and not any(
            rows.may_be_unequal for rows in self._peers.values()
        ):
            self._num_forwards = _FORWARDS
            _tell(_unequal({rank: steps for rank, steps in ends.items() if steps}))


class _Copies(NamedTuple):
    """Some elements of the first tensors of a batch, each 1D, and when the host has them."""

    samples: Sequence[Tensor]
    events: Sequence[StreamEvent]

    def are_there(self) -> bool:
        """Whether the host has them."""
        return all(event.query() for event in self.events)

    def digest(self) -> int | None:
        """A number that they determine; None if they are constant, or have no values."""
        try:
            values = [sample.tolist() for sample in self.samples]
        except RuntimeError:  # as inside of torch.func
            return None
        if not any(len(set(map(repr, sample))) > 1 for sample in values):
            return None
        return zlib.crc32(repr(values).encode())


def _copies_in(value: object) -> _Copies:
    """Begin to copy some elements of the first tensors of a batch to the host."""
    samples: list[Tensor] = []
    events: list[StreamEvent] = []
    for tensor in tensors(value):
        if len(samples) == _MOST_TENSORS:
            break
        if type(tensor) not in (Tensor, nn.Parameter) or not _has_elements(tensor):
            continue
        sample = _sample(tensor)
        device = device_of(sample.device)
        if device.reading_waits:
            host = device.host_memory(sample.numel(), sample.dtype)
            sample = host.copy_(sample, non_blocking=True)
            events.append(device.current_stream().record_event())
        samples.append(sample)
    return _Copies(samples, events)


def _has_elements(tensor: Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized
    return is_plain and not tensor.is_meta and tensor.numel() > 1


@torch.no_grad()
def _sample(tensor: Tensor) -> Tensor:
    """A copy of some elements of a tensor, 1D. The others are not copied, and nothing waits."""
    step = max(1, tensor.numel() // _NUM_SAMPLES)
    places = list(range(0, tensor.numel(), step))[:_NUM_SAMPLES]
    index: list[list[int]] = []  # by dim; torch's own unravel_index imports for seconds
    for length in reversed(tensor.shape):
        index.insert(0, [place % length for place in places])
        places = [place // length for place in places]
    # Each is a view. A list of places would be a tensor, which a device waits for.
    return torch.stack([tensor.detach()[place] for place in zip(*index, strict=True)])


def _tell(text: str) -> None:
    say(f"echelon: {text}")


def _same_rows(ranks: Sequence[int]) -> str:
    return (
        f"{ranks_text(ranks)} train on the same rows: the first {NUM_BATCHES} batches are equal, "
        "so further ranks add nothing. Give each rank rows of its own: ec.ResumableSampler, "
        "torch's DistributedSampler, or data[world.rank :: world.size]. (If this is as you want "
        "it, ignore this line.)"
    )


def _unequal(ends: Mapping[int, int]) -> str:
    rows = ", ".join(f"rank {rank} after {steps} steps" for rank, steps in sorted(ends.items())[:8])
    return (
        f"the ranks have different numbers of batches: the first pass over the data has ended for "
        f"{rows}. From there on a step takes batches of two epochs, and in the last one some ranks "
        "wait for others that have none. Give all ranks as many: ec.ResumableSampler, or "
        "drop_last=True with a sampler that pads; or put the loop inside `with model.join():`"
    )
