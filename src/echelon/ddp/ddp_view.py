"""What ``ec.show`` says about a ``DDP``: its buckets, and what this rank holds."""

from __future__ import annotations

from math import prod

from echelon.ddp.api import DDP
from echelon.modules.compiled import plain_name
from echelon.page import (
    Extent,
    OwnedBuffer,
    TextTable,
    View,
    ViewPart,
    bytes_text,
    ownership,
    view_of,
)

_MOST_BUFFERS = 40  # of the picture and of the table


@view_of.register
def _(shown: DDP) -> View:
    group, buckets = shown.group, shown.buckets
    sizes = {
        plain_name(name): (tuple(p.shape), p.nbytes) for name, p in shown.module.named_parameters()
    }
    wire = sum(bucket.nbytes for bucket in buckets)
    bars = [
        OwnedBuffer(
            name=f"bucket {index}",
            extents=[
                Extent(
                    label=f"{name} {shape}",
                    nbytes=prod(shape) * bucket.dtype.itemsize,
                    owner=None,
                )
                for name, (shape, _) in ((name, sizes[name]) for name in bucket.names)
            ],
        )
        for index, bucket in enumerate(buckets[:_MOST_BUFFERS])
    ]
    parts = [
        ViewPart(
            title="Who has which bytes",
            about="Every rank has all parameters. Gradients travel in buckets, in this order.",
            content=ownership(bars),
        ),
        ViewPart(
            title="Sent in a step",
            about="One all-reduce for each bucket, while backward runs.",
            content=TextTable(
                heads=["bucket", "gradients", "dtype", "size", "of"],
                rows=[
                    [
                        str(index),
                        str(len(bucket.names)),
                        str(bucket.dtype).removeprefix("torch."),
                        bytes_text(bucket.nbytes),
                        _names(bucket.names),
                    ]
                    for index, bucket in enumerate(buckets[:_MOST_BUFFERS])
                ],
            ),
        ),
        ViewPart(title="Memory of this rank", content=_memory(shown, wire)),
    ]
    return View(
        title=f"DDP of {type(shown.module).__name__}: a copy on each of {group.size} ranks",
        facts=[
            (f"{sum(prod(shape) for shape, _ in sizes.values()):,}", "parameters"),
            (bytes_text(sum(nbytes for _, nbytes in sizes.values())), "of parameters on each rank"),
            (bytes_text(wire), f"reduced in a step; buckets: {len(buckets)}"),
        ],
        parts=parts,
    )


def _names(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def _memory(shown: DDP, wire: int) -> TextTable:
    gradients = sum(p.grad.nbytes for p in shown.module.parameters() if p.grad is not None)
    rows = [
        ["parameters", bytes_text(sum(p.nbytes for p in shown.module.parameters()))],
        ["module buffers", bytes_text(sum(buffer.nbytes for buffer in shown.module.buffers()))],
        ["gradients now, views of buckets", bytes_text(gradients)],
        ["buckets", bytes_text(wire)],
    ]
    return TextTable(heads=["what", "bytes"], rows=rows)
