"""Which gradients travel together. Pure arithmetic: no ranks, no memory, no autograd."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from echelon.errors import ArgumentError
from echelon.ranges import Placement, pack

# Gradients start at multiples of 16 elements: 64 bytes of float32, a cache line.
ALIGN_NUMEL = 16


@dataclass(frozen=True, slots=True)
class Gradient:
    """What the plan needs to know of one gradient.

    Attributes:
        numel: length in elements.
        nbytes: size on the wire, which counts against the cap of a bucket.
        kind: gradients of different kinds (dtypes) never share a bucket.
    """

    numel: int
    nbytes: int
    kind: Hashable = None


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket: its gradients, in the order in which they lie in its buffer.

    Attributes:
        members: indices of the gradients.
        placement: where each begins, in elements.
    """

    members: tuple[int, ...]
    placement: Placement


def compute_buckets(
    nbytes: Sequence[int],
    bucket_bytes: int,
    first_bucket_bytes: int | None = None,
    *,
    kinds: Sequence[Hashable] | None = None,
    order: Iterable[int] | None = None,
) -> list[list[int]]:
    """Cut gradients into buckets, in the order in which backward is expected to make them.

    A bucket is closed before it would exceed its cap, so only a gradient that is larger than the
    cap makes a larger bucket, and then alone. Buckets are listed by their last member, because
    that one decides when a bucket can leave. Law: every index is in exactly one bucket; none is
    empty.

    Args:
        nbytes: size of each gradient.
        bucket_bytes: the cap.
        first_bucket_bytes: the cap of the bucket that is opened first; None: ``bucket_bytes``.
        kinds: what must not be mixed; None: all may be.
        order: the expected order of arrival; None: the reverse of the given one.

    Raises:
        ArgumentError: a size or a cap is negative, or ``order`` is not a permutation.

    Example:
        >>> compute_buckets([40, 40, 40], 80)
        [[2, 1], [0]]
        >>> compute_buckets([40, 400, 40], 100)
        [[2], [1], [0]]
        >>> compute_buckets([40, 40, 40], 80, first_bucket_bytes=40)
        [[2], [1, 0]]
    """
    num = len(nbytes)
    first_cap = bucket_bytes if first_bucket_bytes is None else first_bucket_bytes
    if min((bucket_bytes, first_cap, *nbytes)) < 0:
        raise ArgumentError(f"sizes and caps are bytes >= 0, got {bucket_bytes}, {first_cap}")
    arrival = list(reversed(range(num)) if order is None else order)
    if sorted(arrival) != list(range(num)):
        raise ArgumentError(f"order {arrival} is not a permutation of range({num})")
    buckets: list[list[int]] = []
    filled: list[int] = []
    open_buckets: dict[Hashable, int] = {}
    for i in arrival:
        kind = None if kinds is None else kinds[i]
        b = open_buckets.get(kind)
        if b is None or filled[b] + nbytes[i] > (bucket_bytes if b else first_cap):
            b = open_buckets[kind] = len(buckets)
            buckets.append([])
            filled.append(0)
        buckets[b].append(i)
        filled[b] += nbytes[i]
    place = {i: position for position, i in enumerate(arrival)}
    return sorted(buckets, key=lambda bucket: place[bucket[-1]])


def plan_buckets(
    gradients: Sequence[Gradient],
    bucket_bytes: int,
    first_bucket_bytes: int,
    order: Iterable[int] | None = None,
) -> tuple[BucketPlan, ...]:
    """Cut gradients into buckets and lay each bucket out.

    Example:
        >>> plan_buckets([Gradient(3, 12), Gradient(5, 20)], 100, 100)[0].members
        (1, 0)
    """
    groups = compute_buckets(
        [gradient.nbytes for gradient in gradients],
        bucket_bytes,
        first_bucket_bytes,
        kinds=[gradient.kind for gradient in gradients],
        order=order,
    )
    return tuple(
        BucketPlan(tuple(group), pack([gradients[i].numel for i in group], align=ALIGN_NUMEL))
        for group in groups
    )
