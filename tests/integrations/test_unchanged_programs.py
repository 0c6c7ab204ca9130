"""Accelerate and ``Trainer`` as they are, over shared memory: the default group was made before."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.jobs import TORCHRUN, run_job

for library in ("accelerate", "transformers"):
    pytest.importorskip(library)
HERE = "tests.integrations.test_unchanged_programs"
EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples" / "integrations"


def train_in(backend: str, folder: str) -> Any:
    """Unchanged programs of both libraries."""
    import torch.distributed as dist
    from accelerate import Accelerator
    from transformers import Trainer

    from tests.integrations.accelerate import accelerated_training
    from tests.integrations.transformers import gpt_training

    if backend == "echelon":
        import echelon.c10d

        dist.init_process_group(echelon.c10d.BACKEND)
    losses, weights = accelerated_training.train(Accelerator, cpu=True)
    gpt_training.train(Trainer, folder)
    dist.barrier()  # rank 0 has written the weights
    return dist.get_backend(), losses, {**weights, **gpt_training.weights_in(folder)}


@pytest.mark.slow
def test_unchanged_programs_have_the_weights_of_gloo(tmp_path: Path) -> None:
    results = {
        backend: run_job(f"{HERE}:train_in", 2, backend, str(tmp_path / backend), launcher=TORCHRUN)
        for backend in ("gloo", "echelon")
    }
    for backend, ranks in results.items():
        assert [result[0] for result in ranks] == [backend, backend]
        assert all(torch.equal(value, ranks[1][2][name]) for name, value in ranks[0][2].items())
    expected, found = results["gloo"][0], results["echelon"][0]
    assert found[1] == pytest.approx(expected[1], rel=1e-12)
    assert found[2].keys() == expected[2].keys()
    for name, value in found[2].items():  # two ranks: the order of a sum is the same
        assert torch.equal(value, expected[2][name]), name


@pytest.mark.parametrize("host", ["accelerate", "trainer"])
def test_at_most_three_lines_of_a_script_change(host: str) -> None:
    def code(name: str) -> list[str]:
        text = (EXAMPLES / f"{host}_{name}.py").read_text()
        return text.split('"""', 2)[2].splitlines()

    lines = list(difflib.unified_diff(code("plain"), code("echelon"), n=0, lineterm=""))[2:]
    added = [line for line in lines if line.startswith("+") and line != "+"]
    assert 0 < len(added) <= 3
    assert sum(line.startswith("-") for line in lines) <= 3
