"""Two trees are compared in turns, sample by sample."""

import io
import re
import time
from pathlib import Path

import pytest

import echelon as ec
from tests import test_benchmarks

folder_on_path = test_benchmarks.folder_on_path
ROOT = test_benchmarks.ROOT


def test_every_operation_of_two_ranks_is_timed() -> None:
    import against

    def names(world: ec.World) -> list[str]:
        return [timing.what for timing in against.collectives(world.group)]

    for timed in ec.run(names, 2):
        assert len(set(timed)) == 10 + 6
        assert {"barrier, 1 KiB", "all_reduce, 4 MiB"} <= set(timed)


@pytest.mark.slow
@pytest.mark.timeout(400)  # four jobs start on a machine that may be busy
@pytest.mark.parametrize("world", ["threads", "processes", "gloo"])
def test_two_trees_are_compared_in_turns(world: str, capsys: pytest.CaptureFixture[str]) -> None:
    import against

    only = "collectives,fsdp" if world == "processes" else "fsdp"
    options = {"world": against.WorldKind(world), "only": only, "quick": True}
    against.main(ROOT, **options, rounds=1)
    progress, _, *rows = capsys.readouterr().out.splitlines()
    assert progress == "round 1 of 1"
    # Collectives, then steps and unshards of two models; each by the clock and by processor.
    num_times = 2 * ((10 + 6) * ("collectives" in only) + 2 * 2)
    times, facts = rows[:num_times], rows[num_times:]
    for row in times:
        this, other, ratio = map(float, re.findall(r"\d+\.\d+", row)[:3])
        assert ratio == pytest.approx(other / this, rel=0.05)
    assert len(facts) == 4
    assert all(row.endswith(", the same in all turns") for row in facts)


@pytest.mark.slow
def test_a_tree_whose_ranks_do_not_start_is_named_at_once(tmp_path: Path) -> None:
    import against

    start_s = time.monotonic()
    with pytest.raises(SystemExit, match=f"the ranks of {tmp_path} did not start"):
        against.main(tmp_path, world=against.WorldKind("threads"), only="fsdp", rounds=1)
    assert time.monotonic() - start_s < against.PATIENCE_S / 2


def test_a_tree_whose_ranks_end_early_is_named() -> None:
    import against

    with pytest.raises(SystemExit, match="the ranks of old ended before their work was done"):
        against.Job(Path("old"), io.StringIO()).turn()


@pytest.mark.parametrize(("loss", "verdict"), [(1.5, "the same"), (2.5, "NOT the same")])
def test_a_loss_that_differs_between_two_trees_is_said(
    loss: float, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import against

    rounds = [{"step": [(0.004, 0.002)]}, {"step": [(0.001, 0.001)]}]
    against.show(rounds, [{"loss": value} for value in (1.5, 1.5, 1.5, loss)])
    _, times, facts = capsys.readouterr().out.splitlines()
    assert times.split() == ["step", "2.5000", "1.5000", "0.750", "±", "0.250", "(1.000)"]
    assert facts == f"loss: 1.5, {verdict} in all turns"
