"""Python values as JSON and tensors, and back: exactly, and nothing else.

Checkpoints hold values in this form, and ranks send them to each other in it: reading it makes
values of the kinds below, and never runs what is in it. ::

    encoding    a value into JSON and tensors
    decoding    and back, whoever wrote them
    bounded     JSON of unknown origin, judged before anything is made from it
    kinds       what writing and reading must agree on
    dtypes      which dtypes can be saved, and their names in files
    sizes       how large a tensor can be that somebody says there is

What JSON has, it is: None, bool, int of 64 bits, float that is finite, str, list, and dict with
keys that are str and do not begin with ``$``. Anything else is an object of one member::

    {"$int": "-0x1f"}                 an int of up to 4096 bits, in hex
    {"$float": "7ff8000000000000"}    a float that is no finite number: its bits, in hex
    {"$complex": [1.0, -1.0]}
    {"$bytes": "QUI="}                in base64
    {"$tuple": [...]}
    {"$range": [START, STOP, STEP]}
    {"$deque": [[...], MAXLEN]}
    {"$set": [...]}                   members in the order of their JSON
    {"$frozenset": [...]}
    {"$dict": [[KEY, VALUE], ...]}    a dict with other keys
    {"$ordered": [[KEY, VALUE], ...]}  an OrderedDict
    {"$counter": [[KEY, VALUE], ...]}  a Counter
    {"$tensor": PATH}                 the tensor that is saved under this path
    {"$ndarray": PATH}                the same as an array of NumPy
    {"$scalar": ["int8", "ff"]}       of NumPy: its dtype, and its bytes in hex, little-endian
    {"$dtype": "float32"}             of PyTorch, and so the others
    {"$device": "cuda:0"}
    {"$size": [2, 3]}

Keys and members of sets are numbers, str, bytes, None, dtypes, devices, and tuples of these.
A class that is not in this list, a subclass of one that is included, is refused when it is
written: it would not come back as itself. So nothing that is loaded is ever called by its name.
Attributes that somebody has put on a value are not part of it, nor is whether a tensor requires
gradients; tensors come back on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from echelon.values.bounded import Json
from echelon.values.decoding import Decoder
from echelon.values.encoding import SAVED, SENT, Encoder, Purpose

__all__ = ["SAVED", "SENT", "decode", "encode"]


def encode(value: object, where: str, purpose: Purpose = SAVED) -> tuple[Json, dict[str, Tensor]]:
    """``value`` as JSON, and its tensors by their paths in it, such as ``"state/0/mean"``.

    Tensors are not copied, nor are arrays that are contiguous and writable.
    Law: ``decode`` of both gives an equal value of the same types.

    Args:
        where: what the user calls it, for errors.
        purpose: what becomes of it.

    Raises:
        ArgumentError: something in it is of a type that cannot be saved, or contains itself, or
            there is too much of it. Names the place and what to give instead.

    Example:
        >>> encode({"betas": (0.9, 0.95)}, "optimizer")
        ({'betas': {'$tuple': [0.9, 0.95]}}, {})
    """
    encoder = Encoder(purpose)
    return encoder.encode(value, where, ""), encoder.tensors


def decode(found: Json, tensors: Mapping[str, Tensor], where: str) -> object:
    """The value that ``encode`` gave this JSON and these tensors for.

    Tensors are asked for by their paths as they are met, and are not copied: arrays share their
    memory.

    Args:
        where: the file and place that they come from, for errors.

    Raises:
        CheckpointCorrupt: ``encode`` gives no such JSON, or a tensor is not there.

    Example:
        >>> decode({"betas": {"$tuple": [0.9, 0.95]}}, {}, "optimizer")
        {'betas': (0.9, 0.95)}
    """
    return Decoder(tensors, where).decode(found, 0)
