"""The view of an FSDP says who has which elements, also of a model with every strategy."""

from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.page import Picture, TextTable, View, view_of


def model_of(world: ec.World, **options: Any) -> ec.FSDP:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    units = ec.units.by_type(nn.Linear)
    return ec.FSDP(layers, world.group, units=units, min_num_params=0, **options)


def shown(world: ec.World, options: dict[str, Any]) -> tuple[View, str, dict[str, Any]]:
    model = model_of(world, **options)
    model(torch.randn(3, 4)).sum().backward()
    infos = {name: model.shard_info(name) for name in ("0.weight", "0.bias", "1.weight", "1.bias")}
    return view_of(model), model._repr_html_(), infos


@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "rows"}, {"strategy": ec.Strategy.SHARD_GRAD_OP}, {"use_orig_params": False}],
    ids=str,
)
def test_the_picture_has_the_ranges_of_shard_info(options: dict[str, Any]) -> None:
    for rank, (view, html, infos) in enumerate(ec.run(shown, 3, args=(options,))):
        assert view.title == "FSDP of Sequential: 3 units on 3 ranks"
        picture = view.parts[0].content
        assert isinstance(picture, Picture)
        table = view.parts[1].content
        assert isinstance(table, TextTable)
        elements = {row[0]: row[3] for row in table.rows}
        for name, shards in infos.items():
            for info in shards:
                box = f"{name}[{info.start}:{info.start + info.size}]: rank {info.rank}, "
                assert (box in picture.svg) == (info.size > 0)
            local = shards[rank]
            whole = local.size == sum(info.size for info in shards)
            expected = "all" if whole else f"{local.start}:{local.start + local.size}"
            assert elements[name] == (expected if local.size else "none")
        assert picture.svg in html


def test_a_replicated_unit_is_everybodys() -> None:
    def main(world: ec.World) -> View:
        return view_of(ec.FSDP(nn.Linear(4, 4), world.group, min_num_params=1000))

    view = ec.run(main, 2)[0]
    picture = view.parts[0].content
    assert isinstance(picture, Picture)
    assert "root (replicated)" in picture.text
    assert "*" in picture.text


def test_the_names_of_a_users_modules_are_escaped() -> None:
    def main(world: ec.World) -> str:
        model = nn.Module()
        model.register_module("<b>", nn.Linear(40, 40))
        model.forward = lambda x: x  # type: ignore[method-assign]
        units = ec.units.by_type(nn.Linear)
        return ec.FSDP(model, world.group, units=units, min_num_params=0)._repr_html_()

    html = ec.run(main, 2)[0]
    assert "&lt;b&gt;" in html
    assert "<b>.weight" not in html
