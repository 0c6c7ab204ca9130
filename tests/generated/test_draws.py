"""Nothing is left out of what is drawn: every threshold, every size, every option."""

import inspect

import echelon as ec
from tests.generated.draw import draw_case
from tests.generated.thresholds import DRAWN, FIXED, draw_thresholds, numbers, thresholds_set
from tests.generated.trees import walk

CONSTRUCTORS = {"ddp": ec.DDP, "fsdp": ec.FSDP, "pipeline": ec.Pipeline}

# Arguments that no case draws: where they are tested.
ELSEWHERE = {
    "module": "every case has its own",
    "group": "every case has its own",
    "stages": "every case has its own",
    "replicate": "drawn with the hybrid strategies",
    "materialize": "a model on meta: tests/fsdp/test_build, test_stage_initialization",
    "loss_fn": "every case has its own",
    "schedule_options": "tests/pipeline/schedules",
}


def test_every_threshold_is_drawn() -> None:
    found = dict(numbers())
    assert sorted(DRAWN.keys() - found.keys()) == []
    forgotten = {
        place: value
        for place, value in found.items()
        if place not in DRAWN and not any(part in place for part in FIXED)
    }
    assert forgotten == {}, "draw it, or say in FIXED why nothing depends on it"
    unknown = [part for part in FIXED if not any(part in place for place in found)]
    assert unknown == []


def test_thresholds_are_set_where_they_are_compared_and_restored() -> None:
    values = {place: drawn[0] for place, drawn in DRAWN.items()}
    before = dict(numbers())
    with thresholds_set(values):
        assert dict(numbers()).items() >= values.items()
    assert dict(numbers()) == before
    assert {place for block in range(40) for place in draw_thresholds(block)} == set(DRAWN)
    assert any(draw_thresholds(block) == {} for block in range(4))


def test_parameters_of_1_kib_to_64_mib_are_drawn() -> None:
    sizes = {
        8 * op["numel"]
        for seed in range(1500)
        for part in walk(draw_case(seed)["model"])
        for op in part.get("ops", [])
        if op["op"] == "large"
    }
    assert min(sizes) <= 2**10 + 8
    assert max(sizes) >= 2**26 - 8
    assert {2**20 - 8, 2**20, 2**20 + 8} <= sizes


def test_every_option_of_every_constructor_is_drawn() -> None:
    for technique, made in CONSTRUCTORS.items():
        drawn = {name for seed in range(600) for name in draw_case(seed, technique)["options"]}
        names = set(inspect.signature(made).parameters) - ELSEWHERE.keys()
        assert names - drawn == set(), technique
