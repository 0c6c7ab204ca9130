"""Five classic hangs of torch.distributed programs are named with both lines, at once."""

import importlib.util
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

import echelon as ec

FILE = Path(__file__).parents[2] / "benchmarks" / "hanging_programs.py"
NAMES = ("barrier_on_one_rank", "swapped_order", "missing_rank", "other_shape", "early_return")


def programs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hanging_programs", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines_of(name: str) -> list[int]:
    """The lines of the program whose comments say that it hangs there."""
    lines = FILE.read_text().splitlines()
    start = lines.index(f"def {name}() -> None:")
    end = next(i for i in range(start + 1, len(lines)) if lines[i].startswith(("def ", "HANGS")))
    marked = [
        i + 1 for i in range(start, end) if "# hangs here" in lines[i] or "# and here" in lines[i]
    ]
    if name == "early_return":  # the last line that the rank calls which has returned
        marked.append(next(i + 1 for i, line in enumerate(lines) if "destroy_process" in line))
    return marked


@pytest.mark.parametrize("name", NAMES)
def test_a_hang_is_named_with_both_lines_before_any_timeout(name: str) -> None:
    main = programs().main
    ec.run(lambda world: main("early_return", 1800.0), 1)  # imports what it needs
    start_s = time.perf_counter()
    with pytest.raises((ec.DeadlockError, ec.CollectiveMismatch)) as caught:
        ec.run(lambda world: main(name, 1800.0), 4)
    assert time.perf_counter() - start_s < 60.0  # benchmarks/hangs.py has the figures
    lines = lines_of(name)
    assert lines
    for line in lines:
        assert f"hanging_programs.py:{line} in " in str(caught.value)


def test_a_rank_waits_for_those_that_cannot_come_and_not_for_those_without_a_turn_yet() -> None:
    with pytest.raises(ec.DeadlockError) as caught:
        ec.run(lambda world: programs().main("early_return", 1800.0), 4)
    missing = [ranks for _, ranks in caught.value.waits.values()]
    assert missing
    assert set(missing) == {(1,)}
    assert "rank 1 returned already" in str(caught.value)


def test_two_ranks_that_wait_for_one_another_wait_for_no_others() -> None:
    def main(world: ec.World) -> None:
        if world.rank in (2, 3):
            world.group.recv(torch.empty(1), 5 - world.rank)
        world.group.barrier()

    with pytest.raises(ec.DeadlockError) as caught:
        ec.run(main, 6)
    waits = {rank: missing for rank, (_, missing) in caught.value.waits.items()}
    assert waits[2] == (3,)
    assert waits[3] == (2,)
    assert all({2, 3} >= set(missing) for missing in waits.values())
