"""V-Half and V-Min have the memory and the idle time that were published."""

import pytest

from echelon.pipeline import schedule, simulate


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
