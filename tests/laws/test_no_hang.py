"""Law: every fault of the catalogue ends every rank with a named error within the timeout."""

import time
from pathlib import Path

import pytest
import torch

import echelon as ec
from echelon import testing
from echelon.errors import CommError

FAULTY, AT = 1, 2  # which rank, at which of its calls
NOTICE_S = 2.0  # how soon the others must know, where nothing but the timeout is needed
MOST_S = 20.0  # of a whole run; a hang would take 60 s, and the machine may be busy


def train(world: ec.World, folder: str) -> None:
    """Some steps of a model whose gradients are averaged; notes of when and how it ended."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(50))
    mark = Path(folder) / str(world.rank)

    def note(text: str) -> None:
        part = mark.with_suffix(".part")  # whoever reads sees all of it
        part.write_text(f"{time.time()} {text}")
        part.replace(mark)

    try:
        for step in range(5):
            loss = (weight * (world.rank + step)).square().sum()
            loss.backward()
            note("runs")
            world.group.all_reduce(weight.grad, "mean", label=f"gradients of step {step}")
            weight.grad = None
    except CommError as error:
        note(f"{type(error).__name__}: {error}")
        raise


def cases() -> list[object]:
    return [
        pytest.param(kind, fault, id=f"{kind}-{fault}")
        for kind in ("threads", "processes")
        for fault in testing.FAULTS
        if not (kind == "threads" and fault.needs_process)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fault"), cases())
def test_every_fault_ends_in_a_named_error_on_every_rank(kind, fault, tmp_path) -> None:
    ranks = 3 if kind == "threads" else 2
    timeout = 0.5 if fault.needs_timeout else 60.0
    start_s = time.monotonic()
    with pytest.raises(fault.ends_in) as info:
        testing.run_faulty(
            train,
            ranks,
            fault,
            rank=FAULTY,
            at=AT,
            world=kind,
            args=(str(tmp_path),),
            timeout=timeout,
        )
    assert time.monotonic() - start_s < MOST_S
    assert f"rank {FAULTY}" in " ".join([str(info.value), *info.value.__notes__])
    last_s, _ = (tmp_path / str(FAULTY)).read_text().split(" ", 1)
    for rank in range(ranks):
        if rank == FAULTY:
            continue
        when_s, text = (tmp_path / str(rank)).read_text().split(" ", 1)
        assert text != "runs"
        assert "all_reduce(mean) float32[50] of 'gradients of step " in text
        assert "#2 of group 'world'" in text or "collective #" in text
        assert f"rank {FAULTY}" in text
        assert float(when_s) - float(last_s) < NOTICE_S + (timeout if fault.needs_timeout else 0)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_rank_that_dawdles_changes_nothing(kind, tmp_path) -> None:
    fault = testing.slow(0.02)
    result = testing.run_faulty(
        train, 2, fault, rank=1, world=kind, args=(str(tmp_path),), timeout=30.0
    )
    assert result == [None, None]
