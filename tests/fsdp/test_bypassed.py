"""Simulated ranks that wrap models at one time parse the sources of modules one after another."""

import ast
import threading
import time
from typing import Any

import pytest

import echelon as ec
from echelon.fsdp import units
from tests.fsdp.models import Block, build


def wrap(world: ec.World) -> None:
    ec.FSDP(build(), world.group, units=ec.units.by_type(Block), min_num_params=0)


def test_no_two_ranks_parse_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # CPython 3.11 raises SystemError then: "AST constructor recursion depth mismatch".
    parse, inside, most = ast.parse, threading.Semaphore(4), []

    def slowly(*args: Any, **kwargs: Any) -> ast.AST:
        with inside:
            most.append(4 - inside._value)
            time.sleep(0.01)
            return parse(*args, **kwargs)

    monkeypatch.setattr(ast, "parse", slowly)
    units._tree_of.cache_clear()
    units._uses_of.cache_clear()
    ec.run(wrap, 4)
    assert most
    assert set(most) == {1}
