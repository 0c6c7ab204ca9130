"""The generators: what they write, for which sizes, with what memory and what bubble."""

import pytest

from echelon.errors import ArgumentError
from echelon.pipeline import Kind, check, schedule
from echelon.pipeline.schedules.families import FAMILIES
from tests.pipeline import golden
from tests.pipeline.sizes import VARIANTS, every, fewest, make


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_schedule_is_what_its_golden_text_says(variant) -> None:
    assert golden.text(variant) == (golden.FOLDER / f"{variant}.csv").read_text()


def test_every_golden_text_belongs_to_a_schedule_and_every_name_has_one() -> None:
    assert {path.stem for path in golden.FOLDER.glob("*.csv")} == set(VARIANTS)
    assert {name for name, _, _ in VARIANTS.values()} == set(FAMILIES)


@pytest.mark.slow
def test_every_schedule_of_every_size_passes_every_rule() -> None:
    count = 0
    for found in [*every(range(1, 6), range(1, 8)), *every(range(3, 5), range(13, 22, 8))]:
        check(found)
        count += 1
    assert count > 600


def test_no_kind_of_schedule_mixes_whole_and_split_backwards_but_dualpipe_v() -> None:
    for variant in VARIANTS:
        kinds = {
            part.kind
            for order in make(variant, 3, max(7, fewest(variant, 3))).orders
            for item in order
            for part in item.parts
        }
        split = variant.startswith(("zb", "v-"))
        whole = {Kind.F, Kind.I, Kind.W} if split else {Kind.F, Kind.B}
        if variant.startswith("dualpipe"):
            whole = {Kind.F, Kind.B, Kind.I, Kind.W}
        elif variant.startswith("forward"):
            whole = {Kind.F}
        assert kinds == whole


# --- sizes and options that do not exist ---------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        (("1f2b", 2, 4, 2), {}, "there is no schedule '1f2b'; use one of gpipe, 1f1b, interleaved"),
        (("1f1b", 2, 0, 2), {}, "microbatches is 0; give a whole number >= 1"),
        (("1f1b", 2, -1, 2), {}, "microbatches is -1; give a whole number >= 1"),
        (("1f1b", 2, 1.5, 2), {}, "microbatches is 1.5; give a whole number >= 1"),
        (("1f1b", 2, True, 2), {}, "microbatches is True; give a whole number >= 1"),
        (("1f1b", 0, 4, 2), {}, "stages is 0; give a whole number >= 1"),
        (("1f1b", 2, 4, 0), {}, "world size is 0; give a whole number >= 1"),
        (("1f1b", 2, 4, 1), {}, "world size must be >= 2: '1f1b' puts one stage on each rank"),
        (
            ("gpipe", 4, 4, 2),
            {},
            "several stages a rank: interleaved, looped-bfs, zb, forward-only",
        ),
        (("1f1b", 2, 4, 4), {}, "cannot spread 2 stages over 4 ranks: cut the model into 4 stages"),
        (("interleaved", 5, 4, 2), {}, "cut the model into a multiple of 2 stages"),
        (("zb-v", 2, 4, 2), {}, "cut the model into 4 stages"),
        (("dualpipe-v", 4, 3, 2), {}, "dualpipe-v needs at least 4 microbatches on 2 ranks"),
        (("zb", 2, 4, 2), {"factor": 2}, "has no option 'factor'; its options are k"),
        (("1f1b", 2, 4, 2), {"k": 2}, "has no option 'k'; it has no options"),
        (("zb", 2, 4, 2), {"k": 0}, "k of schedule 'zb' is 0; it is >= 1"),
        (("interleaved", 4, 4, 2), {"factor": 3}, "is 3; it is 1 or 2"),
        (("dualpipe-v", 4, 4, 2), {"fused": 1}, "is 1; it is False or True"),
    ],
)
def test_a_size_or_an_option_that_does_not_exist_is_refused(arguments, options, sentence) -> None:
    with pytest.raises(ArgumentError) as info:
        schedule(*arguments, **options)
    assert sentence in str(info.value)
