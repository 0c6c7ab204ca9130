"""The drawings hold the recorded numbers, in units that read well."""

from echelon.observe.figures import comm_figure, loss_figure, memory_figure, timelines_figure


def ranks(num: int) -> list[dict]:
    """Summaries in which rank r holds r + 1 MiB and makes r + 1 calls."""
    return [
        {
            "rank": r,
            "memory": {"parameters": {"peak": (r + 1) * 2**20}, "unused": {"peak": 0}},
            "comm": {"all_reduce": {"calls": r + 1, "nbytes": 2**10, "wait_s": 0.5}},
        }
        for r in range(num)
    ]


def test_few_ranks_have_a_bar_each_and_many_the_lowest_the_median_and_the_highest() -> None:
    for num, bars in (
        (2, {"rank 0": 1.0, "rank 1": 2.0}),
        (64, {"lowest rank": 1.0, "median rank": 33.0, "highest rank": 64.0}),
    ):
        memory, comm = memory_figure(ranks(num)), comm_figure(ranks(num))
        assert {bar.name: list(bar.y) for bar in memory.data} == {n: [y] for n, y in bars.items()}
        assert {bar.x for bar in memory.data} == {("parameters",)}  # not what is always empty
        assert memory.layout.yaxis.title.text == "peak memory (MiB)"
        calls = [bar for bar in comm.data if bar.showlegend]
        assert {bar.name: list(bar.x) for bar in calls} == {n: [x] for n, x in bars.items()}


def test_a_loss_that_is_not_finite_is_left_out_of_the_smoothed_line() -> None:
    steps = [{"step": i, "loss": loss} for i, loss in enumerate((4.0, None, 2.0))]
    start = {"unit": "nats", "references": {"unigrams": 4.5}}
    each, smooth, _, reference = loss_figure(steps, [{"step": 3, "loss": 3.0}], start).data
    assert list(each.y) == [4.0, None, 2.0]
    assert list(smooth.y) == [4.0, 3.0, 2.0]
    assert (list(reference.x), list(reference.y)) == ([0, 3], [4.5, 4.5])


def test_actions_of_a_pipeline_have_a_colour_by_their_kind() -> None:
    steps = [[0, "0F0", 0.0, 0.25], [1, "1W0", 0.25, 1.0]]
    forward, weights = timelines_figure({"timelines": {"planned": steps}}).data
    assert (forward.name, weights.name) == ("forward", "gradients of weights")
    assert (list(weights.base), list(weights.x)) == ([250.0], [750.0])
    assert [list(level) for level in weights.y] == [["planned"], ["rank 1"]]
