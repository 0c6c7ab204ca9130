"""The links of the stages of a rank: with tags or ordered, whichever its group has."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.comm.group import Group
from echelon.pipeline.link import Link, TaggedLink
from echelon.pipeline.ordered_link import OrderedLink
from echelon.pipeline.schedules.dataflow import OUTPUT, crossings


def links_of(
    placement: Sequence[int], group: Group, num_microbatches: int
) -> tuple[dict[int, Link], dict[int, Link]]:
    """The links of this rank's stages to the previous and to the next stage, by stage."""
    to_previous: dict[int, Link] = {}
    to_next: dict[int, Link] = {}
    kind = TaggedLink if group.has_tags else OrderedLink
    for stage, left, right in crossings(placement):
        if group.rank not in (left, right):
            continue
        link = kind(group, left + right - group.rank, stage, num_microbatches)
        if group.rank == left:
            to_next[stage] = link
        else:
            to_previous[OUTPUT.target(stage)] = link
    return to_previous, to_next
