"""Whether ``.grad`` holds a reduced or a local gradient, and how that changes.

[Note: what .grad holds]
After a backward that reduces, ``.grad`` is a view of a bucket and holds the reduced gradient. The
next such backward sets it aside, reduces only the new gradient, and then adds the two. A backward
under ``no_sync``, and any with ``sync="manual"``, accumulates a local gradient. If ``.grad`` is
reduced, it is first brought to local units (a sum over ranks is divided by their number), so that
the next reduction, which takes everything in ``.grad``, gives it back unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.ddp.buckets import Bucket
from echelon.ddp.options import DDPOptions
from echelon.errors import StateError
from echelon.modules.autograd import will_accumulate

_SHARES = "gradients of earlier reductions"


@final
class GradientState:
    """Whether the views of buckets hold reduced or local gradients.

    Attributes:
        reduced: whether they hold reduced gradients.
        factor: what a reduced gradient is multiplied by to be the share of each rank.
        has_shares: whether some of the local gradients have such shares in them.
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], options: DDPOptions, size: int
    ) -> None:
        self.reduced = self.has_shares = False
        self.factor = options.divisor(size) / size
        self._named, self._options = named, options

    def check_sync(self, buckets: Sequence[Bucket]) -> None:
        """Refuse a ``sync_gradients`` without local gradients, or where these are unknown."""
        if not self.reduced or _has_local_gradients(buckets):
            return
        if not any(param.requires_grad for _, param in self._named):
            return  # all are frozen; the ranks compare whether that is so on all of them
        if self._options.sync == "overlap":
            raise StateError(
                "there are no local gradients to reduce: with sync='overlap' backward reduces "
                "them, and sync_gradients() is for those that no_sync() left local, or you wrote"
            )
        if self.factor != 1 and any(bucket.is_written() for bucket in buckets):
            raise StateError(
                "values were written into gradients that are reduced already, and no backward came "
                f"since; with reduction={self._options.reduction!r} it is unknown whether they are "
                "of this rank. Give each parameter a gradient of its own (param.grad = tensor), or "
                "call zero_grad(set_to_none=True) before you write"
            )

    def check_graph(self) -> None:
        """Refuse a ``backward`` that makes a graph of gradients: a reduction would cut it."""
        if self.accumulates():
            raise graph_is_lost()

    def accumulates(self) -> bool:
        """Whether the backward that runs now adds to a ``.grad``."""
        return any(param.requires_grad and will_accumulate(param) for _, param in self._named)

    def make_local(
        self, buckets: Sequence[Bucket], arrived: int | None, *, ranks_may_leave: bool
    ) -> None:
        """Bring reduced gradients to local units.

        ``arrived`` is as in ``Reducer.prepare_for_backward``. With ``ranks_may_leave``, which is so
        inside ``join``, the next reduction may be over fewer ranks.
        """
        if not self.reduced:
            return
        self.check_unmixed(buckets, arrived)
        if ranks_may_leave and self._options.reduction != "mean":
            self._check_shares(buckets)
        self.reduced, self.has_shares = False, True
        if self.factor != 1:
            with torch.no_grad():
                for bucket in buckets:
                    bucket.scale(self.factor)

    def complete_shares(
        self,
        reduced_before: dict[int, Tensor],
        group: Group,
        num_summed: int,
        *,
        has_shares: bool,
    ) -> None:
        """Complete ``reduced_before``, which not all ranks of ``group`` have set aside.

        All of them call it; ``num_summed`` is the number of gradients in the sums of the reduction
        that has just been made. Each gradient takes a broadcast, as this happens only where some
        ranks have kept gradients and others have not.
        """
        facts = has_shares, sorted(reduced_before)
        ranks = group.all_gather_object(facts, label=_SHARES)
        sources = {i: rank for rank in reversed(range(len(ranks))) for i in ranks[rank][1]}
        # Of the earlier reduced gradient R, each rank with shares had factor * R in what it sent.
        # So what came back has sent * R in it: all of R if every rank has shares. The rest is
        # added here.
        num_sent = sum(has_shares for has_shares, _ in ranks)
        sent = num_sent * self.factor / self._options.divisor(num_summed)
        for i, source in sorted(sources.items()):
            if i not in reduced_before:
                reduced_before[i] = torch.empty_like(self._named[i][1])
            group.broadcast(reduced_before[i], source, label=_SHARES)
            reduced_before[i].mul_(1 - sent)

    def _check_shares(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            for param, view in zip(bucket.params, bucket.grad_views, strict=True):
                if param.grad is view and bool(view.any()):
                    raise StateError(
                        "inside join() a backward that does not reduce came on top of gradients "
                        f"that are reduced already; with reduction={self._options.reduction!r} the "
                        "share of this rank in them depends on how many ranks take part in the "
                        "next reduction, which nobody knows. Call zero_grad() after each "
                        'reduction, or use reduction="mean"'
                    )

    def check_unmixed(self, buckets: Sequence[Bucket], arrived: int | None) -> None:
        """Refuse a new gradient that was added to a reduced one before they could be told apart."""
        if arrived is None or self.factor == 1:
            return
        name, param = self._named[arrived]
        if any(param.grad is view for bucket in buckets for view in bucket.grad_views):
            raise StateError(
                f"parameter {name!r} got a new gradient on top of a reduced one in a backward that "
                "no output of forward announced: return tensors from forward, in tuples, lists, "
                "dicts or dataclasses, or call zero_grad(set_to_none=True) before backward"
            )


def graph_is_lost() -> StateError:
    """The error of ``backward(create_graph=True)``."""
    return StateError(
        "gradients with a graph (create_graph=True) cannot be reduced: what the ranks have reduced "
        "has none. Take the inner derivative by torch.autograd.grad(..., create_graph=True), which "
        "is of this rank, and let backward() of the whole loss reduce; or call it under no_sync()"
    )


def kept_differ() -> StateError:
    """The error where ranks differ in what they keep and nobody may wait to make it equal."""
    return StateError(
        "some ranks have kept the reduced gradients in .grad and added to them, others have not, "
        "so the sums would differ: let all ranks call zero_grad(), or enter no_sync(), at the same "
        "steps"
    )


def _has_local_gradients(buckets: Sequence[Bucket]) -> bool:
    return any(
        param.grad is not None and param.grad is not view
        for bucket in buckets
        for param, view in zip(bucket.params, bucket.grad_views, strict=True)
    )
