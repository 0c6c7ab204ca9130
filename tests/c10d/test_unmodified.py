"""Programs of torch.distributed train the same weights on simulated ranks as on gloo."""

import os
import warnings
from pathlib import Path

import pytest
import torch

import echelon as ec
from echelon.c10d.served_backends import OWN_VARIABLE
from tests.c10d.unmodified import PROGRAMS, State, run_all

# Sums of two ranks, and messages, have one order.
ONE_ORDER = {2: {program.__name__ for program in PROGRAMS}, 4: {"pipelined"}}
ONE_ORDER[4].add("tensor_and_data_parallel")  # groups of two


def run_on_gloo(world: object, folder: str) -> dict[str, State]:
    os.environ.update({OWN_VARIABLE: "1", "GLOO_SOCKET_IFNAME": "lo"})
    return run_all(world, folder)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_every_program_trains_the_weights_that_it_trains_on_gloo(
    size: int, kind: str, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("ours", "gloo")]
    for folder in folders:
        folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it does with a mesh
        ours = ec.run(run_all, size, kind, args=(str(folders[0]),))
        gloo = ec.run(run_on_gloo, size, "processes", args=(str(folders[1]),))
    for name, wanted in gloo[0].items():
        for states in ours:
            for parameter, value in states[name].items():
                if name in ONE_ORDER[size]:
                    assert torch.equal(value, wanted[parameter]), (name, parameter)
                else:  # gloo sums in the order of a ring
                    torch.testing.assert_close(value, wanted[parameter], rtol=1e-12, atol=1e-12)
