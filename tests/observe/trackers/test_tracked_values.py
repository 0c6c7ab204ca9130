import math

from echelon.observe.trackers.tracked_values import tracked_config, tracked_values


def test_the_numbers_of_a_step_have_flat_names() -> None:
    line = {"kind": "step", "step": 3, "time_s": 1.5, "loss": 2.0, "tokens_per_s": 10.0}
    line |= {"grad_norm": 0.5, "router/entropy": 1.0, "who": "me", "fine": True}
    assert tracked_values(line) == {
        "perf/elapsed_seconds": 1.5,
        "train/loss": 2.0,
        "perf/tokens_per_second": 10.0,
        "train/grad_norm": 0.5,
        "router/entropy": 1.0,
    }


def test_a_step_has_its_memory_and_its_phases() -> None:
    line = {"kind": "step", "step": 3, "loss": 1.0, "process_peak": 9}
    line |= {"memory": {"optimizer state": 8}, "phases": {"backward": 0.5}}
    assert tracked_values(line) == {
        "train/loss": 1.0,
        "memory/process_peak_bytes": 9.0,
        "memory/optimizer_state_bytes": 8.0,
        "time/backward_seconds": 0.5,
    }


def test_a_number_that_is_not_finite_is_nan_live_and_from_the_file() -> None:
    for loss in (math.nan, math.inf, None):
        values = tracked_values({"kind": "evaluation", "step": 1, "time_s": 0.0, "loss": loss})
        assert list(values) == ["validation/loss"]
        assert math.isnan(values["validation/loss"])


def test_of_the_numbers_of_ranks_the_greatest_counts() -> None:
    def rank(peak: int, wait_s: float) -> dict[str, object]:
        comm = {"all_reduce": {"calls": 2, "nbytes": peak * 2, "wait_s": wait_s}}
        memory = {"optimizer state": {"live": 0, "peak": peak}}
        return {"rank": 0, "pid": 1, "process_peak": peak + 1, "memory": memory, "comm": comm}

    assert tracked_values({"kind": "ranks", "ranks": [rank(10, 0.5), rank(20, 0.25)]}) == {
        "memory/greatest_process_peak_bytes": 21,
        "memory/optimizer_state_peak_bytes": 20,
        "comm/all_reduce_calls": 2,
        "comm/all_reduce_bytes": 40,
        "comm/all_reduce_wait_seconds": 0.5,
    }


def test_other_lines_have_no_numbers() -> None:
    assert tracked_values({"kind": "note", "title": "a", "text": "b"}) == {}
    assert tracked_values({"kind": "end", "time_s": 3.0, "steps": 4}) == {}


def test_an_option_of_the_script_counts_more_than_a_fact_of_the_run() -> None:
    start = {"name": "a", "ranks": 2, "unit": "nats", "config": {"lr": 0.1, "unit": "bits"}}
    assert tracked_config(start) == {"ranks": 2, "unit": "bits", "lr": 0.1}
