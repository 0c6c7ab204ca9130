"""Each simulated rank of a program imports the program's modules for itself."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from echelon.comm.threads.rank_modules import VARIABLE, ProgramModules
from echelon.launch.program import Program
from echelon.launch.simulated_job import run_threads
from tests.children import environ

RANKS = 3


class Done(NamedTuple):
    """How a run ended, and what it printed."""

    code: int
    lines: list[str]
    errors: str


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Writes files and runs ``train.py`` of them on simulated ranks."""

    def run_files(files: dict[str, str], *, module: str | None = None) -> Done:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["echelon"])
        monkeypatch.setattr(sys, "path", list(sys.path))
        program = Program(module or "train.py", module is not None)
        code = run_threads(program, [], RANKS, 20.0)
        printed = capsys.readouterr()
        return Done(code, sorted(printed.out.splitlines()), printed.err)

    return run_files


GROUPS = """
import os
RANK = int(os.environ["RANK"])
group = None

def set_up(world):
    global group
    group = world.rank
"""

TRAIN = """
import echelon as ec
import groups_of_model as groups
world = ec.init()
groups.set_up(world)
world.group.barrier()
import groups_of_model
print(world.rank, groups.RANK, groups.group, groups_of_model is groups)
"""


def test_a_module_beside_the_script_is_imported_by_each_rank(run: Run) -> None:
    before = list(sys.meta_path)
    done = run({"train.py": TRAIN, "groups_of_model.py": GROUPS})
    assert (done.code, done.errors) == (0, "")
    assert done.lines == [f"{rank} {rank} {rank} True" for rank in range(RANKS)]
    assert "groups_of_model" not in sys.modules
    assert sys.meta_path == before


def test_so_are_modules_of_a_package_in_the_working_directory_when_one_of_them_is_the_program(
    run: Run,
) -> None:
    files = {
        "own_package/__init__.py": "import os\nRANK = os.environ['RANK']",
        "own_package/train.py": (
            "import echelon as ec\nfrom . import RANK\nfrom .below import deep\n"
            "world = ec.init()\nworld.group.barrier()\nprint(world.rank, RANK, deep.RANK)"
        ),
        "own_package/below/deep.py": "from own_package import RANK",  # of a namespace package
    }
    done = run(files, module="own_package.train")
    assert (done.code, done.errors) == (0, "")
    assert done.lines == [f"{rank} {rank} {rank}" for rank in range(RANKS)]
    assert not any(name.startswith("own_package") for name in sys.modules)


def test_a_module_may_wait_for_other_ranks_while_it_is_imported(run: Run) -> None:
    files = {
        "train.py": "import meets_others\nprint(meets_others.ranks)",
        "meets_others.py": (
            "import torch.distributed as dist\n"
            "dist.init_process_group('gloo')\n"
            "ranks = [None] * dist.get_world_size()\n"
            "dist.all_gather_object(ranks, dist.get_rank())\n"
        ),
    }
    done = run(files)
    assert done.code == 0
    assert done.lines == [str(list(range(RANKS)))] * RANKS


def test_objects_of_classes_of_the_script_go_from_rank_to_rank_as_between_processes(
    run: Run,
) -> None:
    script = """
import torch.distributed as dist
from dataclasses import dataclass

@dataclass
class Options:
    rank: int

dist.init_process_group("gloo")
received = [Options(dist.get_rank())]
dist.broadcast_object_list(received, src=1)
print(received[0].rank, type(received[0]) is Options)
"""
    done = run({"train.py": script})
    assert done.code == 0
    assert done.lines == ["1 True"] * RANKS


@pytest.mark.slow
def test_workers_of_a_loader_send_objects_of_classes_of_the_script(tmp_path: Path) -> None:
    script = """
from dataclasses import dataclass
import torch

@dataclass
class Row:
    number: int

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        return Row(number)

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        options = {"batch_size": None, "num_workers": 1, "multiprocessing_context": method}
        rows = list(torch.utils.data.DataLoader(Rows(), **options))
        print(rows == [Row(0), Row(1)])
"""
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "echelon", "run", "--world", "threads", "--ranks", "2"]
    done = subprocess.run(
        [*command, "train.py"],
        cwd=tmp_path,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["True"] * 4


def with_operators(name: str) -> dict[str, str]:
    """A program with a module that makes a library of operators, as a process does once."""
    return {
        "train.py": f"import {name}, echelon as ec\nprint(ec.init().rank, {name}.library.ns)",
        f"{name}.py": f"import torch\nlibrary = torch.library.Library('{name}', 'DEF')",
    }


def test_a_module_that_cannot_be_imported_twice_is_shared_by_choice(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(with_operators("refused_operators"))
    assert done.code == 1
    assert f"{VARIABLE}=-MODULE" in done.errors
    monkeypatch.setenv(VARIABLE, "-shared_operators")
    done = run(with_operators("shared_operators"))
    assert (done.code, done.errors) == (0, "")
    assert done.lines == [f"{rank} shared_operators" for rank in range(RANKS)]
    del sys.modules["shared_operators"]


@pytest.mark.parametrize(
    ("folder", "choices", "expected"),
    [
        ("", "", True),
        ("deep/er", "", True),
        ("venv/lib/python3/site-packages", "", False),
        ("libraries", "", False),
        ("libraries", "some_library", True),
        ("", "-some_library", False),
    ],
)
def test_what_is_installed_is_shared_but_for_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, choices: str, expected: bool
) -> None:
    place = tmp_path / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / "some_library.py").write_text("")
    (tmp_path / "libraries/some_library-1.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(place))
    modules = ProgramModules([str(tmp_path)], choices)
    assert modules.find_spec("some_library") is not None
    modules_before = "some_library" in modules.save().modules
    monkeypatch.setitem(sys.modules, "some_library", sys)
    assert not modules_before
    assert ("some_library" in modules.save().modules) is expected
