"""Ranks as processes: what cannot be sent to them or from them is refused or told by its text."""

import os
import subprocess
import sys
import threading

import pytest
import torch

import echelon as ec
from echelon.errors import ArgumentError, WorldError
from tests.children import environ


class Stubborn(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raises_what_cannot_travel(world: ec.World) -> None:
    raise Stubborn(1, 2)


def test_an_exception_that_cannot_be_sent_is_told_by_its_text() -> None:
    with pytest.raises(WorldError, match="Stubborn: 1 and 2"):
        ec.run(raises_what_cannot_travel, 1, "processes")


def returns_what_cannot_travel(world: ec.World) -> object:
    return threading.Lock()


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        ec.run(returns_what_cannot_travel, 1, "processes")


def test_a_function_that_cannot_be_sent_is_refused_with_what_to_do() -> None:
    with pytest.raises(ArgumentError, match="only one process can have, or use world='threads'"):
        ec.run(returns_what_cannot_travel, 2, "processes", args=(threading.Lock(),))


def torch_threads(world: ec.World) -> int:
    return torch.get_num_threads()


def test_processes_share_the_cores_among_them(monkeypatch) -> None:
    expected = int(os.environ["OMP_NUM_THREADS"])
    assert ec.run(torch_threads, 2, "processes") == [expected] * 2


def test_a_script_that_starts_ranks_while_it_is_imported_is_told_what_to_do_once(tmp_path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text("import echelon as ec\ndef main(world): pass\nec.run(main, 2, 'processes')\n")
    ended = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, env=environ()
    )
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1
    assert "ArgumentError: the script starts ranks while it is imported" in ended.stderr
    assert 'under `if __name__ == "__main__":`' in ended.stderr
