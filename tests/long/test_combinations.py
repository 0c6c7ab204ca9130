"""What fast tests have a part of: every combination, in every world."""

from pathlib import Path

import pytest

import echelon as ec
from tests.cli import sockets
from tests.fsdp.models import PLAIN
from tests.fsdp.test_held import HYBRID, all_are, combined, offloaded
from tests.fsdp.test_lora import EVERY, check_bits
from tests.fsdp.two_memories import separate
from tests.guarded_models import INF
from tests.laws.test_finite_in_every_world import check_skips
from tests.worlds import KINDS, run_world


def test_all_ranks_skip_what_is_infinite_on_one_over_gloo() -> None:
    check_skips("gloo", INF)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("strategy", "ranks"), [*((one, 3) for one in PLAIN), *((one, 4) for one in HYBRID)]
)
def test_ranges_of_all_ranks_are_the_model(strategy: ec.Strategy, ranks: int, kind: str) -> None:
    run_world(kind, all_are, ranks, (combined([strategy]),))


@pytest.mark.parametrize("offload", [ec.Offload.OPTIMIZER, ec.Offload.ALL])
def test_ranges_on_the_host_are_the_model(
    offload: ec.Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    separate(monkeypatch)
    run_world("threads", all_are, 2, (offloaded(offload), True))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_lora_gives_the_bits_of_one_process_in_every_world(kind: str) -> None:
    check_bits(kind, EVERY)


@pytest.mark.parametrize("repetition", range(20))
@pytest.mark.parametrize("kind", sockets.KINDS)
def test_no_process_of_a_job_on_one_host_ever_listens_where_other_hosts_can_reach_it(
    kind: str, repetition: int, tmp_path: Path
) -> None:
    places, off_loopback = sockets.exposed(tmp_path, kind)
    assert off_loopback == []
    assert places
