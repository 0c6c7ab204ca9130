"""Workers that read a stream: the order and the position are those of the loader."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import echelon as ec

# torchdata 0.11 calls it, and torch 2.13 warns: https://github.com/meta-pytorch/data/issues
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Shards(IterableDataset[int]):
    """Each worker reads its own numbers; with a state of its own."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        while self.at < 10:
            self.at += 1
            if self.at % num_workers == worker:
                yield self.at
        self.at = 0


def stream_of(workers: int, rank: int = 0, size: int = 1) -> ec.SampleStream:
    loader = StatefulDataLoader(Shards(), batch_size=None, num_workers=workers)
    return ec.SampleStream(loader, 4, (rank, size))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_stop_loses_and_repeats_nothing_that_workers_have_read_ahead(
    workers: int, stop: int, tmp_path: Path
) -> None:
    whole = [batch.tolist() for batch in stream_of(workers).batches(2)]
    first = stream_of(workers)
    seen = [batch.tolist() for batch in islice(first.batches(2), stop)]
    ec.save(tmp_path, step=1, stream=first)
    later = [stream_of(workers, rank, 2) for rank in range(2)]
    for part in later:
        ec.load(tmp_path, stream=part)
    for parts in zip(*(part.batches(2 - part.epoch) for part in later), strict=True):
        seen.append([sample for part in parts if part is not None for sample in part.tolist()])
    assert seen == whole
    assert sorted(sum(whole, [])) == sorted([*range(1, 11)] * 2)  # noqa: RUF017


def test_other_numbers_of_workers_and_batches_of_the_loader_are_refused() -> None:
    stream = stream_of(2)
    next(stream.batches())
    with pytest.raises(ec.ArgumentError, match="was read by 2 workers, and has 0 here"):
        stream_of(0).load_state_dict(stream.state_dict())
    for kind in (DataLoader, StatefulDataLoader):
        with pytest.raises(ec.ArgumentError, match="a loader that makes batches"):
            ec.SampleStream(kind(Shards(), batch_size=2), 4, (0, 1))
