from echelon.diagnosis.arrivals import NUM_ARRIVALS, Arrival, Arrivals, arrivals_of
from echelon.diagnosis.collective_call import CallSignature, CallSite, CollectiveCall
from echelon.diagnosis.step_rows import Activity


def call(position: int, line: int = 3) -> CollectiveCall:
    place = CallSite("train.py", line, "main")
    return CollectiveCall(CallSignature("barrier"), place, position, "world", 0, True)


def test_arrivals_are_given_back_with_their_calls() -> None:
    arrivals = Arrivals()
    arrivals.add((call(0), 1000, Activity.LOADING))
    arrivals.add((call(1, line=5), 2000, Activity.BACKWARD))
    assert arrivals_of(arrivals.record()) == [
        Arrival("world", 0, "barrier at train.py:3 in main", 1000, Activity.LOADING),
        Arrival("world", 1, "barrier at train.py:5 in main", 2000, Activity.BACKWARD),
    ]


def test_the_last_arrival_can_be_postponed() -> None:
    arrivals = Arrivals()
    arrivals.add((call(0), 1000, Activity.OTHER))
    arrivals.postpone(3000, Activity.BACKWARD)
    (arrival,) = arrivals_of(arrivals.record())
    assert (arrival.time_ns, arrival.activity) == (3000, Activity.BACKWARD)


def test_only_the_last_arrivals_are_kept() -> None:
    arrivals = Arrivals()
    for position in range(NUM_ARRIVALS + 10):
        arrivals.add((call(position), position, Activity.OTHER))
    kept = [arrival.position for arrival in arrivals_of(arrivals.record())]
    assert kept == list(range(10, NUM_ARRIVALS + 10))


def test_a_cleared_record_is_empty() -> None:
    arrivals = Arrivals()
    arrivals.add((call(0), 1000, Activity.OTHER))
    arrivals.clear()
    assert arrivals_of(arrivals.record()) == []
