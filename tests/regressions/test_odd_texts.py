"""Names that are in no encoding, and exceptions whose text fails, keep nobody from hearing."""

import os
from pathlib import Path

import pytest

import echelon as ec
from tests.cli.jobs import Job

ODD = "jos\udce9"  # as the system gives a name with a byte of Latin-1

TRAINS = f"""
import sys
import echelon as ec
import torch

assert {ODD!r} in __file__
backend, folder = sys.argv[1], sys.argv[2]
world = ec.init(None if backend == "shm" else backend, timeout=20)
model = ec.DDP(torch.nn.Linear(2, 2), world.group)
model(torch.ones(1, 2)).sum().backward()
world.group.subgroup([0, 1]).barrier(label={ODD!r})
ec.save(folder, step=1, model=model)
assert ec.load(folder, model=model).step == 1
if world.rank == 1:
    raise ValueError("there is no file " + __file__)
world.group.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_script_trains_in_a_folder_whose_name_is_in_no_encoding(
    backend: str, tmp_path: Path
) -> None:
    folder = tmp_path / ODD
    os.mkdir(folder)
    with Job(folder, TRAINS, backend, str(folder / "run")) as job:
        code, _, errors = job.end()
    assert code == 1
    assert errors[0].startswith("rank 1 at step 0 raised ValueError: there is no file ")
    assert errors[0].endswith("jos\\udce9/job.py")
    heard = "then rank 0 at step 0 raised RankFailed: rank 1 raised ValueError: there is no file "
    assert any(line.startswith(heard) for line in errors), errors


class MuteError(Exception):
    """An exception whose text fails, as one with a wrong format does."""

    def __str__(self) -> str:
        raise KeyError("text")


def test_simulated_ranks_hear_of_an_exception_whose_text_fails() -> None:
    heard: list[str] = []

    def main(world: ec.World) -> None:
        if world.rank == 1:
            raise MuteError
        try:
            world.group.barrier()
        except ec.RankFailed as error:
            heard.append(str(error))
            raise

    with pytest.raises(MuteError):
        ec.run(main, 2)
    assert heard[0].startswith("rank 1 raised MuteError: (its text raised KeyError)")


RAISES = """
import sys
import echelon as ec

class MuteError(Exception):
    def __str__(self):
        raise KeyError("text")

world = ec.init(None if sys.argv[1] == "shm" else sys.argv[1], timeout=20)
world.group.barrier()
if world.rank == 1:
    raise MuteError
world.group.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_an_exception_whose_text_fails_is_named(backend: str, tmp_path: Path) -> None:
    with Job(tmp_path, RAISES, backend) as job:
        code, _, errors = job.end()
    assert code == 1
    expected = "raised MuteError: (its text raised KeyError)"
    assert errors[0] == f"rank 1 at step 0 {expected}"
    heard = f"then rank 0 at step 0 raised RankFailed: rank 1 {expected}"
    assert any(line.startswith(heard) for line in errors), errors
