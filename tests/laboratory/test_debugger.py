"""breakpoint() in simulated ranks: who stops, what runs meanwhile, and how it ends."""

import pdb
import threading

import pytest
import torch

import echelon as ec
from tests.laboratory.typed_commands import Typist


def train(world: ec.World) -> float:
    values = torch.full((2,), float(world.rank))
    world.breakpoint(rank=1)
    world.group.all_reduce(values)
    total = values.sum().item()
    return total


def test_one_rank_stops_and_the_others_wait_where_they_need_it(typist: Typist) -> None:
    typist.types("p world.rank, values", "ranks", "c")
    assert ec.run(train, 3) == [6.0] * 3
    line = train.__code__.co_firstlineno + 3
    waits = "waits in all_reduce(sum) float32[2] (#0 of group 'world') for rank 1"
    assert typist.reads().splitlines()[1:] == [
        "-> world.group.all_reduce(values)",
        "(Pdb rank 1) p world.rank, values",
        "(1, tensor([1., 1.]))",
        "(Pdb rank 1) ranks",
        "   rank  function  line",
        f"      0  train     test_debugger.py:{line}  {waits}",
        f"->    1  train     test_debugger.py:{line}  stopped here",
        f"      2  train     test_debugger.py:{line}  {waits}",
        "(Pdb rank 1) c",
    ]


@pytest.mark.slow
def test_a_step_over_a_collective_returns_with_its_result(typist: Typist) -> None:
    typist.types("n", "p values", "n", "p total", "c")
    ec.run(train, 3)
    assert "tensor([3., 3.])" in typist.reads()


def test_a_step_into_a_call_of_a_group_does_not_enter_echelon(typist: Typist) -> None:
    typist.types("s", "p values", "c")
    ec.run(train, 3)
    output = typist.reads()
    assert "-> total = values.sum().item()\n(Pdb rank 1) p values\ntensor([3., 3.])" in output


def test_a_call_of_a_group_that_is_typed_is_refused_and_harms_nothing(typist: Typist) -> None:
    typist.types("world.group.all_reduce(values)", "world.group.send(values, 0)", "n", "c")
    assert ec.run(train, 3) == [6.0] * 3
    output = typist.reads()
    assert output.count("needs other ranks, which are stopped: step over the line (n)") == 2
    assert "#0 of group 'world'" in output


def test_a_wait_that_is_typed_is_refused_and_harms_nothing(typist: Typist) -> None:
    def main(world: ec.World) -> float:
        value = torch.zeros(1)
        if world.rank == 0:
            work = world.group.irecv(value, 1)
            breakpoint()
            world.group.barrier()
            work.wait()
        else:
            world.group.barrier()
            world.group.send(torch.ones(1), 0)
        return value.item()

    typist.types("work.wait()", "c")
    assert ec.run(main, 2) == [1.0, 0.0]
    assert "recv float32[1]" in (output := typist.reads())
    assert "needs other ranks, which are stopped" in output


def every_rank(world: ec.World) -> int:
    number = world.rank * 10
    breakpoint()
    return number


def test_a_breakpoint_of_all_ranks_stops_one_after_the_other(typist: Typist) -> None:
    typist.types(*["c"] * 4)
    assert ec.run(every_rank, 4) == [0, 10, 20, 30]
    assert sorted(typist.prompts) == [f"(Pdb rank {rank}) " for rank in range(4)]


@pytest.mark.slow
@pytest.mark.usefixtures("no_breakpoints")
def test_a_rank_that_has_stopped_before_keeps_its_breakpoints(typist: Typist) -> None:
    def main(world: ec.World) -> None:
        for number in range(3):
            if number == 0:
                world.breakpoint(rank=1)
            world.group.barrier()
            world.step = number

    only = "world.rank == 1"
    typist.types(f"b {main.__code__.co_firstlineno + 5}, {only}", "c", "p number", "c", "c", "c")
    ec.run(main, 2)
    assert typist.prompts == ["(Pdb rank 1) "] * 6


def slow_commands(world: ec.World) -> float:
    total = torch.ones(1)
    if world.rank == 1:
        breakpoint()
    world.group.all_reduce(total)
    return total.item()


@pytest.mark.slow
def test_no_limit_of_time_runs_while_ranks_are_stopped(typist: Typist) -> None:
    typist.types("import time; time.sleep(1.5)", "ranks", "c")
    assert ec.run(slow_commands, 3, timeout=0.5) == [3.0] * 3
    output = typist.reads()
    assert output.count("waits in all_reduce") + output.count("stopped before its next call") == 2


@pytest.mark.slow
def test_a_rank_that_blocks_in_the_debugger_is_not_overtaken(typist: Typist) -> None:
    def main(world: ec.World) -> None:
        if world.rank == 0:
            breakpoint()
        order.append(world.rank)

    order: list[int] = []
    typist.types("import time; time.sleep(2.6)", "c")
    ec.run(main, 2)
    assert order == [1, 0]  # rank 1 came before the debugger was opened, and none after
    assert "RuntimeWarning" not in typist.reads()


@pytest.mark.parametrize("command", ["q", "EOF"])
def test_quitting_ends_all_ranks_with_one_error(typist: Typist, command: str) -> None:
    typist.types(command) if command == "q" else typist.types()
    ended: list[int] = []

    def main(world: ec.World) -> None:
        try:
            breakpoint()
            world.group.barrier()
        except BaseException:
            ended.append(world.rank)
            raise

    with pytest.raises(
        ec.DebuggerQuit, match=r"had stopped rank 0 at test_debugger.py:\d+"
    ) as info:
        ec.run(main, 3)
    assert info.value.rank == 0
    assert sorted(ended) == [0, 1, 2]
    assert typist.prompts == ["(Pdb rank 0) "]


def test_quitting_ends_the_run_although_a_rank_catches_the_error(typist: Typist) -> None:
    def main(world: ec.World) -> None:
        try:
            world.breakpoint(rank=1)
            torch.zeros(1)
        except Exception:
            world.step = 1
        world.group.barrier()

    typist.types("q")
    with pytest.raises(ec.DebuggerQuit):
        ec.run(main, 2)


def test_ctrl_c_at_the_prompt_ends_the_run_as_elsewhere(typist: Typist) -> None:
    ended = threading.Event()

    def main(world: ec.World) -> None:
        try:
            world.breakpoint(rank=1)
            world.group.barrier()
        finally:
            if world.rank == 1:
                ended.set()

    typist.types("^C")
    with pytest.raises(KeyboardInterrupt):
        ec.run(main, 2)
    assert ended.wait(20)
    assert typist.prompts == ["(Pdb rank 1) "]


@pytest.mark.slow
def test_a_thread_of_a_rank_gets_pdb_and_all_clocks_stand(typist: Typist) -> None:
    def main(world: ec.World) -> None:
        if world.rank == 0:
            thread = threading.Thread(target=lambda: breakpoint())
            thread.start()
            thread.join()
        world.group.barrier()

    typist.types("ranks", "import time; time.sleep(1)", "c")
    ec.run(main, 2, timeout=0.4)
    output = typist.reads()
    assert "this thread is no rank" in output
    assert "function" not in output
    assert typist.prompts == ["(Pdb) "] * 3


def test_the_world_of_a_script_alone_has_a_breakpoint(typist: Typist) -> None:
    world = ec.init()
    typist.types("p world.size", "c")
    world.breakpoint()
    assert "(Pdb rank 0) p world.size\n1\n" in typist.reads()


@pytest.mark.slow
@pytest.mark.usefixtures("no_breakpoints")
@pytest.mark.parametrize("sets_a_breakpoint", [False, True])
def test_post_mortem_in_a_rank_shows_all_ranks_and_the_program_goes_on(
    typist: Typist, sets_a_breakpoint: bool
) -> None:
    def main(world: ec.World) -> float:
        value = torch.ones(1)
        try:
            value /= torch.ones(2 + world.rank)
        except RuntimeError:
            if world.rank == 1:
                pdb.post_mortem()
        world.group.all_reduce(value)
        return value.item()

    line = main.__code__.co_firstlineno + 8
    breaks = [f"b {line}"] if sets_a_breakpoint else []
    typist.types("p world.rank", "ranks", "where", *breaks, "c", *["c"] * 2 * len(breaks))
    assert ec.run(main, 2) == [2.0] * 2
    output = typist.reads()
    assert "(Pdb rank 1) p world.rank\n1\n" in output
    assert "waits in all_reduce(sum) float32[1] (#0 of group 'world') for rank 1" in output
    assert "-> value /= torch.ones(2 + world.rank)" in output
    assert pdb.post_mortem.__module__ == "pdb"


def test_a_post_mortem_without_an_error_is_what_it_is_elsewhere() -> None:
    with pytest.raises(ValueError, match="traceback"):
        ec.run(lambda world: pdb.post_mortem(), 1)
