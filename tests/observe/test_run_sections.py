import re

import pytest

from echelon.observe.recorded_run import RecordedRun
from echelon.observe.run_sections import VERDICT, note_html, run_facts, run_sections
from tests.observe.runs import run_lines


def titles(lines: list[dict]) -> list[str]:
    page = "".join(run_sections(RecordedRun.of(lines)))
    return re.findall(r"<h2>(.*?)</h2>", page)


def test_a_run_that_ended_has_all_sections() -> None:
    assert titles(run_lines(ranks=2)) == [
        "Loss",
        "learning rate, gradient norm",
        "Throughput",
        "Time by phase",
        "Memory",
        "Communication",
        "Who waited for whom",
        "Pipeline, step 40",
        "sample",
        "Environment",
        "Options",
    ]


def test_a_run_that_goes_on_has_what_rank_0_knows() -> None:
    assert titles(run_lines(ranks=2, finished=False)) == [
        "Loss",
        "learning rate, gradient norm",
        "Throughput",
        "Time by phase",
        "Memory",
        "Environment",
        "Options",
    ]


def test_lines_of_an_older_version_are_drawn_as_far_as_they_go() -> None:
    lines = run_lines(ranks=2)
    for line in lines:
        for name in ("process_peak", "memory", "phases", "learning_rate", "gradient_norm"):
            if line["kind"] == "step":
                del line[name]
        for name in ("unix_s", "attempt", "environment"):
            line.pop(name, None)
        for rank in line.get("ranks", ()) if line["kind"] == "ranks" else ():
            del rank["groups"], rank["phases"]
    old = [line for line in lines if line["kind"] not in ("waits", "save")]
    assert titles(old)[:4] == ["Loss", "Throughput", "Memory", "Communication"]


def test_the_verdict_stands_above_the_drawings() -> None:
    lines = run_lines(ranks=2)
    lines.append({"kind": "note", "title": VERDICT, "text": "rank 1 cost 54 ms"})
    assert titles(lines)[0] == VERDICT
    assert titles(lines).count(VERDICT) == 1


def test_the_most_important_numbers_stand_at_the_top() -> None:
    lines = run_lines(ranks=2)
    lines[0] |= {"flops_per_token": 1e6, "peak_flops": 1e10}
    facts = run_facts(RecordedRun.of(lines))
    for text in ("3.125", "4.250", "of 40 steps", "1,000", "5.0%", "256.0 MiB", "in all"):
        assert text in facts
    del lines[0]["peak_flops"]
    assert "0.5 GFLOP/s" in run_facts(RecordedRun.of(lines))


@pytest.mark.parametrize(("num_lines", "is_folded"), [(14, False), (15, True)])
def test_a_long_note_is_folded_and_says_how_long_it_is(num_lines: int, is_folded: bool) -> None:
    html = note_html("\n".join(f"<{i}>" for i in range(num_lines)))
    assert ("<details><summary>9 more lines</summary>" in html) is is_folded
    assert all(html.count(f"&lt;{i}&gt;") == 1 for i in range(num_lines))
