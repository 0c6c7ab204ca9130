"""Values come back exactly as they were, and what would not is refused with what to give."""

import json
import random
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from echelon.values.decoding import decode
from echelon.values.encoding import encode
from echelon.values.value_types import DTYPES


def bits(value: float) -> bytes:
    return struct.pack(">d", value)


def same(one: Any, other: Any) -> bool:
    """Whether two values are of the same types and have the same bits, through and through."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and not isinstance(one, np.generic):
        return bits(one) == bits(other)
    if isinstance(one, complex) and not isinstance(one, np.generic):
        return bits(one.real) + bits(one.imag) == bits(other.real) + bits(other.imag)
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and bytes_of(one) == bytes_of(other)
        )
    if isinstance(one, np.ndarray | np.generic):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one.items(), other.items()))
    if isinstance(one, set | frozenset):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    if isinstance(one, deque) and one.maxlen != other.maxlen:
        return False
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def passed_on(value: object) -> object:
    """A value after it was saved: its JSON as text, its tensors as they are."""
    found, tensors = encode(value, "it")
    text = json.dumps(found, allow_nan=False)
    return decode(json.loads(text), tensors, "x")


floats = st.floats() | st.sampled_from(
    [
        struct.unpack(">d", bytes.fromhex(text))[0]
        for text in ("7ff8000000000001", "fff0000000000000")
    ]
)
texts = st.text(max_size=4) | st.sampled_from(
    ["$tensor", "$", "a/b", "0", "#0", ".", "", "a" * 100]
)
simple = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**4096) + 1, 2**4096 - 1)
    | st.sampled_from([2**63 - 1, 2**63, -(2**63), 2**64])
    | floats
    | st.complex_numbers()
    | st.binary(max_size=4)
    | texts
    | st.sampled_from([torch.float32, torch.bool, torch.complex128, torch.qint8])
    | st.sampled_from([torch.device("cpu"), torch.device("cuda:7"), torch.device("meta")])
)
keys = simple | st.tuples(simple, simple)
scalars = st.sampled_from(
    [
        *(np.float32("nan"), np.float64(1.5), np.float16(-0.0), np.complex128(1 - 2j)),
        *(np.int8(-1), np.int64(3), np.uint64(2**64 - 1), np.complex64(1j)),
        *(np.bool_(True), np.bool_(False)),
    ]
)
tensors = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda name: st.lists(st.integers(0, 3), max_size=3).map(
        lambda shape: torch.ones(shape).to(DTYPES[name])
    )
)
arrays = st.sampled_from(
    [
        *(
            np.arange(6).reshape(2, 3),
            np.array(1.5),
            np.zeros((0, 2), np.complex64),
            np.array([1j]),
        ),
        *(np.arange(6)[::-1], np.arange(6).reshape(2, 3).T, np.array([2**63], np.uint64)),
    ]
)
ranges = st.builds(range, st.integers(), st.integers(), st.integers(1, 5))
leaves = simple | scalars | tensors | arrays | ranges | st.just(torch.Size([2, 0]))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, max_size=3)
    named = st.dictionaries(texts, inner, max_size=3)
    keyed = st.dictionaries(keys, inner, max_size=3)
    return (
        some
        | some.map(tuple)
        | some.map(deque)
        | some.map(lambda values: deque(values, 5))
        | named
        | keyed
        | keyed.map(OrderedDict)
        | keyed.map(Counter)
        | st.sets(keys, max_size=3)
        | st.frozensets(keys, max_size=3)
    )


values = st.recursive(leaves, containers, max_leaves=10)


@given(values)
def test_a_value_comes_back_exactly(value: object) -> None:
    assert same(passed_on(value), value)


@given(values)
def test_the_tensors_of_a_value_are_found_in_its_json_and_nowhere_else(value: object) -> None:
    found, own = encode(value, "it")

    def paths(at: Any) -> list[str]:
        if isinstance(at, dict):
            ends = [at[key] for key in ("$tensor", "$ndarray") if key in at]
            return ends + [path for inner in at.values() for path in paths(inner)]
        return [path for inner in at for path in paths(inner)] if isinstance(at, list) else []

    assert sorted(paths(found)) == sorted(own)
    assert all(0 < len(path) <= 512 and path.isprintable() for path in own)


def test_paths_say_where_a_tensor_is() -> None:
    one = torch.ones(1)
    value = {"state": {0: {"mean": one}, "a/b": one}, "list": [1, (one, one)], "": one}
    _, own = encode(value, "optimizer")
    assert list(own) == ["state/0/mean", "state/#1", "list/1/0", "list/1/1", "#2"]
    assert list(encode(one, "it")[1]) == ["."]


def test_a_path_that_would_be_too_long_is_a_number() -> None:
    value: Any = torch.ones(1)
    for _ in range(20):
        value = {"a" * 60: value, "b": torch.zeros(1)}
    found, own = encode(value, "it")
    assert any(path.startswith("#/") for path in own)
    assert same(decode(found, own, "it"), value)


def test_tensors_and_arrays_are_not_copied() -> None:
    tensor, array = torch.zeros(3), np.zeros(3)
    found, own = encode({"t": tensor, "a": array}, "it")
    assert own["t"] is tensor
    back: Any = decode(found, own, "it")
    assert back["t"] is tensor
    array[1] = 5.0
    assert own["a"].tolist() == [0, 5, 0]
    assert np.shares_memory(back["a"], array)


def test_an_array_that_is_read_only_is_saved_without_a_warning() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    assert same(passed_on(array), array)


def test_json_of_equal_sets_is_equal_whatever_their_order() -> None:
    ways: list[set[int]] = []
    for numbers in ([0, 8, 16], [16, 8, 0]):  # they fall into the same place of a small table
        ways.append(set())
        for number in numbers:
            ways[-1].add(number)
    assert list(ways[0]) != list(ways[1])
    assert encode(ways[0], "it") == encode(ways[1], "it")


def test_random_states_come_back() -> None:
    states = [random.Random(1).getstate(), np.random.RandomState(1).get_state()]
    states += [np.random.default_rng(1).bit_generator.state, torch.get_rng_state()]
    assert same(passed_on(states), states)


MODEL = nn.Linear(2, 2)
OPTIMIZER = torch.optim.AdamW(MODEL.parameters(), lr=0.1, betas=(0.9, 0.95))
SCHEDULERS: dict[str, Callable[[], Any]] = {
    "MultiStepLR": lambda: lr_scheduler.MultiStepLR(OPTIMIZER, [30, 80, 80]),
    "OneCycleLR": lambda: lr_scheduler.OneCycleLR(OPTIMIZER, 0.1, total_steps=9),
    "ReduceLROnPlateau": lambda: lr_scheduler.ReduceLROnPlateau(OPTIMIZER),
    "LambdaLR": lambda: lr_scheduler.LambdaLR(OPTIMIZER, lambda epoch: 0.5),
    "SequentialLR": lambda: lr_scheduler.SequentialLR(
        OPTIMIZER,
        [lr_scheduler.LinearLR(OPTIMIZER), lr_scheduler.CosineAnnealingLR(OPTIMIZER, 3)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_states_of_schedulers_come_back(name: str) -> None:
    state = SCHEDULERS[name]().state_dict()
    assert same(passed_on(state), state)


def test_the_states_of_models_and_optimizers_come_back() -> None:
    MODEL(torch.ones(1, 2)).sum().backward()
    OPTIMIZER.step()
    for one in (OPTIMIZER, nn.BatchNorm1d(3)):
        assert same(passed_on(one.state_dict()), one.state_dict())
