"""Handlers of Accelerate for groups and DDP of PyTorch."""

from datetime import timedelta

import pytest

pytest.importorskip("accelerate")

from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

from echelon.errors import UnsupportedError
from echelon.integrations.accelerate.process_group_options import check_ddp_options, timeout_of


def test_the_timeout_of_a_process_group_is_kept() -> None:
    handlers = [DistributedDataParallelKwargs(), InitProcessGroupKwargs(timeout=timedelta(hours=2))]
    assert timeout_of(handlers) == 7200.0
    assert timeout_of(handlers[:1]) is None
    assert timeout_of(None) is None


@pytest.mark.parametrize("option", [{"broadcast_buffers": False}, {"bucket_cap_mb": 1}])
def test_an_option_of_another_wrapper_is_refused_by_its_name(option: dict[str, int]) -> None:
    with pytest.raises(UnsupportedError, match=f"has {next(iter(option))}"):
        check_ddp_options(DistributedDataParallelKwargs(**option))


def test_options_without_an_effect_here_are_taken() -> None:
    check_ddp_options(DistributedDataParallelKwargs(find_unused_parameters=True))
    check_ddp_options(None)
