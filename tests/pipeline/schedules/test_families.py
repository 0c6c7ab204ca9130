"""The generators: what they write, for which sizes, with what memory and what bubble."""

from fractions import Fraction

import pytest

from echelon.errors import ArgumentError
from echelon.pipeline import Kind, check, schedule, simulate
from echelon.pipeline.schedules.families import FAMILIES
from tests.pipeline import golden
from tests.pipeline.sizes import VARIANTS, every, fewest, make


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_schedule_is_what_its_golden_text_says(variant) -> None:
    assert golden.text(variant) == (golden.FOLDER / f"{variant}.csv").read_text()


def test_every_golden_text_belongs_to_a_schedule_and_every_name_has_one() -> None:
    assert {path.stem for path in golden.FOLDER.glob("*.csv")} == set(VARIANTS)
    assert {name for name, _, _ in VARIANTS.values()} == set(FAMILIES)


def test_every_schedule_of_every_size_passes_every_rule() -> None:
    count = 0
    for found in [*every(range(1, 6), range(1, 8)), *every(range(3, 5), range(13, 22, 8))]:
        check(found)
        count += 1
    assert count > 600


# --- formulas: p ranks, m microbatches, v chunks; equal stages with F = I = W ------------------


def first_group(p: int, m: int) -> int:
    return -(-m // max(1, m // p))


def sizes(least: int = 0) -> list[tuple[int, int]]:
    """From 2 to 8 ranks; fewer microbatches than ranks, multiples, neighbours of both, up to 40."""
    return [
        (p, m)
        for p in (2, 3, 5, 8)
        for m in sorted({1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 3, 40})
        if m >= max(1, least * p)
    ]


def close(found: float, wanted: Fraction) -> bool:
    return abs(found - wanted) < 1e-12


def peaks_of(found) -> list[Fraction]:
    return [Fraction(peak).limit_denominator(64) for peak in simulate(found).peak]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_schedules_of_one_chunk_have_their_memory_and_their_bubble(name) -> None:
    for p, m in sizes():
        found = simulate(schedule(name, p, m, p))
        wanted = [m] * p if name == "gpipe" else [min(m, p - r) for r in range(p)]
        assert list(found.peak) == wanted
        assert close(found.span_bubble, Fraction(p - 1, m + p - 1))


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("factor", [1, 2])
def test_interleaved_has_its_memory_and_its_bubble(v, factor) -> None:
    for p, m in sizes():
        found, g = simulate(schedule("interleaved", v * p, m, p, factor=factor)), first_group(p, m)
        for r, peak in enumerate(found.peak):
            bound = Fraction((v - 1) * g + factor * (p - 1 - r) + 1, v)
            assert close(peak, min(Fraction(m), bound))
        if m >= p:
            assert close(found.span_bubble, Fraction(p - 1, v * m + p - 1))


@pytest.mark.parametrize("v", [1, 2, 4])
def test_looped_bfs_and_forward_only_have_their_memory_and_their_bubble(v) -> None:
    for p, m in sizes(least=1):
        found = simulate(schedule("looped-bfs", v * p, m, p))
        assert set(found.peak) == {m}
        assert close(found.span_bubble, Fraction(p - 1, v * m + p - 1))
        forward = simulate(schedule("forward-only", v * p, m, p))
        assert set(forward.peak) == {0}
        assert close(forward.span_bubble, Fraction(p - 1, v * m + p - 1))


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_zb_of_k_1_has_its_memory_and_its_bubble(v) -> None:
    for p, m in sizes(least=1):
        found, g = simulate(schedule("zb", v * p, m, p)), first_group(p, m)
        wanted = Fraction((v - 1) * g + p, v)
        assert all(close(peak, min(Fraction(m), wanted)) for peak in found.peak)
        assert close(found.span_bubble, Fraction(p - 1, 3 * v * m + p - 1))
        assert close(found.own_bubble, Fraction(p - 1, 3 * v * m + p - 1))


def test_zb_h1_and_zb_h2_are_zb_of_one_chunk() -> None:
    for p, m in sizes():
        for k, name in ((1, "zb-h1"), (2, "zb-h2")):
            assert schedule(name, p, m, p).orders == schedule("zb", p, m, p, k=k).orders


def test_zb_h2_leaves_no_rank_idle_between_its_ends_and_needs_twice_the_memory() -> None:
    for p, m in sizes():
        if m >= 2 * p - 1:
            found = simulate(schedule("zb-h2", p, m, p))
            assert found.peak == (2 * p - 1,) * p
            assert close(found.own_bubble, Fraction(0))
            assert close(found.span_bubble, Fraction(p - 1, 3 * m + p - 1))


@pytest.mark.parametrize(("v", "m"), [(2, 16), (3, 17), (4, 23)])
def test_a_larger_k_hides_messages_for_the_memory_that_its_docstring_says(v, m) -> None:
    for p in (2, 4, 8):
        g = first_group(p, m)
        found = simulate(schedule("zb", v * p, m, p, k=2))
        assert all(close(peak, Fraction((v - 1) * g + 2 * (p - 1) + 1, v)) for peak in found.peak)
    costs = {"F": 1 / v, "I": 1 / v, "W": 1 / v, "hop": 0.1}
    loose, tight = (simulate(schedule("zb", 8 * v, 32, 8, k=k), costs) for k in (2, 1))
    assert loose.makespan < tight.makespan


def test_zb_v_leaves_no_rank_idle_and_needs_p_everywhere() -> None:
    for p, m in sizes():
        found = simulate(schedule("zb-v", 2 * p, m, p))
        assert max(found.peak) <= p
        if m >= 2 * p - 1:
            assert found.peak == (p,) * p
            assert close(found.own_bubble, Fraction(0))
            assert close(found.span_bubble, Fraction(p - 1, 6 * m + p - 1))


@pytest.mark.parametrize("fused", [False, True])
def test_dualpipe_v_has_its_memory_and_its_bubble(fused) -> None:
    for p, m in sizes(least=2):
        found = simulate(schedule("dualpipe-v", 2 * p, m, p, fused=fused))
        assert set(found.peak) == {p + 0.5}
        assert close(found.span_bubble, Fraction(p - 1, (3 if fused else 6) * m + p - 1))


# Peaks and idle time in forwards of a rank's share, as the authors' generator gives them.
@pytest.mark.parametrize(
    ("name", "p", "peak", "idle"),
    [
        ("v-min", 4, 2, 5.5),
        ("v-min", 6, 3, 8.5),
        ("v-min", 8, 4, 13.5),
        ("v-min", 12, 5, 20.5),
        ("v-min", 16, 6, 29.5),
        ("v-half", 4, 3, 2.5),
        ("v-half", 6, 4, 5.5),
        ("v-half", 8, 5, 8.5),
        ("v-half", 12, 7, 14.5),
        ("v-half", 16, 9, 20.5),
    ],
)
def test_v_half_and_v_min_have_the_published_memory_and_idle_time(name, p, peak, idle) -> None:
    assert peak == (p + 4) // 3 if name == "v-min" else (p + 2) // 2
    for m in (2 * p, 2 * p + 5):
        found = simulate(schedule(name, 2 * p, m, p), {"F": 0.5, "I": 0.5, "W": 0.5})
        assert max(found.peak) == peak
        assert found.makespan - 3 * m == idle


def test_v_half_and_v_min_grow_by_whole_periods() -> None:
    # The middle is repeated from 2p+2 microbatches on; below that every slot is placed by itself.
    for name in ("v-half", "v-min"):
        for p in (2, 3, 5):
            small, large = (schedule(name, 2 * p, m, p) for m in (2 * p + 2, 2 * p + 3))
            for few, many in zip(small.orders, large.orders, strict=True):
                assert few[: 6 * p] == many[: 6 * p]
                later = [a._replace(microbatch=a.microbatch + 1) for a in few[6 * p :]]
                assert later == list(many[6 * p + 6 :])


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
