"""GPipe, 1F1B, interleaved, breadth-first and zero-bubble: stage j is on rank j modulo ranks.

In the bounds and formulas below p is the number of ranks, m of microbatches, v of stages per rank
("chunks"), r a rank. Memory counts microbatches whose forward has begun and whose backward has not
ended, in activations of one rank's whole share of the model, so that one stage counts 1/v. A bubble
is idle time over time, on equal stages with F = I = W, B = I + W and no delay of messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from echelon.errors import ArgumentError, ScheduleError
from echelon.pipeline.schedules.ir import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    Item,
    Kind,
    Schedule,
    schedule_of,
)
from echelon.pipeline.schedules.walk import walk
from echelon.ranges import shard_range

Slot = tuple[int, int]  # the chunk on a rank, and the microbatch
_Order = Callable[[int], Iterator[Item]]  # from a rank to its actions


def loop(ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each of the ``ranks * chunks`` stages: after the last rank comes the first.

    Example:
        >>> loop(3, 2)
        (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(ranks)) * chunks


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards.

    Memory: m on every rank. Bubble: (p-1)/(m+p-1).

    Example:
        >>> print(gpipe(3, 4))
        rank 0 | 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
        rank 1 | 1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
        rank 2 | 2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", 2019, section 2.3.
    """
    table = [(0, i) for i in range(microbatches)]
    return _schedule(
        "gpipe", ranks, microbatches, 1, lambda r: _alternate(r, ranks, table, table, len(table))
    )


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B: after a warm-up, each forward is followed by the oldest backward.

    Memory: min(m, p-r). Bubble: (p-1)/(m+p-1), as GPipe.

    Example:
        >>> print(one_f_one_b(3, 4))
        rank 0 | 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        rank 1 | 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        rank 2 | 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021, section 2.2
    (PipeDream-flush).
    """
    table = [(0, i) for i in range(microbatches)]
    return _schedule(
        "1f1b",
        ranks,
        microbatches,
        1,
        lambda r: _alternate(r, ranks, table, table, ranks - 1 - r),
    )


def interleaved(ranks: int, microbatches: int, chunks: int, factor: int = 2) -> Schedule:
    """Interleaved 1F1B: several stages a rank make the fill and the drain of the pipeline shorter.

    The microbatches go through the chunks in groups of about p. Let g be the size of the first
    group. Memory: ((v-1)g + f(p-1-r) + 1)/v with the factor f of the warm-up, at most m.
    Bubble: (p-1)/(vm+p-1) for m >= p. A factor of 2 hides the delay of messages and a factor of 1
    needs less memory.

    Args:
        ranks: number of ranks.
        microbatches: number of microbatches; need not be a multiple of ``ranks``.
        chunks: stages per rank.
        factor: forwards of warm-up per rank behind this one, 1 or 2.

    Example:
        >>> print(interleaved(2, 2, 2))
        rank 0 | 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1 | 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", 2021, section 2.2.2. Groups of nearly equal size, larger ones first, are ours.
    """
    groups = _groups(ranks, microbatches)
    forwards, backwards = _forwards(groups, chunks), _backwards(groups, chunks)

    def order(r: int) -> Iterator[Item]:
        warmup = (chunks - 1) * groups[0][1] + factor * (ranks - 1 - r)
        return _alternate(r, ranks, forwards, backwards, warmup)

    return _schedule("interleaved", ranks, microbatches, chunks, order)


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Looped breadth-first: every microbatch through one chunk, then through the next.

    A sharded stage is gathered once for all forwards and once for all backwards.
    Memory: m on every rank. Bubble: (p-1)/(vm+p-1) for m >= p.

    Example:
        >>> print(looped_bfs(2, 2, 2))
        rank 0 | 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1 | 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022, section 4.1.
    """
    whole = [(0, microbatches)]
    forwards, backwards = _forwards(whole, chunks), _backwards(whole, chunks)
    return _schedule(
        "looped-bfs",
        ranks,
        microbatches,
        chunks,
        lambda r: _alternate(r, ranks, forwards, backwards, len(forwards)),
    )


def zero_bubble(
    ranks: int, microbatches: int, chunks: int = 1, k: int = 1, name: str = "zb"
) -> Schedule:
    """zb(v, k): backwards are split, and gradients of weights fill what would be idle.

    ZB-H1 is zb(1, 1), ZB-H2 is zb(1, 2). With g as in ``interleaved``, on every rank
    memory: ((v-1)g + k(p-1) + 1)/v, at most m. Bubble for k = 1 and m >= p:
    (p-1)/(3vm+p-1). For k = 2 and v = 1, m >= 2p-1, no rank idles between its own first and last
    action, but the span over all ranks has the bubble of k = 1: a rank ends as much earlier as it
    began. A larger k hides the delay of messages.

    Args:
        ranks: number of ranks.
        microbatches: number of microbatches.
        chunks: stages per rank.
        k: how many more forwards a rank runs ahead than the rank behind it. With several chunks
            more than 2 may be too many: a rank would wait for forwards of a later group.
        name: name of the schedule.

    Raises:
        ArgumentError: no rank could go on with this ``k``.

    Example:
        >>> print(zero_bubble(2, 3))
        rank 0 | 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        rank 1 | 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2; chunks and the larger k
    together are ours.
    """
    groups = _groups(ranks, microbatches)
    forwards, backwards = _forwards(groups, chunks), _backwards(groups, chunks)
    first = groups[0][1]

    def order(r: int) -> Iterator[Item]:
        warmup = min(len(forwards), (chunks - 1) * first + k * (ranks - 1 - r))
        for slot in forwards[:warmup]:
            yield _place(FORWARD, slot, r, ranks)
        late = k * r  # how many gradients of weights wait behind those of inputs
        for n, slot in enumerate(backwards):
            if warmup + n < len(forwards):
                yield _place(FORWARD, forwards[warmup + n], r, ranks)
            yield _place(INPUT, slot, r, ranks)
            if n >= late:
                yield _place(WEIGHT, backwards[n - late], r, ranks)
        for slot in backwards[max(0, len(backwards) - late) :]:
            yield _place(WEIGHT, slot, r, ranks)

    made = _schedule(name, ranks, microbatches, chunks, order)
    if chunks > 1 and k > 2:
        try:
            deque(walk(made), maxlen=0)
        except ScheduleError as error:
            raise ArgumentError(
                f"k={k} runs {ranks} ranks with {chunks} stages each so far ahead that, with "
                f"{microbatches} microbatches, they wait for one another: use k=2, or one stage a "
                "rank"
            ) from error
    return made


def forward_only(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Forwards without backwards, for evaluation.

    Memory: nothing is kept for a backward. Bubble: (p-1)/(vm+p-1) for m >= p.

    Example:
        >>> print(forward_only(2, 3))
        rank 0 | 0F0 0F1 0F2
        rank 1 | 1F0 1F1 1F2

    Source: the forwards of ``interleaved``.
    """
    forwards = _forwards(_groups(ranks, microbatches), chunks)
    return _schedule(
        "forward-only",
        ranks,
        microbatches,
        chunks,
        lambda r: _alternate(r, ranks, forwards, [], len(forwards)),
    )


def _schedule(name: str, ranks: int, microbatches: int, chunks: int, order: _Order) -> Schedule:
    return schedule_of(name, loop(ranks, chunks), microbatches, order)


def _place(kind: Kind, slot: Slot, r: int, ranks: int) -> Action:
    chunk, microbatch = slot
    return Action(kind=kind, microbatch=microbatch, stage=chunk * ranks + r)


def _groups(ranks: int, microbatches: int) -> list[tuple[int, int]]:
    """Start and stop of each group of microbatches; sizes differ by at most 1, larger ones first.

    A small group before a large one stalls: the ranks behind would wait for microbatches that
    their own order has not begun.
    """
    count = max(1, microbatches // ranks)
    return [shard_range(microbatches, count, n) for n in range(count)]


def _forwards(groups: list[tuple[int, int]], chunks: int) -> list[Slot]:
    """All forwards of a rank in order: a group goes through all chunks before the next begins."""
    return [(c, i) for start, stop in groups for c in range(chunks) for i in range(start, stop)]


def _backwards(groups: list[tuple[int, int]], chunks: int) -> list[Slot]:
    """All backwards of a rank in order: the same, from the last chunk to the first."""
    last = range(chunks - 1, -1, -1)
    return [(c, i) for start, stop in groups for c in last for i in range(start, stop)]


def _alternate(
    r: int, ranks: int, forwards: list[Slot], backwards: list[Slot], warmup: int
) -> Iterator[Item]:
    """``warmup`` forwards, then one forward and one backward in turn, then the other backwards."""
    warmup = min(len(forwards), warmup)
    for slot in forwards[:warmup]:
        yield _place(FORWARD, slot, r, ranks)
    for n, slot in enumerate(backwards):
        if warmup + n < len(forwards):
            yield _place(FORWARD, forwards[warmup + n], r, ranks)
        yield _place(BACKWARD, slot, r, ranks)
