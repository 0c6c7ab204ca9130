"""Operations are counted at the place where they run, in both directions."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from echelon.planner.operation_counter import OperationCounter, PlaceWork


def counted(model: nn.Module, *inputs: Tensor) -> tuple[PlaceWork, PlaceWork]:
    with OperationCounter([*model.parameters(), *model.buffers()]) as counter:
        loss = model(*inputs).sum()
        counter.direction = "backward"
        loss.backward()
    return counter.at(0, "forward"), counter.at(0, "backward")


def test_a_linear_layer_is_one_multiplication_and_two_backward() -> None:
    forward, backward = counted(nn.Linear(30, 20), torch.ones(7, 30, requires_grad=True))
    assert forward.multiplications == [(7, 30, 20)]
    assert sorted(map(sorted, backward.multiplications)) == [[7, 20, 30], [7, 20, 30]]
    assert forward.kept == [7 * 30 * 4]  # its input, and not its weight


def test_a_storage_is_kept_once_and_views_launch_nothing() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            return y.view(-1) * y.T.reshape(-1) if y.shape[0] == 1 else y * y

    forward, _ = counted(Twice(), torch.ones(1, 8, requires_grad=True))
    assert forward.kept == [8 * 4]
    assert forward.kernels == 3  # exp, the product and the sum
    # 8 elements are read and written, then twice 8 read and 8 written, and 8 read for one.
    assert forward.moved == 4 * (16 + 24 + 9)


def test_a_causal_mask_halves_attention_and_its_backward_computes_the_scores_again() -> None:
    class Attention(nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.causal = causal

        def forward(self, x: Tensor) -> Tensor:
            return scaled_dot_product_attention(x, x, x, is_causal=self.causal)

    x = torch.ones(2, 3, 16, 8, requires_grad=True)
    (full, full_backward), (half, _) = (counted(Attention(causal), x) for causal in (False, True))
    assert full.attention_flops == 4 * 2 * 3 * 16 * 16 * 8
    assert half.attention_flops == full.attention_flops / 2
    assert full_backward.attention_flops == 2.5 * full.attention_flops


def test_products_in_batches_and_convolutions_have_their_flops() -> None:
    class Batched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x, x.transpose(1, 2))

    forward, backward = counted(Batched(), torch.ones(5, 6, 4, requires_grad=True))
    assert [product.flops for product in forward.multiplications] == [2 * 5 * 6 * 4 * 6]
    assert sum(product.flops for product in backward.multiplications) == 4 * 5 * 6 * 4 * 6
    forward, backward = counted(nn.Conv2d(3, 8, 3), torch.ones(2, 3, 6, 6, requires_grad=True))
    flops = 2 * 2 * 4 * 4 * 8 * 3 * 9
    assert [product.flops for product in forward.multiplications] == [flops]
    assert [product.flops for product in backward.multiplications] == [flops, flops]


def test_places_divide_what_is_counted() -> None:
    layer = nn.Linear(4, 4)
    with OperationCounter(layer.parameters()) as counter:
        layer(torch.ones(2, 4))
        counter.place = 3
        layer(torch.ones(2, 4))
    assert counter.at(0, "forward") == counter.at(3, "forward")
    assert counter.uses == {0: {0, 3}, 1: {0, 3}}


def test_a_transposed_convolution_multiplies_each_element_of_its_input() -> None:
    layer = nn.ConvTranspose2d(8, 4, 3, stride=2)
    forward, backward = counted(layer, torch.ones(2, 8, 5, 5, requires_grad=True))
    flops = 2 * 2 * 5 * 5 * 8 * 4 * 9
    assert [product.flops for product in forward.multiplications] == [flops]
    assert [product.flops for product in backward.multiplications] == [flops, flops]
