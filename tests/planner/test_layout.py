import pytest

import echelon as ec
from echelon.planner.layout import HostStates, Layout, ShardedStates


def test_ranks_and_batch() -> None:
    layout = Layout(tp=2, cp=2, shard=4, dp=2, pp=3, microbatch=5, microbatches=7)
    assert layout.num_ranks == 96
    assert layout.global_batch == 8 * 5 * 7


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tp": 0}, "tp is 0"),
        ({"dp": 4, "ep": 3}, "ep is 3, which does not divide dp"),
        ({"sharded": "all"}, "sharded is 'all'"),
        ({"offload": HostStates.ALL}, "offload is .all. and nothing is sharded"),
        ({"offload": "all"}, "offload is .all."),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ec.ArgumentError, match=sentence):
        Layout(**options)  # type: ignore[arg-type]


def test_stages_of_zero_are_numbered_as_in_the_paper() -> None:
    assert [sharded.value for sharded in ShardedStates] == [0, 1, 2, 3]
