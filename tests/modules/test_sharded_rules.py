"""Facts about a part are those of the whole, and a function without a rule is refused."""

import pytest
import torch

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, StateError
from tests.parts import build, looks
from tests.worlds import run_world


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_facts_are_those_of_the_whole(layout: str) -> None:
    facts = looks(
        lambda p: (tuple(p.shape), p.dim(), p.numel(), len(p), p.stride(), p.nbytes, p.size(1)),
        layout,
    )
    assert facts == ((5, 3), 2, 15, 5, (3, 1), 120, 3)
    assert "holds elements" in looks(repr, layout)


@pytest.mark.parametrize(
    "use", [lambda p: p.T, lambda p: p.data_ptr(), lambda p: torch.mm(p, p), lambda p: p.numpy()]
)
def test_a_function_without_a_rule_is_refused(use) -> None:
    with pytest.raises(StateError, match=r"needs the whole tensor.*'weight' of unit 'root'"):
        looks(use)


def backward_to_weight(world: World, layout: str) -> tuple[bool, bool]:
    model = ec.FSDP(build(), world.group, min_num_params=0, layout=layout)
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    model(x).square().sum().backward(inputs=[model.module.weight])
    grad, wanted = model.module.weight.grad, build()
    wanted(x).square().sum().backward()
    start, numel = (own := model.shard_info("weight")[world.rank]).start, own.size
    right = wanted.weight.grad.reshape(-1)[start : start + numel]
    close = torch.allclose(ec.local_shard(grad).reshape(-1), right)
    return close, model.module.bias.grad is None


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_backward_to_chosen_parts_adds_to_them_alone(kind: str, layout: str) -> None:
    assert run_world(kind, backward_to_weight, 2, (layout,)) == [(True, True)] * 2


def test_backward_to_a_frozen_part_says_which() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    with pytest.raises(ArgumentError, match=r"'weight' of unit 'root'.*requires no gradient"):
        looks(lambda p: loss.backward(inputs=[p.requires_grad_(False)]))


def test_backward_to_a_flat_parameter_is_refused() -> None:
    def main(world: World) -> None:
        model = ec.FSDP(build(), world.group, min_num_params=0, use_orig_params=False)
        loss = model(torch.ones(2, 3, dtype=torch.float64)).sum()
        with pytest.raises(StateError, match=r"'flat parameter of .* through which no gradient"):
            loss.backward(inputs=list(model.parameters()))

    ec.run(main, 2)


def test_a_part_in_a_text_is_its_description() -> None:
    texts: list[tuple[str, str]] = []
    looks(lambda p: texts.append((f"{p}", repr(p))))
    assert all(text == description for text, description in texts)
    assert "'weight' of unit 'root'" in texts[0][0]


def test_backward_from_a_part_is_refused() -> None:
    with pytest.raises(StateError, match="'weight' of unit 'root'"):
        looks(lambda p: torch.autograd.backward([p], [p], inputs=[p]))
