"""The debugger of ranks in a notebook, which answers through its kernel."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ipykernel")
manager = pytest.importorskip("jupyter_client.manager")

CODE = """
import torch, echelon as ec

def main(world):
    value = torch.full((2,), float(world.rank))
    world.breakpoint(rank=1)
    world.group.all_reduce(value)
    return value.sum().item()

print(ec.run(main, 3, timeout=0.5))
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """A client of a kernel."""
    process, client = manager.start_new_kernel(kernel_name="python3")
    try:
        yield client
    finally:
        client.stop_channels()
        process.shutdown_kernel(now=True)


def executed(kernel: Any, code: str, *commands: str, asks: bool = True) -> tuple[str, str]:
    """What a cell prints, and the name of the error that it ends in; commands answer it."""
    left, printed = list(commands), []

    def answer(message: Any) -> None:
        printed.append(message["content"]["prompt"])
        time.sleep(0.8)  # longer than a rank waits for another
        kernel.input(left.pop(0))

    def read(message: Any) -> None:
        printed.append(message["content"].get("text", ""))

    reply = kernel.execute_interactive(
        code, allow_stdin=asks, stdin_hook=answer, output_hook=read, timeout=100
    )
    assert not left
    return "".join(printed), reply["content"].get("ename", "")


@pytest.mark.slow
def test_a_cell_asks_for_commands_and_shows_all_ranks(kernel: Any) -> None:
    output, error = executed(
        kernel, CODE, "ranks", "rank 2", "p value", "where", "rank 1", "n", "p value", "c"
    )
    assert error == ""
    assert "main      cell In[1]:6  waits in all_reduce(sum) float32[2]" in output
    assert "->    1  main      cell In[1]:6  stopped here" in output
    assert "(Pdb rank 2) tensor([2., 2.])" in output
    assert "(Pdb rank 1) tensor([3., 3.])" in output
    assert "[6.0, 6.0, 6.0]" in output


@pytest.mark.slow
def test_quitting_ends_the_cell_and_a_notebook_that_cannot_ask_gets_an_error(kernel: Any) -> None:
    assert executed(kernel, CODE, "q")[1] == "DebuggerQuit"
    assert executed(kernel, CODE, asks=False)[1] == "StdinNotImplementedError"
    assert executed(kernel, "print(1 + 1)") == ("2\n", "")
