"""What hangs over NCCL alone is named under its rules, and runs under those of gloo."""

import contextlib
import itertools
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import (
    batch_isend_irecv,  # as programs import it, before ranks start
    distributed_c10d,
)

import echelon as ec
from echelon.comm.world import World
from echelon.launch.program import Program
from echelon.launch.simulated_job import run_threads

SCRIPT = Path(__file__).parents[3] / "examples" / "nccl_hangs.py"
RANKS = 4


def run_script(name: str, rules: str | None, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return run_threads(Program(str(SCRIPT)), [name], RANKS, rules=rules)


def lines_of(name: str) -> list[int]:
    """The lines of a program at which ranks hang: those with a comment, or of async collectives."""
    lines = SCRIPT.read_text().splitlines()
    start = lines.index(f"def {name}() -> None:")
    end = next(i for i in range(start + 1, len(lines)) if lines[i].startswith(("def ", "PROGRAMS")))
    marks = (
        ("# hangs here", "# and here", "second = ") if name == "groups" else ("# hangs", "# and")
    )
    return [i + 1 for i in range(start, end) if any(mark in lines[i] for mark in marks)]


@pytest.mark.parametrize("name", ["opposite", "ring", "groups", "late", "objects"])
def test_a_program_that_hangs_over_nccl_alone_is_named_with_both_lines_within_a_second(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script(name, None, monkeypatch) == 0  # which also imports what it needs
    capsys.readouterr()
    start_s = time.perf_counter()
    assert run_script(name, "nccl", monkeypatch) == 1
    assert time.perf_counter() - start_s < 30.0  # a busy machine; 0.02 s on an idle one
    said = capsys.readouterr().err
    assert said.startswith("deadlock: no rank can go on") or "\ndeadlock: no rank" in said
    lines = lines_of(name)
    assert lines
    for line in lines:
        assert f"nccl_hangs.py:{line} in {name}" in said


def test_the_page_shows_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = SCRIPT.parents[1]
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    run_threads(Program("examples/nccl_hangs.py"), ["ring"], RANKS, rules="nccl")
    said = capsys.readouterr().err
    page = (root / "docs" / "laboratory" / "nccl-rules.md").read_text()
    assert "\n".join(said[said.index("deadlock") :].splitlines()[:9]) in page


def test_a_batch_of_messages_is_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_script("batched", "nccl", monkeypatch) == 0


def test_messages_of_a_pair_match_in_the_order_of_issue_and_never_silently_across_tags() -> None:
    def main(world: World) -> list[float]:
        parts = [torch.tensor([float(tag)]) for tag in (1, 2)]
        if world.rank == 0:
            works = [world.group.isend(part, 1, tag) for tag, part in enumerate(parts)]
        else:
            works = [world.group.irecv(parts[tag], 0, tag) for tag in (1, 0)]
        for work in works:
            work.wait()
        return [part.item() for part in parts]

    assert ec.run(main, 2)[1] == [1.0, 2.0]
    with pytest.raises(ec.CollectiveMismatch, match="order of issue") as caught:
        ec.run(main, 2, rules="nccl")
    assert "tag 0" in str(caught.value)
    assert "tag 1" in str(caught.value)


@pytest.mark.parametrize("kind", ["collective", "message"])
def test_a_mismatch_that_a_program_catches_ends_it_over_nccl_which_raises_nothing(
    kind: str,
) -> None:
    def main() -> None:
        dist.init_process_group("gloo")
        rank, tensor = dist.get_rank(), torch.ones(3)
        with contextlib.suppress(ec.CollectiveMismatch):
            if kind == "message":
                dist.send(tensor, 1) if rank == 0 else dist.recv(torch.ones(2), 0)
            else:
                dist.all_reduce(tensor) if rank else dist.broadcast(tensor, 0)
        dist.all_reduce(tensor)

    ec.run(main, 2)
    with pytest.raises(ec.CollectiveMismatch, match=f"{Path(__file__).name}:"):
        ec.run(main, 2, rules="nccl")


def test_another_thread_may_send_while_a_batch_waits_for_its_first_use() -> None:
    def exchange(group: dist.ProcessGroup | None) -> None:
        peer, message = 1 - dist.get_rank(), torch.ones(1)
        pair = [dist.P2POp(each, message.clone(), peer, group) for each in (dist.isend, dist.irecv)]
        for work in batch_isend_irecv(pair):
            work.wait()

    def main() -> None:
        dist.init_process_group("gloo")
        first, second = dist.new_group(), dist.new_group()
        if dist.get_rank() == 0:
            thread = threading.Thread(target=exchange, args=(first,))
            thread.start()
            time.sleep(0.1)  # until the batch is held
            dist.send(torch.ones(1), 1, group=second)
            thread.join()
        else:
            dist.recv(torch.ones(1), 0, group=second)
            exchange(first)

    ec.run(main, 2, rules="nccl")


@pytest.mark.parametrize("rules", [None, "nccl"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_coalesced_on_a_device_is_one_operation(rules: str | None, device: str) -> None:
    def main() -> list[float]:
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        sent, received = torch.full((1,), rank + 1.0), torch.zeros(1)
        on_device = {"device": torch.device(device), "async_ops": True}
        with distributed_c10d._coalescing_manager(**on_device) as messages:
            dist.isend(sent, (rank + 1) % size)
            dist.irecv(received, (rank - 1) % size)
        messages.wait()
        sums = [sent.clone(), sent * 2]
        with distributed_c10d._coalescing_manager(**on_device) as reductions:
            for each in sums:
                dist.all_reduce(each)
        reductions.wait()
        return torch.cat([received, *sums]).tolist()

    expected = [[float(rank or 3), 6.0, 12.0] for rank in range(3)]
    assert ec.run(main, 3, rules=rules) == expected


def test_a_group_whose_ranks_do_not_all_come_holds_those_of_its_first_batch() -> None:
    def main() -> None:
        dist.init_process_group("gloo")
        rank, message = dist.get_rank(), torch.ones(1)
        if rank < 2:
            operation = dist.isend if rank else dist.irecv
            for work in dist.batch_isend_irecv([dist.P2POp(operation, message, 1 - rank)]):
                work.wait()

    ec.run(main, 3)
    with pytest.raises(ec.DeadlockError, match="first use of a group holds ranks 0, 1, 2"):
        ec.run(main, 3, rules="nccl")


def test_what_holds_a_queue_says_which_rank_it_lacks() -> None:
    def main() -> None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        groups = [dist.new_group(ranks) for ranks in ((0, 1), (1, 2))]
        for group, ranks in zip(groups, ((0, 1), (1, 2)), strict=True):
            if rank in ranks:
                dist.all_reduce(torch.ones(1), group=group)  # its first use
        dist.barrier()
        if rank == 1:
            dist.broadcast(torch.ones(1), 1, group=groups[1], async_op=True)
        if rank != 2:
            dist.all_reduce(torch.ones(1), group=groups[0])
        dist.barrier()

    with pytest.raises(ec.DeadlockError) as caught:
        ec.run(main, 3, rules="nccl")
    text = str(caught.value)
    assert "it is queued on rank 1 behind broadcast" in text
    assert ", not joined by rank 2" in text


def test_a_receive_from_any_rank_is_refused() -> None:
    def main() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank():
            dist.recv(torch.empty(1))
        else:
            dist.send(torch.ones(1), 1)

    ec.run(main, 2)
    with pytest.raises(ec.UnsupportedError, match="give recv the rank"):
        ec.run(main, 2, rules="nccl")


def test_an_abort_frees_ranks_whose_operation_waits_in_a_queue() -> None:
    def main() -> str:
        dist.init_process_group("gloo")
        pair, store = dist.new_group([0, 1]), dist.distributed_c10d._get_default_store()
        dist.all_reduce(torch.ones(1))
        match dist.get_rank():
            case 0:
                behind = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), 2)])
                waits = dist.all_reduce(torch.ones(1), group=pair, async_op=True)
                store.set("issued", "")
                try:
                    waits.wait()
                except ec.RankFailed as error:
                    store.set("failed", "")
                    behind[0].wait()
                    return str(error)
            case 1:
                dist.all_reduce(torch.ones(1), group=pair, async_op=True)
                store.wait(["issued"])
                pair.abort()
            case 2:
                store.wait(["failed"])
                dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(1), 0)])[0].wait()
        return ""

    assert "rank 1 aborted" in ec.run(main, 3, rules="nccl")[0]


@pytest.mark.parametrize("waits", [True, False], ids=["a rank waits", "a rank comes later"])
def test_an_abort_frees_ranks_that_a_first_use_holds(waits: bool) -> None:
    def main() -> str:
        dist.init_process_group("gloo")
        pair, store = dist.new_group([0, 1]), dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            store.set("comes", "")
            if not waits:
                store.wait(["aborted"])
            try:
                dist.all_reduce(torch.ones(1), group=pair)
            except ec.RankFailed as error:
                store.set("failed", "")
                return str(error)
        store.wait(["comes"])
        pair.abort()
        store.set("aborted", "")
        store.wait(["failed"])
        return ""

    assert "rank 1 aborted" in ec.run(main, 2, rules="nccl")[0]


@pytest.mark.parametrize("batched", [0, 1])
def test_a_message_of_a_batch_does_not_meet_one_outside_of_any(batched: int) -> None:
    """NCCL carries one by the communicator of the group and the other by that of the pair."""

    def main() -> float:
        dist.init_process_group("gloo")
        rank, message = dist.get_rank(), torch.ones(1) + dist.get_rank()
        operation = dist.irecv if rank else dist.isend
        operation(message, 1 - rank).wait()  # both communicators are there then
        dist.barrier()
        if rank == batched:
            works = dist.batch_isend_irecv([dist.P2POp(operation, message, 1 - rank)])
        else:
            works = [operation(message, 1 - rank)]
        for work in works:
            work.wait()
        return message.item()

    assert ec.run(main, 2) == [1.0, 1.0]
    with pytest.raises(ec.DeadlockError) as caught:
        ec.run(main, 2, rules="nccl")
    said = str(caught.value)
    assert "it is inside of a batch_isend_irecv, and" in said
    assert "it is outside of a batch_isend_irecv, and" in said
    assert said.count("NCCL carries these by two communicators") == 2


def test_each_work_of_a_batch_waits_for_all_of_it_as_the_only_one_over_nccl() -> None:
    def main() -> list[float]:
        dist.init_process_group("gloo")
        other, received = 1 - dist.get_rank(), [torch.zeros(1), torch.zeros(1)]
        messages = [dist.P2POp(dist.irecv, tensor, other) for tensor in received]
        messages += [dist.P2POp(dist.isend, torch.ones(1), other) for _ in received]
        works = batch_isend_irecv(messages)
        works[0].wait()
        assert all(work.is_completed() for work in works)
        return torch.cat(received).tolist()

    assert ec.run(main, 2, rules="nccl") == [[1.0, 1.0]] * 2


def test_a_batch_of_which_a_message_is_refused_is_over() -> None:
    def main() -> float:
        dist.init_process_group("gloo")
        rank, received = dist.get_rank(), torch.zeros(1)
        (dist.recv if rank else dist.send)(received, 1 - rank)
        if rank == 0:
            to_itself = [dist.P2POp(dist.isend, torch.ones(1), 0) for _ in range(2)]
            with pytest.raises(ec.ArgumentError):
                dist.batch_isend_irecv(to_itself)
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(received, 0)
        return received.item()

    assert ec.run(main, 2, rules="nccl") == [0.0, 1.0]


@pytest.mark.parametrize("kind", ["two groups", "a message"])
def test_what_no_rank_waits_for_and_never_ends_is_named_when_all_have_returned(kind: str) -> None:
    def main() -> None:
        dist.init_process_group("gloo")
        rank, groups = dist.get_rank(), [dist.new_group(), dist.new_group()]
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
        dist.recv(torch.ones(1), 0) if rank else dist.send(torch.ones(1), 1)
        if kind == "two groups":
            for group in groups if rank else reversed(groups):
                dist.all_reduce(torch.ones(1), group=group, async_op=True)
        elif rank == 0:
            dist.isend(torch.ones(1), 1)

    ec.run(main, 2)
    with pytest.raises(ec.DeadlockError, match="ranks 0, 1 returned already") as caught:
        ec.run(main, 2, rules="nccl")
    assert f"{Path(__file__).name}:" in str(caught.value)


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")
def test_a_group_of_gloo_in_a_job_over_nccl_keeps_its_tags() -> None:
    def main(backend: str) -> list[float]:
        dist.init_process_group(backend)
        rank, host = dist.get_rank(), dist.new_group(backend="gloo")
        received, names = [torch.zeros(1), torch.zeros(1)], [""] * 2
        if rank == 0:
            dist.send(torch.ones(1), 1)
            for tag, value in enumerate((1.0, 2.0)):
                dist.isend(torch.tensor([value]), 1, group=host, tag=tag)
            dist.all_gather_object(names, "rank 0", group=host)
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.zeros(1), 0)
            arrives = dist.irecv(torch.zeros(1), 0)
            for tag in (1, 0):
                dist.recv(received[tag], None, group=host, tag=tag)
            dist.all_gather_object(names, "rank 1", group=host)
            arrives.wait()
        return torch.cat(received).tolist()

    assert ec.run(main, 2, args=("nccl",), rules="nccl")[1] == [1.0, 2.0]
    with pytest.raises(ec.UnsupportedError):  # nothing says that the job is one over NCCL
        ec.run(main, 2, args=("gloo",), rules="nccl")


def test_rules_are_for_simulated_ranks_and_have_a_name() -> None:
    with pytest.raises(ec.ArgumentError, match="for simulated ranks"):
        ec.run(print, 2, "processes", rules="nccl")
    with pytest.raises(ec.ArgumentError, match="rules is 'mpi'"):
        ec.run(print, 2, rules="mpi")


def test_windows_do_not_reach_peers_as_over_nccl() -> None:
    def main(world: World) -> bool:
        window = world.group.window(4)
        return world.group.shares_memory or window.shared

    assert ec.run(main, 2, rules="nccl") == [False, False]
    assert ec.run(main, 2) == [True, True]


# --- programs by chance ---------------------------------------------------------------------------

_Message = tuple[str, int]  # "send" or "recv", and the peer
_Launch = tuple[str, Any]  # "one" message, a "batch" of them, or a "collective" of a group
SIZE = 3


def draw(seed: int) -> list[list[_Launch]]:
    """What three ranks launch, in an order by chance; every operation has its other side."""
    chance = random.Random(seed)
    lists: list[list[_Launch]] = [[] for _ in range(SIZE)]

    def put(rank: int, *launches: _Launch) -> None:
        for launch in launches:
            place = len(lists[rank])
            if chance.random() < 0.35:
                place = chance.randint(0, place)
            lists[rank].insert(place, launch)

    for _ in range(chance.randint(2, 5)):
        kind = chance.choice(["one", "one", "batch", "mixed", "ring", "collective"])
        src, dst = chance.sample(range(SIZE), 2)
        count = chance.randint(1, 3)
        if kind == "one":
            put(src, ("one", [("send", dst)]))
            put(dst, ("one", [("recv", src)]))
        elif kind == "batch":
            put(src, ("batch", [*[("send", dst)] * count, ("recv", dst)]))
            put(dst, *[("batch", [("recv", src)])] * count, ("batch", [("send", src)]))
        elif kind == "mixed":
            put(src, ("batch", [("send", dst)]))
            put(dst, (chance.choice(["one", "batch", "batch"]), [("recv", src)]))
        else:
            group = chance.randrange(2)
            for rank in range(SIZE):
                around = [("send", (rank + 1) % SIZE), ("recv", (rank - 1) % SIZE)]
                put(rank, ("batch", around) if kind == "ring" else (kind, group))
    return lists


def operations_of(lists: list[list[_Launch]]) -> list[list[list[tuple[Any, ...]]]]:
    """By rank and launch, the names of its operations, which all their ranks give them."""
    counts: Counter[tuple[Any, ...]] = Counter()

    def name(rank: int, kind: str, side: Any) -> tuple[Any, ...]:
        if kind == "collective":
            ranks: tuple[int, ...] = tuple(range(SIZE))
        else:
            ranks = (rank, side[1]) if side[0] == "send" else (side[1], rank)
        key = rank, kind, side, ranks
        counts[key] += 1
        return kind, side if kind == "collective" else None, ranks, counts[key]

    return [
        [[name(rank, kind, side) for side in (what if kind != "collective" else [what])]
         for kind, what in launches]
        for rank, launches in enumerate(lists)
    ]  # fmt: skip


def ends_with_one_queue(lists: list[list[_Launch]]) -> bool:
    """Whether all can be taken from the heads of the lists that is at the head of each of its."""
    queues, has_moved = operations_of(lists), True
    while has_moved:
        has_moved = False
        for queue in queues:
            for operation in list(queue[0]) if queue else []:
                heads = [queues[rank][0] for rank in operation[2] if queues[rank]]
                if len(heads) == len(operation[2]) and all(operation in head for head in heads):
                    for head in heads:
                        head.remove(operation)
                    has_moved = True
            while queue and not queue[0]:
                queue.pop(0)
                has_moved = True
    return not any(queues)


def post(lists: list[list[_Launch]]) -> None:
    """Launch what this rank has, when all communicators are there, and then wait for all."""
    dist.init_process_group("gloo")
    rank, groups = dist.get_rank(), [dist.new_group(), dist.new_group()]
    for group in (None, *groups):
        dist.all_reduce(torch.ones(1), group=group)
    for pair in itertools.combinations(range(SIZE), 2):
        if rank in pair:
            (dist.recv if rank == pair[1] else dist.send)(torch.ones(1), sum(pair) - rank)
    functions, works = {"send": dist.isend, "recv": dist.irecv}, []
    for kind, what in lists[rank]:
        if kind == "collective":
            works.append(dist.all_reduce(torch.ones(1), group=groups[what], async_op=True))
            continue
        messages = [dist.P2POp(functions[op], torch.ones(1), peer) for op, peer in what]
        if kind == "batch":
            works += batch_isend_irecv(messages)
        else:
            works.append(messages[0].op(messages[0].tensor, messages[0].peer))
    for work in works:
        work.wait()


def test_programs_by_chance_hang_if_and_only_if_their_queues_form_a_circle() -> None:
    verdicts = {True: 0, False: 0}
    for seed in range(80):
        lists = draw(seed)
        ends = ends_with_one_queue(lists)
        verdicts[ends] += 1
        ec.run(post, SIZE, args=(lists,))
        if ends:
            ec.run(post, SIZE, args=(lists,), rules="nccl")
        else:
            with pytest.raises(ec.DeadlockError):
                ec.run(post, SIZE, args=(lists,), rules="nccl")
    assert min(verdicts.values()) >= 20
