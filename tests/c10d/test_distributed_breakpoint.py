"""torch.distributed.breakpoint on simulated ranks."""

import builtins

import pytest
import torch
import torch.distributed as dist

import echelon as ec


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")  # torch has lists of names
def test_the_breakpoint_of_torch_opens_the_debugger_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = ["rank 2", "p value", "rank 1", "p value", "c"]
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return commands.pop(0)

    def main(world: ec.World) -> float:
        dist.init_process_group("gloo")
        value = torch.full((1,), dist.get_rank() + 5.0)
        dist.breakpoint(rank=1)
        dist.all_reduce(value)
        dist.destroy_process_group()
        return value.item()

    monkeypatch.setattr(builtins, "input", answer)
    assert ec.run(main, 3) == [18.0] * 3
    output = capsys.readouterr().out
    assert "-> dist.all_reduce(value)\n" in output
    assert "tensor([7.])\n" in output
    assert "tensor([6.])\n" in output
    assert prompts[:2] == ["(Pdb rank 1) ", "(Pdb rank 2) "]
    assert "ATTENTION" not in output
