"""A rank with several threads is stuck when none of them can go on, and not before."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import echelon as ec
from echelon.diagnosis.collective_call import CallSignature
from echelon.errors import CommTimeout, DeadlockError


def after_a_save(world: ec.World, folder: Path) -> None:
    model = torch.nn.Linear(2, 2)
    ec.async_save(folder / "run", step=1, model=ec.DDP(model, world.group)).wait()


def after_a_thread(world: ec.World, folder: Path) -> None:
    thread = threading.Thread(target=world.group.barrier)
    thread.start()
    thread.join()


pools: list[ThreadPoolExecutor] = []


def beside_an_idle_pool(world: ec.World, folder: Path) -> None:
    pools.append(ThreadPoolExecutor(1))
    pools[-1].submit(world.group.barrier).result()


def beside_an_idle_thread(world: ec.World, folder: Path) -> None:
    event = threading.Event()

    def work() -> None:
        world.group.barrier()
        event.wait()

    threading.Thread(target=work, daemon=True).start()


def receives(world: ec.World, begin: object, folder: Path) -> None:
    begin(world, folder)  # type: ignore[operator]
    world.group.barrier()
    world.group.recv(torch.zeros(1), 1 - world.rank)


@pytest.mark.parametrize(
    "begin", [after_a_save, after_a_thread, beside_an_idle_pool, beside_an_idle_thread]
)
def test_a_deadlock_is_told_at_once_although_another_thread_has_communicated(
    begin: object, tmp_path: Path
) -> None:
    start_s = time.monotonic()
    with pytest.raises(DeadlockError):
        ec.run(receives, 2, args=(begin, tmp_path), timeout=60)
    assert time.monotonic() - start_s < 30
    while pools:
        pools.pop().shutdown()


def sends_from_a_pool(world: ec.World) -> float:
    """Each rank waits for a message that a thread of the other sends after a while."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(world.group.barrier).result()
        pool.submit(time.sleep, 0.7)
        pool.submit(world.group.send, torch.ones(1), 1 - world.rank)
        received = torch.zeros(1)
        world.group.recv(received, 1 - world.rank)
    return received.item()


def test_a_thread_that_sleeps_and_then_sends_is_no_deadlock() -> None:
    assert ec.run(sends_from_a_pool, 2, timeout=20) == [1.0, 1.0]


def is_woken_meanwhile(world: ec.World) -> str:
    if world.rank == 1:
        time.sleep(0.5)
        return ""
    group = world.group
    there: list[bool] = []

    def ready() -> bool:
        if there:
            return True
        there.append(True)
        thread = threading.Thread(target=group.thread_world.wake_conditions)  # type: ignore[attr-defined]
        thread.start()
        thread.join()
        return False

    try:
        group.wait_until(CallSignature("store.wait"), ready, timeout=5.0)  # type: ignore[attr-defined]
    except CommTimeout:
        return "not woken"
    return "woken"


def test_a_condition_that_comes_true_while_it_is_first_looked_at_wakes_its_rank() -> None:
    assert ec.run(is_woken_meanwhile, 2, timeout=20) == ["woken", ""]


def waits_for_its_turn_beside_a_late_thread(world: ec.World) -> bool:
    """Rank 2 wants its turn while rank 1 computes, and the thread of rank 0 is late for its own."""
    group = world.group.subgroup(range(world.size))
    assert group is not None

    def meets() -> None:
        if world.rank == 0:
            time.sleep(2.5)  # before its first wait in a call
        group.barrier()

    thread = threading.Thread(target=meets)
    thread.start()
    if world.rank == 2:  # the first to go on
        time.sleep(0.5)  # in which the others run
    if world.rank == 1:
        end_s = time.monotonic() + 2.0
        while time.monotonic() < end_s:
            pass
    world.group.barrier()
    thread.join()
    return True


def test_a_rank_that_waits_for_its_turn_is_not_idle() -> None:
    assert ec.run(waits_for_its_turn_beside_a_late_thread, 3, timeout=20) == [True] * 3


def sends_from_a_new_thread(world: ec.World) -> float:
    """Each rank waits for a message of a thread that has not communicated before."""

    def sends() -> None:
        time.sleep(0.7)
        world.group.send(torch.ones(1), 1 - world.rank)

    thread = threading.Thread(target=sends)
    thread.start()
    received = torch.zeros(1)
    world.group.recv(received, 1 - world.rank)
    thread.join()
    return received.item()


def sends_late_from_the_rank(world: ec.World) -> float:
    """Only threads have communicated when the ranks themselves send what the threads wait for."""
    received = torch.zeros(1)
    thread = threading.Thread(target=world.group.recv, args=(received, 1 - world.rank))
    thread.start()
    time.sleep(0.7)
    world.group.send(torch.ones(1), 1 - world.rank)
    thread.join()
    return received.item()


@pytest.mark.parametrize("main", [sends_from_a_new_thread, sends_late_from_the_rank])
def test_what_has_not_communicated_yet_is_no_deadlock(main: object) -> None:
    assert ec.run(main, 2, timeout=20) == [1.0, 1.0]  # type: ignore[arg-type]


def receives_beside_a_monitor(world: ec.World) -> None:
    """As the progress bar of tqdm has one: a thread that looks at something now and then."""
    end = threading.Event()
    threading.Thread(target=end.wait, args=(30.0,), daemon=True).start()
    try:
        world.group.recv(torch.zeros(1), 1 - world.rank)
    finally:
        end.set()


def test_a_deadlock_is_told_at_once_beside_threads_that_only_look() -> None:
    start_s = time.monotonic()
    with pytest.raises(DeadlockError):
        ec.run(receives_beside_a_monitor, 2, timeout=60)
    assert time.monotonic() - start_s < 20


def send_from_a_timer(world: ec.World) -> float:
    received = torch.zeros(1)
    if world.rank == 0:
        threading.Timer(1.0, world.group.send, (torch.ones(1), 1)).start()
    else:
        world.group.recv(received, 0)
    world.group.barrier()
    return received.item()


def test_a_rank_whose_timer_has_yet_to_come_is_not_stuck() -> None:
    assert ec.run(send_from_a_timer, 2, timeout=60) == [0.0, 1.0]


def daemons(world: ec.World) -> list[bool]:
    """Whether threads are daemons that say nothing of it, say so, or are started by such ones."""
    seen: list[bool] = []

    def note() -> None:
        seen.append(threading.current_thread().daemon)

    def start_one() -> None:
        run_and_join(threading.Thread(target=note))

    for thread in (
        threading.Thread(target=note),
        threading.Thread(target=note, daemon=True),
        threading.Timer(0.0, note),
        threading.Thread(target=start_one),
        threading.Thread(target=start_one, daemon=True),
    ):
        run_and_join(thread)
    return seen


def run_and_join(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


def test_threads_of_a_rank_are_daemons_where_those_of_a_process_are() -> None:
    assert ec.run(daemons, 2) == [[False, True, False, False, True]] * 2
