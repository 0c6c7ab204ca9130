"""A group carries out what is called in ``torch.inference_mode``, at once or beside the caller."""

import pytest
import torch

import echelon as ec
from tests.worlds import KINDS, run_world


def calls(world: ec.World) -> None:
    group = world.group
    with torch.inference_mode():
        assert group.all_gather_object({"rank": world.rank}) == [{"rank": 0}, {"rank": 1}]
        values, parts = torch.full((3,), world.rank + 1.0), torch.zeros(6)
        for async_op in (False, True):
            reduced = values.clone()
            works = [
                group.all_reduce(reduced, async_op=async_op),
                group.all_gather_single(parts, values, async_op=async_op),
            ]
            for work in works:
                if work is not None:
                    work.wait()
            assert reduced.tolist() == [3.0] * 3
            assert parts.tolist() == [1.0] * 3 + [2.0] * 3
    model = ec.FSDP(torch.nn.Sequential(torch.nn.Linear(3, 3)), group, min_num_params=0)
    with torch.inference_mode():
        found = model(values)
    assert torch.equal(found, model(values.clone()).detach())


@pytest.mark.parametrize("kind", KINDS)
def test_calls_in_inference_mode(kind: str) -> None:
    run_world(kind, calls, 2, timeout=20)
