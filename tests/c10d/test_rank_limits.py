"""What a simulated rank cannot do is refused or explained, and other code may do it."""

import multiprocessing
import os
import signal
from collections.abc import Callable

import pytest
import torch

import echelon as ec
from echelon.c10d.rank_limits import note_for
from echelon.errors import UnsupportedError


def spawns(world: ec.World) -> None:
    torch.multiprocessing.spawn(print, nprocs=2)


def exits(world: ec.World) -> None:
    os._exit(0)


def starts_rpc(world: ec.World) -> None:
    torch.distributed.rpc.init_rpc("worker")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (spawns, r"torch.multiprocessing.spawn starts processes.*call the function itself"),
        (exits, r"os._exit would end all simulated ranks.*use sys.exit"),
        (starts_rpc, r"init_rpc makes one agent for a process.*send and recv"),
    ],
)
def test_calls_that_would_end_or_multiply_ranks_are_refused_with_what_to_do(
    call: Callable[[ec.World], None], sentence: str
) -> None:
    before = os._exit, torch.multiprocessing.spawn, torch.distributed.rpc.init_rpc
    with pytest.raises(UnsupportedError, match=sentence):
        ec.run(call, 2)
    assert (os._exit, torch.multiprocessing.spawn, torch.distributed.rpc.init_rpc) == before


def installs_a_handler(world: ec.World) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def asks_for_a_gpu(world: ec.World) -> None:
    torch.ones(1, device=f"cuda:{world.rank}")


@pytest.mark.parametrize(
    ("call", "note"),
    [
        (installs_a_handler, "cannot install signal handlers: install them only where"),
        pytest.param(
            asks_for_a_gpu,
            "this machine has no GPU, and simulated ranks compute on the CPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_errors_whose_cause_is_that_a_rank_is_a_thread_get_a_note(
    call: Callable[[ec.World], None], note: str
) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # whatever this build of torch raises
        ec.run(call, 2)
    assert any(note in text for text in caught.value.__notes__)


def test_other_errors_get_none() -> None:
    assert note_for(ValueError("CUDA") if torch.cuda.is_available() else KeyError("CUDA")) is None


def forks(world: ec.World) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=print, args=("",))
    child.start()
    child.join()
    return child.exitcode


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_process_that_a_rank_forks_ends_as_always() -> None:
    assert ec.run(forks, 2) == [0, 0]


def sets_a_start_method(world: ec.World) -> str:
    multiprocessing.set_start_method("spawn" if world.rank else "fork")
    torch.set_num_interop_threads(torch.get_num_interop_threads())
    world.group.barrier()
    return multiprocessing.get_start_method()


def test_what_a_process_may_set_once_each_rank_may_set() -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        vars(multiprocessing.context)["_default_context"]._actual_context = None
        assert ec.run(sets_a_start_method, 2) == ["fork", "spawn"]
    finally:
        multiprocessing.set_start_method(before, force=True)


def sets_another_number(world: ec.World) -> None:
    torch.set_num_interop_threads(torch.get_num_interop_threads() + 1 + world.rank)


def defines_an_operator(world: ec.World) -> None:
    torch.library.define(f"once_in_a_process_{os.getpid()}::nothing", "() -> ()")


def test_what_ranks_cannot_do_twice_names_simulated_ranks_and_what_to_do() -> None:
    with pytest.raises(UnsupportedError, match=r"interop_threads.* simulated ranks share"):
        ec.run(sets_another_number, 2)
    with pytest.raises(RuntimeError, match="multiple times") as info:
        ec.run(defines_an_operator, 2)
    assert any("a rank before this one may have made this call" in n for n in info.value.__notes__)
