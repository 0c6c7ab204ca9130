"""The values of all samples of a batch from those that each rank has, in the order of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from echelon.comm.group import Group
from echelon.comm.streams import device_of
from echelon.errors import ArgumentError

# A node of a structure, as it is sent: its kind, and what belongs to the kind.
_Node = tuple[Any, ...]
# Errors repeat it: a rank without samples may be here while others run a forward of FSDP.
_LABEL = "samples (FSDP: call the model inside model.join(), also where the batch is None)"


class BatchReader(Protocol):
    """A sampler or a stream: it knows who has how many samples of the current batch."""

    @property
    def group(self) -> Group | None:
        """The ranks that share a batch."""

    @property
    def shares(self) -> tuple[int, ...]:
        """The number of samples of the current batch that each rank has."""


def gather_samples(values: Any, sampler: BatchReader) -> Any:
    """The values of all samples of the current batch, on every rank.

    All ranks call it, in the loop over the batches of ``sampler``.

    Law: over an epoch the results, end to end, have each sample exactly once, in the order of the
    sampler, which without ``shuffle`` is that of the data, on any number of ranks. Nothing is
    padded and nothing has to be cut off.

    Args:
        values: of this rank's samples. A tensor or an array of NumPy has samples along dim 0, and a
            list has one entry a sample, of any type that can be sent: a text, or a dict of tensors
            of its own shape. Dicts and tuples hold any of these. None on a rank without a sample.
        sampler: a ``ResumableSampler`` or a ``SampleStream`` with a group.

    Returns:
        The same structure for the whole batch. Tensors are detached, on the device that they came
        from; mappings are dicts, and named tuples are tuples.

    Raises:
        ArgumentError: on every rank: the values are not those of this rank's samples, or have
            another structure, dtype or shape than those of another rank.

    Example:
        >>> import torch
        >>> import echelon as ec
        >>> def evaluate(world):
        ...     sampler = ec.ResumableSampler(5, 4, world.group, shuffle=False)
        ...     loader = torch.utils.data.DataLoader(range(5), batch_sampler=sampler)
        ...     squares = []
        ...     for batch in sampler.batches(loader):
        ...         squares += gather_samples(None if batch is None else batch**2, sampler).tolist()
        ...     return squares
        >>> ec.run(evaluate, 2)
        [[0, 1, 4, 9, 16], [0, 1, 4, 9, 16]]
    """
    group, shares = sampler.group, sampler.shares
    if group is None:
        if len(shares) > 1:
            raise ArgumentError(
                "the sampler was given (rank, size), so nothing can be gathered: give it a group"
            )
        return _merged([_checked(values, shares[0])], None)
    node = _checked(values, shares[group.rank])
    nodes = group.all_gather_object(node, label=_LABEL)
    for rank, other in zip(group.ranks, nodes, strict=True):
        if other[0] == "problem":
            raise ArgumentError(f"rank {rank}: {other[1]}")
    given = {
        rank: other for rank, other, share in zip(group.ranks, nodes, shares, strict=True) if share
    }
    first, *others = given
    for rank in others:
        difference = _difference(given[first], given[rank], "values")
        if difference is not None:
            name, there, here = difference
            raise ArgumentError(f"{name} is {there} on rank {first}, and {here} on rank {rank}")
    return _merged([*given.values()], group.device)


def _checked(values: Any, share: int) -> _Node:
    """The node of this rank's values; what is wrong with them is told to all."""
    if not share:
        if values is None:
            return ("none",)
        return ("problem", "the values are those of no sample of this rank: give None")
    try:
        return _node(values, share, "values")
    except ArgumentError as error:
        return ("problem", str(error))


def _node(value: Any, share: int, name: str) -> _Node:
    if isinstance(value, Tensor):
        _check_share(value.shape[0] if value.dim() else None, share, name)
        return ("tensor", value.detach().cpu(), value.device)
    if isinstance(value, np.ndarray):
        _check_share(value.shape[0] if value.ndim else None, share, name)
        return ("array", value)
    if isinstance(value, list):
        _check_share(len(value), share, name)
        return ("list", value)
    if isinstance(value, Mapping):
        return ("dict", [*value], [_node(value[key], share, f"{name}[{key!r}]") for key in value])
    if isinstance(value, tuple):
        return ("tuple", [_node(item, share, f"{name}[{i}]") for i, item in enumerate(value)])
    raise ArgumentError(
        f"{name} is {value!r:.80}; give a tensor, an array or a list with an entry for each of the "
        f"{share} samples of this rank, or a dict or tuple of these"
    )


def _check_share(num_given: int | None, share: int, name: str) -> None:
    if num_given != share:
        given = "is one number" if num_given is None else f"has {num_given} samples"
        raise ArgumentError(f"{name} {given}, and this rank has {share} of this batch")


def _difference(node: _Node, other: _Node, name: str) -> tuple[str, str, str] | None:
    """Where two nodes cannot be put together; None if they can."""
    if _brief(node) != _brief(other):
        return name, _brief(node), _brief(other)
    if node[0] == "dict":
        columns = zip(node[1], node[2], other[2], strict=True)
        pairs = [(f"{name}[{key!r}]", *both) for key, *both in columns]
    elif node[0] == "tuple":
        both_items = enumerate(zip(node[1], other[1], strict=True))
        pairs = [(f"{name}[{i}]", *both) for i, both in both_items]
    else:
        pairs = []
    differences = (_difference(here, there, inside) for inside, here, there in pairs)
    return next((difference for difference in differences if difference is not None), None)


def _brief(node: _Node) -> str:
    """What the nodes of all ranks have in common."""
    kind, content = node[0], node[1]
    if kind in ("tensor", "array"):
        shape = ", ".join(map(str, ("samples", *content.shape[1:])))
        return f"{'a tensor' if kind == 'tensor' else 'an array'} of {content.dtype}[{shape}]"
    if kind == "dict":
        return f"a dict of {content!r:.200}"
    return f"a tuple of {len(content)}" if kind == "tuple" else "a list"


def _merged(nodes: Sequence[_Node], device: torch.device | None) -> Any:
    """Put the values of ranks together, in their order."""
    kind, content = nodes[0][0], nodes[0][1]
    if kind == "problem":
        raise ArgumentError(content)
    if kind == "tensor":
        joined = torch.cat([node[1] for node in nodes])
        source: torch.device = nodes[0][2]
        return joined.to(source if device_of(source).is_host or device is None else device)
    if kind == "array":
        return np.concatenate([node[1] for node in nodes])
    if kind == "list":
        return [item for node in nodes for item in node[1]]
    if kind == "dict":
        columns = zip(*(node[2] for node in nodes), strict=True)
        return {key: _merged(column, device) for key, column in zip(content, columns, strict=True)}
    return tuple(
        _merged(column, device) for column in zip(*(node[1] for node in nodes), strict=True)
    )
