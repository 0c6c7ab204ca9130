import torch

from echelon.fsdp.gradient_buffer import GradientBuffer


def test_a_gradient_that_is_missing_is_zero_and_rows_go_to_the_views_of_their_ranks() -> None:
    memory = torch.full((8,), 7.0)
    views = [[memory[:2].view(1, 2), memory[4:6].view(1, 2)], memory[2:4], memory[6:8]]
    gradients = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), None, torch.tensor([5.0, 6.0])]
    GradientBuffer(memory, views).fill(gradients)
    assert memory.tolist() == [1, 2, 0, 0, 3, 4, 5, 6]
