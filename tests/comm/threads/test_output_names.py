"""A simulated rank that silences or redirects itself silences no other rank."""

import builtins
import io
import logging
import sys
from contextlib import redirect_stdout
from typing import Any

import pytest

import echelon as ec


def print_of_first(world: ec.World) -> None:
    original = builtins.print

    def print_if_first(*args: Any, force: bool = False) -> None:
        if world.rank == 0 or force:
            original(*args)

    builtins.print = print_if_first
    world.group.barrier()
    print("loss", world.rank)
    print("forced", world.rank, force=True)  # type: ignore[call-overload]


def stdout_of_first(world: ec.World) -> None:
    if world.rank:
        sys.stdout = io.StringIO()
    world.group.barrier()
    print("loss", world.rank)
    with redirect_stdout(io.StringIO()) as kept:
        world.group.barrier()
        print("kept")
    assert kept.getvalue() == "kept\n"


def logging_by_rank(world: ec.World) -> None:
    logger = logging.getLogger("of all ranks")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"[rank {world.rank}] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if world.rank else logging.INFO)
    logger.propagate = False
    logging.disable(logging.ERROR if world.rank == 2 else logging.NOTSET)
    world.group.barrier()
    logger.info("info")
    logger.warning("warning")


CASES = {
    print_of_first: ["forced 0", "forced 1", "forced 2", "loss 0"],
    stdout_of_first: ["loss 0"],
    logging_by_rank: ["[rank 0] info", "[rank 0] warning", "[rank 1] warning"],
}


@pytest.mark.parametrize("main", CASES, ids=lambda main: main.__name__)
def test_what_a_rank_replaces_to_print_less_is_its_own(
    main: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = builtins.print, sys.stdout, vars(logging.getLogger("of all ranks"))["handlers"][:]
    ec.run(main, 3)
    assert sorted(capsys.readouterr().out.splitlines()) == CASES[main]
    logger = logging.getLogger("of all ranks")
    assert (builtins.print, sys.stdout, logger.handlers) == before
    assert "handlers" not in vars(logging.Logger)
    assert logging.root.manager.disable == logging.NOTSET
