"""Copies that nobody keeps alike are compared where there are several, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.checkpoint import sections
from echelon.checkpoint.items import CheckpointItems
from echelon.checkpoint.tensors import digest_of
from echelon.comm.world import World
from echelon.errors import StateError
from tests.pipeline.models import mse


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what is read to be compared between ranks."""
    seen: list[tuple[int, ...]] = []

    def noted(tensor: Tensor) -> str:
        seen.append(tuple(tensor.shape))
        return digest_of(tensor)

    monkeypatch.setattr(sections, "digest_of", noted)
    return seen


def test_one_rank_alone_compares_nothing(compared: list[tuple[int, ...]], tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    given = {"model": model, "optimizer": optimizer}
    ec.save(tmp_path, step=1, **given, table=torch.ones(5))
    ec.async_save(tmp_path, step=2, **given).wait()
    assert compared == []
    found = nn.Linear(3, 2)
    loaded = ec.load(tmp_path, step=1, model=found, optimizer=torch.optim.AdamW(found.parameters()))
    assert torch.equal(found.weight, model.weight)
    assert torch.equal(loaded.values["table"], torch.ones(5))


def test_stages_that_one_rank_has_are_not_compared(
    compared: list[tuple[int, ...]], tmp_path: Path
) -> None:
    def main(world: World) -> None:
        stages = [nn.Linear(3, 3), nn.Linear(3, 3)]
        expected = [one.weight.detach().clone() for one in stages]
        pipe = ec.Pipeline(stages, world.group, microbatches=2, loss_fn=mse)
        ec.save(tmp_path, step=1, model=pipe, rng=False)
        for stage in pipe.stages.values():
            nn.init.zeros_(stage.weight)
        ec.load(tmp_path, model=pipe)
        assert all(torch.equal(one.weight, expected[int(i)]) for i, one in pipe.stages.items())

    ec.run(main, 2, "threads")
    assert compared == []


def test_copies_of_several_ranks_are_compared(
    compared: list[tuple[int, ...]], tmp_path: Path
) -> None:
    def main(world: World) -> None:
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, world.rank)
        nn.init.zeros_(model.bias)
        ec.save(tmp_path, step=1, model=model, group=world.group, rng=False)
        ec.load(tmp_path, model=model, group=world.group)
        assert torch.equal(model.weight, torch.full((2, 3), float(world.rank)))

    ec.run(main, 2, "threads")
    assert sorted(compared) == [(2,), (2,), (2, 3), (2, 3)]
    names = [file.name for file in (tmp_path / "step-000000001").glob("rank-*")]
    assert len(names) == 2


def test_what_two_ranks_take_for_their_own_alone_is_no_copy() -> None:
    model = CheckpointItems.sort({"model": nn.Linear(3, 2)}, None).sections(rng=False)["model"]
    first, second = model.per_rank_digests(0), model.per_rank_digests(1)
    assert first.keys() == second.keys() == {"model/weight", "model/bias"}
    assert all(first[name] != second[name] for name in first)


@pytest.mark.parametrize(
    ("groups_of_1", "rate_of_1", "sentence"),
    [
        (
            [["weight", "bias"]],
            0.1,
            r"'optimizer' of the ranks have different numbers of groups, \{0: 2, 1: 1\} by rank",
        ),
        (
            [["bias"], ["weight"]],
            0.1,
            "parameter 'model/bias' is in groups 0 and 1 of the optimizers 'optimizer'",
        ),
        (
            [["weight"], ["bias"]],
            0.2,
            "group 0 of the optimizers 'optimizer' has other options on rank 1 than on rank 0",
        ),
    ],
    ids=["number", "members", "options"],
)
def test_optimizers_whose_groups_differ_between_ranks_are_refused(
    groups_of_1: list[list[str]], rate_of_1: float, sentence: str, tmp_path: Path
) -> None:
    def main(world: World) -> None:
        model = ec.DDP(nn.Linear(3, 2), world.group)
        params = dict(model.module.named_parameters())
        groups, rate = (groups_of_1, rate_of_1) if world.rank else ([["weight"], ["bias"]], 0.1)
        optimizer = torch.optim.SGD(
            [{"params": [params[name] for name in names]} for names in groups], lr=rate
        )
        ec.save(tmp_path, step=1, model=model, optimizer=optimizer)

    with pytest.raises(StateError, match=sentence):
        ec.run(main, 2, "threads")
    assert ec.steps(tmp_path) == []
