"""Schedules by name, with their sizes and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from echelon.checks import integer
from echelon.errors import ArgumentError
from echelon.pipeline.schedules import looped, vshaped
from echelon.pipeline.schedules.controllable import v_half, v_min
from echelon.pipeline.schedules.ir import Schedule


@dataclass(frozen=True, kw_only=True)
class Family:
    """A generator of schedules.

    Attributes:
        generate: called with ranks, microbatches, chunks and options.
        chunks: how many stages a rank holds; None for any number.
        options: the allowed values of each option.
    """

    generate: Callable[..., Schedule]
    chunks: int | None
    options: Mapping[str, range | tuple[bool, ...]] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "gpipe": Family(generate=lambda p, m, v: looped.gpipe(p, m), chunks=1),
    "1f1b": Family(generate=lambda p, m, v: looped.one_f_one_b(p, m), chunks=1),
    "interleaved": Family(
        generate=looped.interleaved, chunks=None, options={"factor": range(1, 3)}
    ),
    "looped-bfs": Family(generate=looped.looped_bfs, chunks=None),
    "zb": Family(generate=looped.zero_bubble, chunks=None, options={"k": range(1, 2**16)}),
    "zb-h1": Family(
        generate=lambda p, m, v: looped.zero_bubble(p, m, v, k=1, name="zb-h1"), chunks=1
    ),
    "zb-h2": Family(
        generate=lambda p, m, v: looped.zero_bubble(p, m, v, k=2, name="zb-h2"), chunks=1
    ),
    "zb-v": Family(generate=lambda p, m, v: vshaped.zb_v(p, m), chunks=2),
    "v-half": Family(generate=lambda p, m, v: v_half(p, m), chunks=2),
    "v-min": Family(generate=lambda p, m, v: v_min(p, m), chunks=2),
    "dualpipe-v": Family(
        generate=lambda p, m, v, fused=False: vshaped.dualpipe_v(p, m, fused=fused),
        chunks=2,
        options={"fused": (False, True)},
    ),
    "forward-only": Family(generate=looped.forward_only, chunks=None),
}


def schedule(
    name: str, stages: int, microbatches: int, ranks: int, **options: int | bool
) -> Schedule:
    """The schedule of a name for a size.

    Args:
        name: one of ``FAMILIES``.
        stages: into how many parts the model is cut; a multiple of ``ranks``.
        microbatches: into how many parts the batch is cut.
        ranks: over how many ranks the stages are spread.
        options: ``factor`` of interleaved (1 or 2), ``k`` of zb, ``fused`` of dualpipe-v.

    Raises:
        ArgumentError: a name or an option that does not exist, or a size that the schedule does
            not have.

    Example:
        >>> print(schedule("1f1b", stages=2, microbatches=2, ranks=2))
        rank 0 | 0F0 0F1 0B0 0B1
        rank 1 | 1F0 1B0 1F1 1B1
        >>> schedule("zb", stages=8, microbatches=16, ranks=4, k=2).num_stages
        8
    """
    if not isinstance(name, str) or name not in FAMILIES:
        raise ArgumentError(f"there is no schedule {name!r:.80}; use one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    stages, ranks = integer("stages", stages, low=1), integer("world size", ranks, low=1)
    microbatches = integer("microbatches", microbatches, low=1)
    _fits(name, family, stages, ranks)
    known = family.options
    for option, value in options.items():
        if option not in known:
            has = f"its options are {', '.join(known)}" if known else "it has no options"
            raise ArgumentError(f"schedule {name!r} has no option {option!r}; {has}")
        _option(name, option, value, known[option])
    return family.generate(ranks, microbatches, stages // ranks, **options)


def _fits(name: str, family: Family, stages: int, ranks: int) -> None:
    """Refuse a number of stages that cannot be spread over the ranks."""
    chunks = family.chunks
    if chunks == 1 and stages > ranks:
        many = ", ".join(other for other, f in FAMILIES.items() if f.chunks is None)
        raise ArgumentError(
            f"world size must be >= {stages}: {name!r} puts one stage on each rank, and there are "
            f"{stages} stages and {ranks} rank{'s' if ranks > 1 else ''}. Start {stages} ranks "
            "(also simulated ones), cut the model into fewer stages, or use a schedule with "
            f"several stages a rank: {many}"
        )
    if stages % ranks or (chunks is not None and stages != chunks * ranks):
        wanted = f"{chunks * ranks}" if chunks else f"a multiple of {ranks}"
        raise ArgumentError(
            f"schedule {name!r} cannot spread {stages} stages over {ranks} ranks: "
            f"cut the model into {wanted} stages, or change the number of ranks"
        )


def _option(name: str, option: str, value: object, allowed: range | tuple[bool, ...]) -> None:
    if type(value) is not type(allowed[0]) or value not in allowed:
        text = " or ".join(map(str, allowed)) if len(allowed) == 2 else f">= {allowed[0]}"
        raise ArgumentError(f"{option} of schedule {name!r} is {value!r:.80}; it is {text}")
