"""What ``ec.show`` says about a ``Plan``: where each rank is on its axes, and the schedule."""

from __future__ import annotations

from html import escape

from echelon.comm.mesh import coordinates
from echelon.page import OWNER_COLOURS, Picture, TextTable, View, ViewPart, view_of
from echelon.plans.plans import Plan

_MOST_ROWS = 32
_MOST_DRAWN = 256  # ranks
_BOX, _GAP, _TOP = 30, 4, 22  # pixels


@view_of.register
def _(shown: Plan) -> View:
    axes = {"pp": shown.pp, "dp": shown.dp, "shard": shown.shard}
    rows = [
        [
            str(rank),
            *map(str, coordinates(rank, axes).values()),
            f"part {rank % shown.data_size} of {shown.data_size}",
        ]
        for rank in range(min(shown.num_ranks, _MOST_ROWS))
    ]
    more = "" if shown.num_ranks <= _MOST_ROWS else f"The first {_MOST_ROWS} of {shown.num_ranks}."
    parts = []
    if shown.num_ranks <= _MOST_DRAWN:
        about = (
            "A column of boxes for each stage. Ranks in a row have shards of the same parameters; "
            "rows are replicas with other batches."
        )
        parts.append(ViewPart(title="Ranks", about=about, content=_mesh(shown)))
    table = TextTable(heads=["rank", *axes, "reads"], rows=rows)
    parts.append(ViewPart(title="Where each rank is", about=more, content=table))
    if shown.pp > 1:
        parts += view_of(shown.make_schedule()).parts
    facts = [(str(shown.num_ranks), "ranks"), (str(shown.data_size), "parts of a batch")]
    return View(title=f"Plan {shown}", facts=facts, parts=parts)


def _mesh(plan: Plan) -> Picture:
    """A block of boxes for each stage: a row for each replica, in it a box for each shard."""
    block = plan.shard * (_BOX + _GAP)
    width, height = plan.pp * (block + 34) + 8, _TOP + plan.dp * (_BOX + _GAP) + 4
    boxes, lines = [], list[str]()
    for stage in range(plan.pp):
        left = 4 + stage * (block + 34)
        title = escape(f"pp {stage}" if plan.pp > 1 else "")
        boxes.append(f'<text x="{left}" y="14" fill="currentColor" font-size="12">{title}</text>')
        for replica in range(plan.dp):
            for shard in range(plan.shard):
                rank = (stage * plan.dp + replica) * plan.shard + shard
                x, y = left + shard * (_BOX + _GAP), _TOP + replica * (_BOX + _GAP)
                colour = OWNER_COLOURS[shard % len(OWNER_COLOURS)]
                tip = f"rank {rank}: pp {stage}, dp {replica}, shard {shard}"
                boxes.append(
                    f'<g><title>{tip}</title><rect x="{x}" y="{y}" width="{_BOX}" height="{_BOX}" '
                    f'rx="4" fill="{colour}"/><text x="{x + _BOX // 2}" y="{y + 20}" fill="#fff" '
                    f'font-size="12" text-anchor="middle">{rank}</text></g>'
                )
    digits = len(str(plan.num_ranks - 1))
    for replica in range(plan.dp):
        blocks = []
        for stage in range(plan.pp):
            first = (stage * plan.dp + replica) * plan.shard
            ranks = (f"{rank:>{digits}}" for rank in range(first, first + plan.shard))
            blocks.append(f"[{' '.join(ranks)}]")
        lines.append(f"dp {replica}   {'  '.join(blocks)}")
    heads = "  ".join(
        f"pp {stage}".ljust(plan.shard * (digits + 1) + 1) for stage in range(plan.pp)
    )
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="sans-serif">\n' + "\n".join(boxes) + "\n</svg>"
    )
    return Picture(svg=svg, text="\n".join([f"       {heads}".rstrip(), *lines]))
