"""Events reach whoever listens, cost nothing otherwise, and say what the table says."""

import threading
import time

import pytest
import torch

import echelon as ec
from echelon import events


def test_nobody_listens_at_first_and_after_the_body() -> None:
    assert not events.listening()
    with events.listen(lambda event: None):
        assert events.listening()
    assert not events.listening()


def test_an_event_has_its_name_its_moment_and_its_facts() -> None:
    seen: list[events.Event] = []
    before = time.perf_counter()
    with events.listen(seen.append):
        events.emit("memory", rank=1, category="gradients", nbytes=400)
    events.emit("memory", rank=1, category="gradients", nbytes=400)  # nobody hears this one
    [event] = seen
    assert event.name == "memory"
    assert event.facts == {"rank": 1, "category": "gradients", "nbytes": 400}
    assert before <= event.start_s <= time.perf_counter()
    assert event.seconds == 0.0


def test_facts_may_have_any_name() -> None:
    seen: list[events.Event] = []
    with events.listen(seen.append):
        events.emit("memory", name="x")
    assert seen[0].facts == {"name": "x"}


def test_a_span_has_a_duration_also_when_its_body_raises() -> None:
    seen: list[events.Event] = []
    with events.listen(seen.append):
        with events.span("step", number=1):
            time.sleep(0.01)
        with pytest.raises(KeyError), events.span("step", number=2):
            raise KeyError
    assert [event.facts["number"] for event in seen] == [1, 2]
    assert seen[0].seconds >= 0.01


def test_several_listeners_hear_the_same_and_leave_in_any_order() -> None:
    first: list[str] = []
    second: list[str] = []
    listening = events.listen(lambda event: first.append(event.name))
    two = events.listen(lambda event: second.append(event.name))
    listening.__enter__()
    two.__enter__()
    events.emit("a")
    listening.__exit__(None, None, None)
    events.emit("b")
    two.__exit__(None, None, None)
    assert (first, second) == (["a"], ["a", "b"])
    assert not events.listening()


def test_one_listener_may_listen_twice() -> None:
    seen: list[events.Event] = []
    with events.listen(seen.append):
        with events.listen(seen.append):
            events.emit("a")
        events.emit("b")
    assert [event.name for event in seen] == ["a", "a", "b"]


def test_listeners_may_come_and_go_on_many_threads() -> None:
    def come_and_go() -> None:
        for _ in range(200):
            with events.listen(lambda event: None):
                events.emit("a")

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not events.listening()


def communicate(world: ec.World) -> None:
    tensor = torch.ones(5)
    world.group.all_reduce(tensor, label="five")
    world.group.broadcast(tensor, 1)
    if world.rank == 0:
        world.group.send(tensor, 1, tag=3)
    else:
        world.group.recv(tensor, 0, tag=3)


def test_communication_is_told_with_rank_operation_position_bytes_and_label() -> None:
    seen: list[events.Event] = []
    with events.listen(seen.append):
        ec.run(communicate, ranks=2)
    issued = [event.facts for event in seen if event.name == "collective.issue"]
    issues = sorted((f["rank"], f["op"], f["position"], f["nbytes"], f["label"]) for f in issued)
    expected = [(rank, "all_reduce", 0, 20, "five") for rank in (0, 1)]
    expected += [(rank, "broadcast", 1, 20, None) for rank in (0, 1)]
    collectives = [facts for facts in issues if facts[1] not in ("send", "recv")]
    assert sorted(collectives) == sorted(expected)
    waits = [event.facts["op"] for event in seen if event.name == "collective.wait"]
    assert waits.count("all_reduce") == waits.count("broadcast") == 2
