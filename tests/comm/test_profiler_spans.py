from collections.abc import Callable

import pytest
import torch
from torch.profiler import profile

import echelon as ec


def spans(world: ec.World, body: Callable[[ec.Group], None]) -> list[tuple[str, list[list[int]]]]:
    """What the profiler of rank 0 saw of the calls in ``body``: name and shapes."""
    if world.rank:
        body(world.group)
        return []
    with profile(record_shapes=True) as profiler:
        body(world.group)
    return [
        (event.name, event.input_shapes)
        for event in profiler.events()
        if event.name.startswith("echelon:")
    ]


def calls(group: ec.Group) -> None:
    group.all_reduce(torch.ones(2, 3))
    work = group.all_reduce(torch.ones(5), async_op=True)
    assert work is not None
    work.wait()
    if group.rank == 0:
        group.send(torch.ones(4), 1)
    else:
        group.recv(torch.ones(4), 0)


def profiled_calls(world: ec.World) -> list[tuple[str, list[list[int]]]]:
    return spans(world, calls)


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_the_profiler_shows_each_call_once_by_name_and_shape(kind: str) -> None:
    seen = ec.run(profiled_calls, 2, kind)[0]
    issued = [span for span in seen if span[0] != "echelon:wait"]
    assert [name for name, _ in issued] == [
        "echelon:all_reduce",
        "echelon:all_reduce",
        "echelon:send",
    ]
    assert [shapes[0] for _, shapes in issued] == [[2, 3], [5], [4]]
    waits = [shapes[0] for name, shapes in seen if name == "echelon:wait"]
    assert waits == [[5]], "a blocking call waits within its span"


def test_without_a_profiler_no_span_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a span was built")

    monkeypatch.setattr("echelon.comm.group.profiler_span", refuse)
    monkeypatch.setattr("echelon.comm.work.profiler_span", refuse)

    def main(world: ec.World) -> None:
        world.group.all_reduce(torch.ones(2))
        peer = 1 - world.rank
        work = world.group.isend(torch.ones(1), peer)
        world.group.recv(torch.ones(1), peer)
        work.wait()

    ec.run(main, 2)
