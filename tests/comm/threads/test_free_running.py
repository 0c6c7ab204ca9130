"""Ranks that run at the same time."""

from __future__ import annotations

import threading

import pytest
import torch

import echelon as ec
from echelon.comm.threads.free_running import FreeRunning
from echelon.comm.threads.running_time import running_s
from tests.transformers_models import of_gpt2


def test_all_ranks_run_at_once_with_a_random_stream_each() -> None:
    meeting = threading.Barrier(4)

    def main(world: ec.World) -> float:
        torch.manual_seed(world.rank)
        meeting.wait(20)
        value = torch.rand(1).item()
        meeting.wait(20)
        return value

    expected = [torch.rand(1, generator=torch.Generator().manual_seed(r)).item() for r in range(4)]
    assert ec.run(main, 4, concurrent=True) == expected


def test_there_is_one_clock_and_no_turn() -> None:
    order = FreeRunning(2)
    before = running_s()
    assert before <= order.clock(0) <= order.clock(1)
    order.advance_clock(0, before + 1000)
    assert order.clock(0) < before + 500
    first_ns = order.clock_of(0)()
    assert before <= 1e-9 * first_ns <= 1e-9 * order.clock_of(1)() <= order.clock(0)
    assert order.idle_s() == 0
    assert not order.is_next(1)
    assert order.long_turn(0.0) is None


def test_what_ranks_have_replaced_is_as_before_when_they_have_ended(concurrent: bool) -> None:
    library = pytest.importorskip("transformers")
    from transformers import initialization, modeling_utils

    places = [(torch.nn.init, name) for name in vars(torch.nn.init)]
    places += [(torch, "get_default_dtype"), (torch, "set_default_dtype"), (torch, "linspace")]
    places += [(initialization, name) for name in ("no_tie_weights", "no_init_weights")]
    places += [(modeling_utils.PreTrainedModel, name) for name in ("tie_weights", "init_weights")]
    before = [vars(place)[name] for place, name in places]
    kind = type(torch.nn.init)

    def main(world: ec.World) -> None:
        with initialization.no_init_weights(), initialization.no_tie_weights():
            library.GPT2LMHeadModel(of_gpt2(width=8, layers=1))
        torch.set_default_dtype(torch.float64)
        torch.nn.init.ones_ = torch.nn.init.zeros_

    ec.run(main, 4, concurrent=concurrent)
    assert [vars(place)[name] for place, name in places] == before
    assert type(torch.nn.init) is kind
    assert torch.get_default_dtype() == torch.float32
