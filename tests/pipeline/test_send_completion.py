"""A send that is known to have arrived was made before, and is known of once."""

from functools import partial

import pytest

from echelon.pipeline.link import PendingSend
from echelon.pipeline.schedules.families import schedule
from echelon.pipeline.schedules.ir import Action, Kind
from echelon.pipeline.schedules.passes import lower
from echelon.pipeline.send_completion import PendingSends, sends_complete_at


@pytest.mark.parametrize(
    ("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zb-h2", 1), ("interleaved", 2), ("zb-v", 2)]
)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_message_tells_of_sends_that_went_before_it(name: str, chunks: int, ranks: int) -> None:
    lowered = lower(schedule(name, ranks * chunks, 8, ranks))
    for rank, order in enumerate(lowered.orders):
        actions = [part for item in order for part in item.parts]
        place = {str(action): i for i, action in enumerate(actions)}
        told = []
        for (kind, mb, stage), sends in sends_complete_at(lowered, rank).items():
            kinds = "F" if kind is Kind.RECV_F else "BI"
            taken = next(place[a] for k in kinds if (a := f"{stage}{k}{mb}") in place)
            told += [(send, taken) for send in sends]
        assert len({send for send, _ in told}) == len(told)
        assert all(place[str(send)] < taken for send, taken in told)
        # Of an output, its gradient tells at the latest.
        outputs = {action for action in actions if action.kind is Kind.SEND_F}
        assert outputs <= {send for send, _ in told}


def test_sends_are_released_when_a_message_tells_of_them_and_polled_when_they_are_many() -> None:
    released: list[int] = []
    sends = PendingSends(max_unpolled=2)
    actions = [Action(kind=Kind.SEND_F, microbatch=i, stage=0) for i in range(4)]
    for i, expected in enumerate(([], [], [0], [0, 1])):  # one that is left is not polled
        send = PendingSend([], [], is_poll_cheap=False, on_done=partial(released.append, i))
        sends.add(actions[i], send)
        assert released == expected
    sends.release([actions[0], actions[3]])
    assert released == [0, 1, 3]
    sends.wait()
    assert released == [0, 1, 3, 2]
