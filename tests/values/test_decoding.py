"""What cannot be saved is refused with what to give instead; what nobody saved is not loaded."""

import dataclasses
import datetime
import enum
import pathlib
from collections import UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from echelon.errors import ArgumentError, CheckpointCorrupt
from echelon.values.decoding import decode
from echelon.values.encoding import encode
from tests.values.test_encoding import passed_on, same


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    pass


@dataclasses.dataclass
class Config:
    rate: float = 0.1


def advance() -> None:
    pass


class WithState:
    def state_dict(self) -> dict[str, int]:
        return {}


Pair = namedtuple("Pair", "one other")
REFUSED: dict[str, tuple[object, str]] = {
    "enum": (Color.RED, r"Color, .*give its \.value"),
    "named tuple": (Pair(1, 2), r"Pair, .*give tuple\(\.\.\.\) of it"),
    "str": (Text("a"), r"Text, .*give str\(\.\.\.\) of it"),
    "bool of NumPy's str": (np.str_("a"), "str_, .*give its item"),
    "long long": (np.longlong(1), "longlong, .*give its item"),
    "dict": (UserDict(), "UserDict, .*give numbers, str"),
    "default dict": (defaultdict(int), "defaultdict, .*make the defaultdict after"),
    "dataclass": (Config(), "Config, .*dataclasses.asdict"),
    "class": (Config, "type, .*find the class by it"),
    "function": (advance, "function, .*find the function by it"),
    "generator": ((i for i in range(3)), "generator, .*how far it has come"),
    "bytearray": (bytearray(b"a"), r"bytearray, .*give bytes\("),
    "path": (pathlib.Path("a"), r"PosixPath, .*give str\("),
    "date": (datetime.date(2026, 1, 1), "datetime.date, .*isoformat"),
    "object": (object(), "is a object, .*give numbers"),
    "ellipsis": (..., "ellipsis, .*give numbers"),
    "state": (WithState(), r"WithState, .*give its state_dict\(\)"),
    "module": (nn.Linear(1, 1), r"Linear, .*give its state_dict\(\)"),
    "parameter": (nn.Parameter(torch.ones(1)), r"Parameter, .*give its \.detach\(\)"),
    "generator of torch": (torch.Generator(), r"Generator, .*give its get_state\(\)"),
    "generator of NumPy": (np.random.default_rng(), r"give its bit_generator\.state"),
    "masked array": (np.ma.array([1]), r"MaskedArray, .*give np\.array"),
    "surrogate": ("\udc80", "holds a surrogate"),
    "long int": (2**4096, "more than 4096 bits"),
    "sparse": (torch.eye(2).to_sparse(), "sparse, nested or quantized"),
    "meta": (torch.empty(2, device="meta"), "on meta, which has no values"),
    "float8_e4m3fnuz": (torch.zeros(1).to(torch.float8_e4m3fnuz), "fnuz cannot be saved"),
    "array of str": (np.array(["a"]), "is an array of <U1"),
    "array of objects": (np.array([None]), "is an array of object"),
    "array of big-endian": (np.zeros(2, ">f4"), "is an array of >f4"),
    "array of longdouble": (np.zeros(2, np.longdouble), "is an array of .*128"),
    "array of dates": (np.array(["2026"], "M8[D]"), "is an array of datetime64"),
    "array of records": (np.zeros(2, "i4,f4"), "is an array of"),
    "list as a key": ({(1, frozenset()): 1}, r"a key of .* is a tuple; give numbers"),
    "tensor in a set": ({torch.ones(1)}, "a member of .* is a Tensor; give numbers"),
    "range in a set": ({range(2)}, "a member of .* is a range; give numbers"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_not_come_back_as_itself_is_refused_with_what_to_give(kind: str) -> None:
    value, message = REFUSED[kind]
    with pytest.raises(ArgumentError, match=message) as caught:
        encode({"milestones": [1, 2, 3, value]}, "scheduler")
    assert "scheduler.milestones[3]" in str(caught.value)


def test_the_place_of_what_is_refused_is_named_as_python_would() -> None:
    for value, place in (
        ({"a": {"b c": {3: object()}}}, "it.a['b c'][3] is a object"),
        ([(0, deque([object()]))], "it[0][1][0] is a object"),
        ({object(): 1}, "a key of it is a object"),
        (object(), "it is a object"),
    ):
        with pytest.raises(ArgumentError) as caught:
            encode(value, "it")
        assert str(caught.value).startswith(place)


def circle_of_lists() -> Any:
    one: Any = []
    one.append([one])
    return one


def circle_of_dicts() -> Any:
    one: Any = {"a": ()}
    one["a"] = (one,)
    return one


@pytest.mark.parametrize("make", [circle_of_lists, circle_of_dicts])
def test_what_contains_itself_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentError, match="contains itself"):
        encode(make(), "it")


def test_the_same_list_in_two_places_is_no_circle() -> None:
    one = [1]
    assert passed_on([one, one, {"a": one}]) == [[1], [1], {"a": [1]}]


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap",
    [
        lambda value: [value],
        lambda value: (value,),
        lambda value: {"a": value},
        lambda value: {1: value},
        lambda value: deque([value]),
    ],
)
def test_64_containers_come_back_and_more_are_refused(wrap: Callable[[Any], Any]) -> None:
    assert same(passed_on(nested(64, wrap)), nested(64, wrap))
    for depth in (65, 10_000):
        with pytest.raises(ArgumentError, match="in more than 64 containers"):
            encode(nested(depth, wrap), "it")


@pytest.mark.slow
def test_lists_that_share_lists_do_not_grow_without_end() -> None:
    value: Any = [1] * 10
    for _ in range(40):
        value = [value] * 10
    with pytest.raises(ArgumentError, match="more than 1000000 values; give long lists as tensors"):
        encode(value, "it")


@pytest.mark.parametrize(
    "found",
    [
        {"$unknown": 1},
        {"$": 1},
        {"$tuple": [], "more": 1},
        {"a": 1, "$tuple": []},
        {"$object": "os.system"},
        {"$int": 5},
        {"$int": "5"},
        {"$int": "0x"},
        {"$int": "0x_1"},
        {"$int": "0x" + "f" * 1025},
        {"$int": " 0x1"},
        {"$float": "nan"},
        {"$float": "7ff8"},
        {"$float": 1.0},
        {"$complex": [1.0]},
        {"$complex": [1, 2]},
        {"$complex": [1.0, {"$int": "0x1"}]},
        {"$bytes": "a"},
        {"$bytes": "é==="},
        {"$bytes": None},
        {"$tuple": {}},
        {"$tuple": "ab"},
        {"$range": [0, 1]},
        {"$range": [0, 1, 0]},
        {"$range": [0, 1.0, 1]},
        {"$range": [0, True, 1]},
        {"$deque": [[], -1]},
        {"$deque": [[1, 2], 1]},
        {"$deque": [[], 2**70]},
        {"$deque": []},
        {"$deque": [{}, None]},
        {"$set": [1, 1]},
        {"$set": [1, True]},
        {"$set": [[]]},
        {"$set": [{"$set": []}]},
        {"$frozenset": [{"$tensor": "t"}]},
        {"$dict": [[1]]},
        {"$dict": [[1, 2, 3]]},
        {"$dict": [[1, 2], [1, 3]]},
        {"$dict": [[[], 2]]},
        {"$dict": {}},
        {"$ordered": [1]},
        {"$counter": None},
        {"$tensor": "gone"},
        {"$tensor": 1},
        {"$tensor": ["t"]},
        {"$ndarray": "gone"},
        {"$ndarray": "half"},
        {"$scalar": ["int8", "ffff"]},
        {"$scalar": ["int8", "fg"]},
        {"$scalar": ["int8", "f f"]},
        {"$scalar": ["object", "ff"]},
        {"$scalar": ["bool", "02"]},
        {"$scalar": "int8"},
        {"$dtype": "os"},
        {"$dtype": "Tensor"},
        {"$dtype": "torch.float32"},
        {"$device": "nowhere"},
        {"$device": "cuda:9999"},
        {"$device": "cpu; rm"},
        {"$device": 0},
        {"$size": [-1]},
        {"$size": [2**70]},
        {"$size": [True]},
        {"$size": 3},
    ],
    ids=str,
)
def test_what_encode_never_gives_is_refused(found: Any) -> None:
    own = {"t": torch.ones(1), "half": torch.ones(1, dtype=torch.bfloat16)}
    for inside in (found, [found], {"a": found}, {"$tuple": [found]}, {"$dict": [[0, found]]}):
        with pytest.raises(CheckpointCorrupt, match="a/file: has") as caught:
            decode(inside, own, "a/file")
        assert caught.value.path == "a/file"


def test_json_that_nests_too_deeply_is_refused() -> None:
    for wrap in (lambda one: [one], lambda one: {"a": one}, lambda one: {"$tuple": [one]}):
        with pytest.raises(CheckpointCorrupt, match="nests more than 64 deep"):
            decode(nested(66, wrap), {}, "x")


def test_keys_that_were_chosen_to_have_one_hash_are_refused() -> None:
    prime = 2**61 - 1  # Python's hash of an int is its remainder
    pairs: Any = [[{"$int": hex(2**64 + i * prime)}, 0] for i in range(100)]
    assert len({hash(int(key["$int"], 16)) for key, _ in pairs}) == 1
    with pytest.raises(CheckpointCorrupt):
        decode({"$dict": pairs}, {}, "x")
    some: Any = decode({"$dict": pairs[:10]}, {}, "x")
    assert len(some) == 10
