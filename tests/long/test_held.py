"""What ranks hold of a sharded model, with every combination; fast tests have a part of these."""

import pytest

import echelon as ec
from tests.fsdp.models import PLAIN
from tests.fsdp.test_held import HYBRID, all_are, combined, offloaded
from tests.fsdp.two_memories import separate
from tests.worlds import run_world


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
@pytest.mark.parametrize("strategy", PLAIN)
def test_ranges_of_all_ranks_are_the_model(strategy: ec.Strategy, kind: str) -> None:
    run_world(kind, all_are, 3, (combined([strategy]),))


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
@pytest.mark.parametrize("strategy", HYBRID)
def test_replicas_hold_the_same_ranges(strategy: ec.Strategy, kind: str) -> None:
    run_world(kind, all_are, 4, (combined([strategy]),))


@pytest.mark.parametrize("offload", [ec.Offload.OPTIMIZER, ec.Offload.ALL])
def test_ranges_on_the_host_are_the_model(
    offload: ec.Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    separate(monkeypatch.setattr)
    run_world("threads", all_are, 2, (offloaded(offload), True))
