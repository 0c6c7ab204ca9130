"""Stages of a model with a ModuleList never compute with what only another stage has."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, StageError
from echelon.pipeline.splitting.module_list import find_module_list, names_around
from echelon.pipeline.splitting.split import split
from tests.pipeline.split_models import Decoder, step_like_the_whole
from tests.worlds import run_world


class TwoTrunks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleList([nn.Linear(2, 2)])
        self.b = nn.ModuleList([nn.Linear(2, 2)])


def test_the_longest_list_is_cut_and_the_choice_between_two_is_refused() -> None:
    assert find_module_list(Decoder(2)) == "inner.blocks"
    assert find_module_list(nn.Linear(2, 2)) is None
    with pytest.raises(ArgumentError, match=r"several ModuleLists of 1 blocks, \['a', 'b'\]"):
        split(TwoTrunks(), 1)


@pytest.mark.parametrize(
    ("prefix", "sentence"),
    [
        (["nothing"], "'nothing', which is no name"),
        (["scale"], r"\['inner.embed', 'inner.table'\] are neither"),
    ],
)
def test_a_prefix_that_does_not_fit_is_refused(prefix: list[str], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        split(Decoder(2), 1, prefix=prefix)


class Table(nn.Module):
    """A buffer that is not saved, as tables of positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


class Nested(nn.Module):
    """Has its blocks in a child, with modules on both sides at both levels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.decoder = nn.Module()
        self.decoder.scale = nn.Parameter(torch.ones(4))
        self.decoder.dropout = nn.Dropout()
        self.decoder.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.decoder.norm = nn.LayerNorm(4)
        self.decoder.rotary = Table()
        self.head = nn.Linear(4, 2)
        self.statistics = nn.BatchNorm1d(2, affine=False)


def test_names_are_on_the_side_on_which_they_are_registered() -> None:
    around = names_around(Nested(), "decoder.blocks")
    assert around.before == ["embed", "decoder.scale", "decoder.dropout"]
    assert around.after == ["decoder.norm", "decoder.rotary", "head", "statistics"]
    # Statistics are saved, so that only one stage may have them.
    assert around.tables == {"decoder.rotary"}


class Leaky(Decoder):
    """Its end uses what only its beginning has."""

    def __init__(self, kind: str) -> None:
        super().__init__(3, tied=False)
        self.kind = kind

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = first = self.inner["embed"](tokens) * self.scale
        table = torch.zeros(())
        for i, block in enumerate(self.inner["blocks"]):
            if self.kind == "block" and i == 2:
                table = first.mean()
            x = block(x, table)
        if self.kind == "skip":
            x = x + first
        if self.kind == "in place":
            x = x.clone()
            x[:, 0] = first[:, 0]
        if self.kind == "weight":
            return x @ self.inner["embed"].weight.T
        return self.head(self.inner["norm"](x))


def leak(world: World, kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    step_like_the_whole(world, Leaky(kind).double(), {}, options, {})


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("skip", r"depends on \['inner.embed.weight', 'scale', 'the input of the model'\]"),
        (
            "block",
            "that the first block of its stage is not given",
        ),
        ("in place", "writes into a tensor of this stage"),
        ("weight", r"depends on \['inner.embed.weight'\]"),
    ],
)
def test_what_another_stage_has_is_named_and_never_guessed(kind: str, sentence: str) -> None:
    # One block first, so that the last two are on one stage.
    with pytest.raises((ec.EchelonError, StageError), match=sentence):
        run_world("threads", leak, 2, (kind, {"cost": [2, 1, 1]}))


def test_a_module_used_on_both_sides_may_be_named_on_both() -> None:
    torch.manual_seed(0)
    model = Leaky("weight").double()
    del model.head, model.inner["norm"], model.inner["table"]
    options = {"prefix": ["scale", "inner.embed"], "suffix": ["inner.embed"]}
    run_world("threads", step_like_the_whole, 2, (model, {}, options, {}))


class Reordered(Decoder):
    """Registers what runs after the blocks before them."""

    def __init__(self) -> None:
        super().__init__(3, tied=False)
        head = self.__dict__["_modules"].pop("head")
        self.__dict__["_modules"] = {"head": head, **self.__dict__["_modules"]}


def test_a_wrong_order_of_registration_is_an_error_that_suffix_mends() -> None:
    torch.manual_seed(0)
    model = Reordered().double()
    with pytest.raises(StageError, match=r"\['head.weight'\].* name them with prefix="):
        run_world("threads", step_like_the_whole, 2, (model, {}, {}, {}))
    options = {"suffix": ["head", "inner.norm"]}
    run_world("threads", step_like_the_whole, 2, (model, {}, options, {}))
