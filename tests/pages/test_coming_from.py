"""Every option and name of PyTorch's wrappers has its row in the pages for those who know them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.fsdp as theirs
from torch.nn.parallel import DistributedDataParallel

from tests.pages.rows import FOLDER, names_in_rows, parameters_of, public_methods

DDP_PAGE = FOLDER / "pytorch-ddp.md"
FSDP_PAGE = FOLDER / "pytorch-fsdp2.md"


@pytest.mark.parametrize(
    "callable_",
    [
        theirs.fully_shard,
        theirs.MixedPrecisionPolicy,
        theirs.OffloadPolicy,
        theirs.CPUOffloadPolicy,
        theirs.FullyShardedDataParallel,
        theirs.MixedPrecision,
        theirs.CPUOffload,
        theirs.FullyShardedDataParallel.summon_full_params,
    ],
    ids=lambda item: item.__name__,
)
def test_every_parameter_of_fsdp_has_its_row(callable_: Callable[..., Any]) -> None:
    assert parameters_of(callable_) - {"module"} - names_in_rows(FSDP_PAGE) == set()


def test_every_public_name_of_fsdp_has_its_row() -> None:
    names = {name for name in theirs.__all__ if not name.startswith("_")}
    names |= public_methods(theirs.FSDPModule) | public_methods(theirs.FullyShardedDataParallel)
    shown = names_in_rows(FSDP_PAGE) | set(FSDP_PAGE.read_text().replace("`", " ").split())
    assert names - shown - {"module", "forward", "named_buffers", "named_parameters"} == set()


def test_every_parameter_and_method_of_ddp_has_its_row() -> None:
    names = parameters_of(DistributedDataParallel) | public_methods(DistributedDataParallel)
    assert names - names_in_rows(DDP_PAGE) == set()


def test_every_page_is_in_the_table_of_pages() -> None:
    index = (FOLDER / "index.md").read_text()
    pages = [page.name for page in FOLDER.glob("*.md") if page.name != "index.md"]
    assert [name for name in pages if f"({name})" not in index] == []


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*-*.md")), ids=lambda page: page.stem)
def test_no_row_is_without_an_answer(page: Any) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert [row for row in rows if len(row.split(" | ")) != 2 or row.endswith("| |")] == []
    assert rows
