"""What the engine does now, and sums that lie where they are added."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from echelon.modules import autograd


def test_a_token_lives_as_long_as_its_backward_also_if_that_fails() -> None:
    tokens, ended = [], []
    x = torch.ones(1, requires_grad=True)

    def queue(grad: Tensor) -> None:
        tokens.append(autograd.queue_end(lambda: ended.append(tokens[-1]() is not None)))
        assert autograd.in_backward()
        assert tokens[-1]() is not None

    (y := x * 2).register_hook(queue)
    y.sum().backward()
    assert ended == [True]
    (y := x * 2).register_hook(queue)
    x.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    gc.collect()
    assert [token() for token in tokens] == [None, None]
    assert ended == [True]
    assert not autograd.in_backward()


def test_the_death_of_a_token_is_told_before_the_exception_arrives() -> None:
    tokens, told = [], []
    x = torch.ones(1, requires_grad=True)
    (y := x * 2).register_hook(lambda grad: tokens.append(autograd.queue_end(None, told.append)))
    x.register_hook(lambda grad: 1 / 0)
    try:
        y.sum().backward()
    except ZeroDivisionError:
        assert told == tokens
    with pytest.raises(KeyError), autograd.token_of_body(told.append) as token:
        raise KeyError
    assert told == [*tokens, token]


def test_it_is_known_which_parameters_a_backward_adds_to() -> None:
    layer, seen = nn.Linear(1, 1), []
    output = layer(torch.ones(1, 1))
    output.register_hook(
        lambda grad: seen.append([autograd.will_accumulate(p) for p in layer.parameters()])
    )
    output.sum().backward(retain_graph=True)
    output.sum().backward(inputs=[layer.bias], retain_graph=True)
    torch.autograd.grad(output.sum(), layer.weight)
    assert seen == [[True, True], [False, True], [False, False]]


def test_a_transform_is_seen() -> None:
    seen = []

    def square(x: Tensor) -> Tensor:
        seen.append(autograd.in_transform())
        return x * x

    torch.func.grad(square)(torch.ones(()))
    square(torch.ones(()))
    assert seen == [True, False]


@pytest.mark.parametrize("shape", [(3, 2), (4, 3, 2)])
def test_the_gradient_of_a_weight_is_added_in_one_pass(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(shape[-1], 5, bias=False).double(), torch.randn(shape).double()
    grad = torch.randn(*shape[:-1], 5).double()
    layer(x).backward(grad)
    expected, layer.weight.grad = layer.weight.grad, None
    torch.testing.assert_close(autograd.weight_gradient(x, grad), expected)
    for times in (1, 2):
        autograd.add_weight_gradient(layer.weight, x, grad)
        torch.testing.assert_close(layer.weight.grad, times * expected)


def test_gradients_of_rows_that_repeat_add_up() -> None:
    weight = nn.Parameter(torch.zeros(3, 2))
    autograd.add_gradient(weight, torch.zeros(3, 2))
    autograd.add_row_gradients(weight, torch.tensor([[0, 2], [2, 2]]), torch.ones(2, 2, 2))
    assert weight.grad.tolist() == [[1, 1], [0, 0], [3, 3]]


def test_a_backward_of_edges_gives_up_what_the_graph_has_saved() -> None:
    x = torch.ones(2, requires_grad=True)
    edges, grads = [torch.autograd.graph.get_gradient_edge(x.exp())], [torch.ones(2)]
    autograd.run_backward(edges, grads)
    with pytest.raises(RuntimeError, match="second time"):
        autograd.run_backward(edges, grads)
