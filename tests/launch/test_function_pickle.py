"""``ec.run`` with processes calls a function wherever it was defined, and its results come back."""

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import echelon as ec

DEFINED = """
import echelon as ec
import torch

class Found(Exception):
    pass

class Total:
    def __init__(self, value):
        self.value = value

factor = 10

def doubled(x):
    return 2 * x

def main(world, offset):
    weight = torch.full((1,), float(world.rank + offset), requires_grad=True)
    doubled(weight).sum().backward()
    world.group.all_reduce(weight.grad)
    return Total(weight.grad.item() * factor)

def failing(world):
    if world.rank == 1:
        raise Found("here")
    world.group.barrier()

def check():
    totals = ec.run(main, 2, "processes", args=(1,))
    assert [type(total) for total in totals] == [Total, Total]
    assert [total.value for total in totals] == [40.0, 40.0]
    added = 5
    assert ec.run(lambda world: world.rank + added, 2, "processes") == [5, 6]
    try:
        ec.run(failing, 2, "processes")
    except Found as error:
        assert error.__notes__ == ["raised on rank 1 of 2"]
        print("all is well")

"""
GUARDED = f'{DEFINED}\nif __name__ == "__main__":\n    check()\n'


def typed(text: str) -> str:
    """``text`` as one types it at a prompt: an empty line after each definition."""
    blocks = [block for block in text.split("\n\n") if block.strip()]
    return "".join(f"{block.strip(chr(10))}\n\n" for block in blocks)


def python(*arguments: str, folder: Path, given: str | None = None) -> str:
    """What a program of Python prints that ends well."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("way", ["command", "standard input", "prompt", "prompt after a script"])
def test_a_function_that_is_in_no_file(way: str, tmp_path: Path) -> None:
    (tmp_path / "before.py").write_text("main = 1\n")
    printed = {
        "command": lambda: python("-c", f"{DEFINED}\ncheck()", folder=tmp_path),
        "standard input": lambda: python(folder=tmp_path, given=f"{DEFINED}\ncheck()\n"),
        "prompt": lambda: python("-i", folder=tmp_path, given=typed(f"{DEFINED}\n\ncheck()")),
        "prompt after a script": lambda: python(
            "-i", "before.py", folder=tmp_path, given=typed(f"{DEFINED}\n\ncheck()")
        ),
    }[way]()
    assert "all is well" in printed


@pytest.mark.slow
def test_a_script_with_a_lambda_and_its_own_exception(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(GUARDED)
    assert "all is well" in python("script.py", folder=tmp_path)


ALL_GUARDED = f"""
def calls_what_is_guarded(world):
    return [called() for called in [lambda: doubled(world.rank)]]

if __name__ == "__main__":
{textwrap.indent(DEFINED, "    ")}
    check()
    assert ec.run(calls_what_is_guarded, 2, "processes") == [[0], [2]]
    assert ec.run(partial(main, offset=1), 2, "processes")[0].value == 40.0
    assert ec.run(lambda world, total: total.value, 2, "processes", args=(Total(3),)) == [3, 3]
"""


def test_what_a_script_makes_under_its_guard_is_sent_with_its_code(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"from functools import partial\n{ALL_GUARDED}")
    assert "all is well" in python("script.py", folder=tmp_path)


def test_without_cloudpickle_what_is_under_the_guard_is_named(tmp_path: Path) -> None:
    (tmp_path / "cloudpickle.py").write_text("raise ImportError")
    call = f"{DEFINED}\ntry:\n    ec.run(main, 2, 'processes', args=(1,))\n"
    call += "except ec.ArgumentError as error:\n    print(error)\n"
    (tmp_path / "script.py").write_text(
        f"if __name__ == '__main__':\n{textwrap.indent(call, '    ')}"
    )
    assert "'main' is made under `if __name__" in python("script.py", folder=tmp_path)


@pytest.mark.slow
def test_a_cell_of_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jupyter_client.manager import start_new_kernel  # ranks of other tests need it not

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    kernel, client = start_new_kernel(extra_arguments=["--transport=ipc", f"--ip={tmp_path}/ipc"])
    try:
        for cell in (DEFINED, "check()", "ec.run(main, 2, 'processes', args=(1,))[0].value"):
            messages: list[dict] = []
            reply = client.execute_interactive(cell, output_hook=messages.append, timeout=100)
            assert reply["content"]["status"] == "ok", messages
        shown = [message["content"] for message in messages if message["msg_type"] != "status"]
        assert shown[-1]["data"] == {"text/plain": "40.0"}
    finally:
        client.stop_channels()
        kernel.shutdown_kernel()


def test_a_closure_of_a_module_and_what_it_returns() -> None:
    shift = torch.ones(2)

    class Local(Exception):
        pass

    def main(world: ec.World) -> torch.Tensor:
        if world.size == 1:
            raise Local("alone")
        return shift * world.rank

    assert [found.tolist() for found in ec.run(main, 2, "processes")] == [[0, 0], [1, 1]]
    with pytest.raises(Local, match="alone"):
        ec.run(main, 1, "processes")


def test_a_closure_over_what_cannot_be_copied_is_refused_with_what_to_do() -> None:
    lock = threading.Lock()

    def main(world: ec.World) -> bool:
        return lock.locked()

    words = r"cannot pickle '_thread.lock' object\): make in the function what only one process"
    with pytest.raises(ec.errors.ArgumentError, match=words):
        ec.run(main, 2, "processes")
