"""All ranks know the same of a step before it begins, whatever they have seen."""

import random

import torch
from torch import nn

from echelon.pipeline.boundary import flatten
from echelon.pipeline.step_specs import _MAX_KINDS, StepKinds


def begin(ranks: list[StepKinds], argument: object, *, training: bool = True) -> list[bool]:
    """Begin a step on all ranks, which differ only in what they were given."""
    facts = [kinds.facts((argument, rank), training=training) for rank, kinds in enumerate(ranks)]
    return [kinds.begin(facts, training=training).is_known for kinds in ranks]


def note(kinds: StepKinds, value: object) -> None:
    """What a link does with the value of a step that is not known."""
    assert kinds._last is not None
    spec, _ = flatten(value, "a test")
    specs, key = kinds._last.specs, (0, 0)
    if specs.is_known:
        return
    if key not in specs.values or not specs.values[key].is_identical(spec):
        specs.note_value(key, spec)


def test_a_kind_is_known_after_two_steps_that_gave_the_same() -> None:
    ranks = [StepKinds([], agrees=True) for _ in range(2)]
    for expected in (False, False, True, True):
        assert begin(ranks, torch.ones(2)) == [expected] * 2
        note(ranks[0], 7)
    assert begin(ranks, torch.ones(3)) == [False] * 2
    assert begin(ranks, torch.ones(2)) == [True] * 2
    assert begin(ranks, torch.ones(2), training=False) == [False] * 2
    assert begin(ranks, torch.ones(2).double()) == [False] * 2
    assert begin(ranks, 2) == [False] * 2
    assert begin(ranks, 2.0) == [False] * 2


def test_a_kind_that_has_varied_once_is_never_known() -> None:
    ranks = [StepKinds([], agrees=True) for _ in range(2)]
    for step in range(6):
        assert begin(ranks, "a") == [False] * 2
        note(ranks[1], min(step, 2))


def test_all_ranks_know_the_same_in_steps_by_chance() -> None:
    chance = random.Random(3)
    ranks = [StepKinds([], agrees=True) for _ in range(4)]
    known = 0
    for _ in range(600):
        argument = chance.choice(range(2 * _MAX_KINDS)) if chance.random() < 0.3 else "usual"
        answers = begin(ranks, argument)
        assert len(set(answers)) == 1
        known += answers[0]
        for kinds in ranks:
            note(kinds, chance.choice([1, 1, 1, 2]) if argument == 0 else 1)
    assert 300 < known < 600
    assert all(len(kinds._kinds) <= _MAX_KINDS for kinds in ranks)


def test_a_stage_that_is_frozen_or_in_another_mode_makes_another_kind() -> None:
    stage = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    kinds = StepKinds([stage], agrees=True)
    digests = {kinds.facts((), training=True)[0]}
    stage[0].weight.requires_grad_(False)
    digests.add(kinds.facts((), training=True)[0])
    stage[1].eval()
    digests.add(kinds.facts((), training=True)[0])
    with torch.autocast("cpu", torch.bfloat16):
        digests.add(kinds.facts((), training=True)[0])
    assert len(digests) == 4


def test_where_messages_have_tags_nothing_is_compared() -> None:
    kinds = StepKinds([], agrees=False)
    assert kinds.facts((torch.ones(2),), training=True) == (0, 0)
    assert not kinds.begin([], training=True).is_known
