"""The simulator against published numbers, and against schedules that can be timed by hand."""

import pytest

from echelon.errors import ArgumentError, ScheduleError
from echelon.pipeline import Channel, Schedule, schedule, simulate

# Measured costs and bubbles of the authors of "Zero Bubble Pipeline Parallelism" (2023), from
# their repository: ranks, microbatches, F, I, W, delay of a message in microseconds; the bubble of
# 1F1B and ZB-H1 over all ranks, and of ZB-H2 over each rank's own time.
MEASURED = [
    (8, 24, 18522, 18086, 9337, 601, 0.2431, 0.1585, 0.1083),
    (8, 32, 18513, 18086, 9331, 626, 0.1985, 0.1242, 0.0837),
    (8, 64, 18546, 18097, 9321, 762, 0.1240, 0.0674, 0.0444),
    (8, 24, 29718, 29444, 19927, 527, 0.2347, 0.1323, 0.0698),
    (8, 32, 29802, 29428, 19530, 577, 0.1898, 0.1045, 0.0559),
    (8, 64, 29935, 29621, 19388, 535, 0.1091, 0.0554, 0.0294),
]


@pytest.mark.parametrize(("p", "m", "f", "i", "w", "hop", "one", "h1", "h2"), MEASURED)
def test_bubbles_of_measured_costs_are_those_of_the_authors(
    p, m, f, i, w, hop, one, h1, h2
) -> None:
    costs = {"F": f, "I": i, "W": w, "hop": hop}
    found = {name: simulate(schedule(name, p, m, p), costs) for name in ("1f1b", "zb-h1", "zb-h2")}
    assert round(found["1f1b"].span_bubble, 4) == one
    assert round(found["zb-h1"].span_bubble, 4) == h1
    assert round(found["zb-h2"].own_bubble, 4) == h2


# Four ranks, eight microbatches, F = I = W: bubble over all ranks and over own time in percent,
# and the largest peak.
UNIT = [
    ("gpipe", 1, {}, "27.3", "27.3", 8),
    ("1f1b", 1, {}, "27.3", "27.3", 4),
    ("interleaved", 2, {}, "15.8", "15.8", 5.5),
    ("interleaved", 4, {}, "8.57", "8.57", 4.75),
    ("zb-h1", 1, {}, "11.1", "11.1", 4),
    ("zb-h2", 1, {}, "11.1", "0", 7),
    ("zb", 2, {}, "5.88", "5.88", 4),
    ("zb", 4, {}, "3.03", "3.03", 4),
    ("zb-v", 2, {}, "5.88", "0", 4),
    ("dualpipe-v", 2, {"fused": True}, "11.1", "11.1", 4.5),
    ("dualpipe-v", 2, {}, "5.88", "5.88", 4.5),
]


@pytest.mark.parametrize(("name", "chunks", "options", "span", "own", "peak"), UNIT)
def test_unit_costs_give_the_known_bubbles_and_peaks(
    name, chunks, options, span, own, peak
) -> None:
    found = simulate(schedule(name, 4 * chunks, 8, 4, **options), costs={"F": 1, "B": 2})
    assert f"{100 * found.span_bubble:.3g}" == span
    assert f"{100 * found.own_bubble:.3g}" == own
    assert max(found.peak) == peak


def test_every_step_is_where_a_hand_puts_it() -> None:
    # rank 0 | F0 F1 .. .. B0 B0 B0 .. B1 B1 B1        F = 1, B = 3 on stage 0
    # rank 1 | .. F0 F0 B0 F1 F1 B1                     F = 2, B = 1 on stage 1; a hop is free
    found = simulate(schedule("1f1b", 2, 2, 2), {"F": [1, 2], "B": [3, 1]})
    assert [(s.rank, str(s.item), s.start, s.end) for s in found.timeline.steps] == [
        (0, "0F0", 0, 1),
        (0, "0F1", 1, 2),
        (1, "1F0", 1, 3),
        (1, "1B0", 3, 4),
        (1, "1F1", 4, 6),
        (0, "0B0", 4, 7),
        (1, "1B1", 6, 7),
        (0, "0B1", 7, 10),
    ]
    assert found.makespan == 10
    assert found.busy == (8, 6)
    assert (found.idle[0].warm_up, found.idle[0].steady, found.idle[0].drain) == (0, 2, 0)
    assert found.idle[0].waiting_on == {1: 2}
    assert (found.idle[1].warm_up, found.idle[1].steady, found.idle[1].drain) == (1, 0, 3)


def test_a_hop_delays_what_crosses_ranks_and_nothing_else() -> None:
    found = simulate(schedule("1f1b", 2, 1, 2), {"F": 1, "B": 2, "hop": 0.5})
    assert found.makespan == 7
    assert (found.idle[0].steady, found.idle[0].messages) == (4, 0.5)
    assert (found.idle[1].warm_up, found.idle[1].messages) == (1.5, 0.5)
    alone = simulate(schedule("interleaved", 2, 1, 1), {"F": 1, "B": 2, "hop": 0.5})
    assert alone.makespan == 6


def test_idle_and_busy_time_of_every_rank_fill_the_makespan() -> None:
    costs = {"F": [1, 2, 1, 3], "I": 1.5, "W": [0.5, 1, 2, 1], "hop": 0.25}
    for name in ("1f1b", "zb-h1", "zb-h2"):
        found = simulate(schedule(name, 4, 7, 4), costs)
        for busy, idle in zip(found.busy, found.idle, strict=True):
            assert busy + idle.total == pytest.approx(found.makespan)
            assert sum(idle.waiting_on.values()) == pytest.approx(idle.steady)
            assert idle.messages <= idle.warm_up + idle.steady


def test_bytes_follow_the_stages_that_are_alive() -> None:
    found = simulate(schedule("1f1b", 4, 8, 4), stage_nbytes=[100, 10, 7, 5])
    assert found.peak_nbytes == (400, 30, 14, 5)
    assert simulate(schedule("zb-v", 8, 8, 4), stage_nbytes=3).peak_nbytes == (24,) * 4
    assert simulate(schedule("1f1b", 4, 8, 4)).peak_nbytes is None
    assert simulate(schedule("forward-only", 2, 8, 2), stage_nbytes=3).peak_nbytes == (0, 0)


def test_a_schedule_that_lacks_an_action_or_stalls_is_not_simulated() -> None:
    with pytest.raises(ScheduleError, match="it is missing"):
        simulate(Schedule.from_csv("0F0,0B0\n1F0"))
    with pytest.raises(ScheduleError, match="no rank can go on"):
        simulate(Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"))


def test_a_channel_needs_transfers() -> None:
    with pytest.raises(ArgumentError, match="PAIR orders transfers and this schedule has none"):
        simulate(schedule("1f1b", 2, 2, 2), channel=Channel.PAIR)
