"""The seed of workers depends on its place alone."""

import torch

from echelon.train.worker_seed import seeded_workers


def test_it_depends_on_the_place_and_leaves_the_generator_as_it_was() -> None:
    def drawn(*place: object) -> int:
        with seeded_workers(*place):
            return int(torch.empty((), dtype=torch.int64).random_())

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = drawn(0, 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert drawn(0, 1) == first != drawn(1, 0)
