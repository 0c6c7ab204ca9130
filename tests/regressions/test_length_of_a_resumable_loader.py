"""``len(loader)`` is how many batches the loop gets, however the sampler is given to the loader."""

import pytest
import torch
from torch.utils.data import DataLoader

import echelon as ec


@pytest.mark.parametrize(("num_samples", "drop_last"), [(24, False), (26, False), (26, True)])
def test_the_length_of_a_loader_is_its_number_of_batches(num_samples: int, drop_last: bool) -> None:
    data = torch.arange(num_samples)
    for rank in range(3):
        sampler = ec.ResumableSampler(num_samples, 8, (rank, 3), drop_last=drop_last)
        share = (3, 3, 2)[rank]
        loaders = [
            DataLoader(data, batch_sampler=sampler),
            DataLoader(data, sampler=sampler, batch_size=share),
            DataLoader(data, sampler=sampler, batch_size=None),
        ]
        batches = [[*sampler.batches(loader)] for loader in loaders]
        with_samples = sum(batch is not None for batch in batches[0])
        assert len(sampler) == sampler.num_batches == len(batches[0])
        assert len(loaders[0]) == len(loaders[2]) == len(batches[0])
        assert len(loaders[1]) == with_samples
