"""Steps are read and written without the code of their model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.checkpoint.convert.convert import ConvertOptions, Form, convert
from echelon.checkpoint.saved_step import SavedStep
from echelon.errors import CheckpointMismatch


class Extra(nn.Linear):
    """A layer with a further state."""

    def get_extra_state(self) -> Any:
        return {"scale": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"scale": 3}


@pytest.mark.parametrize("form", [Form.DCP, Form.TORCH, Form.ECHELON])
def test_a_schedulers_state_comes_along_and_what_does_not_is_told(
    form: Form, tmp_path: Path
) -> None:
    model = Extra(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    ec.save(tmp_path / "run", step=40, **states, other=nn.Linear(1, 1))
    done = convert(tmp_path / "run", tmp_path / "there", ConvertOptions(to=form, section="model"))
    assert done.left_out == ("other", "rng", "model/_extra_state")
    if form is not Form.ECHELON:
        options = ConvertOptions(to=Form.ECHELON, step=40, trust_pickle=True)
        assert convert(tmp_path / "there", tmp_path / "back", options).left_out == ()
        (tmp_path / "back").rename(tmp_path / "there-again")
    folder = tmp_path / ("there" if form is Form.ECHELON else "there-again")
    assert ec.steps(folder) == [40]
    expected = scheduler.state_dict()
    scheduler.step()
    loaded = ec.load(folder, strict=False, **states)
    assert (scheduler.state_dict(), loaded.missing) == (expected, ("model/_extra_state",))
    assert "scheduler" not in loaded.values


def test_values_are_written_in_the_order_of_the_source(tmp_path: Path) -> None:
    names = [*"zyxwvutsrqponmlkjihgfedcba", "not a name", "model"]
    state = {"state_dict": {"w": torch.ones(1)}, **dict.fromkeys(names, 1)}
    torch.save(state, tmp_path / "a.pt")
    done = convert(tmp_path / "a.pt", tmp_path / "run", ConvertOptions(to=Form.ECHELON))
    assert done.left_out == ("model", "not a name")
    with SavedStep(tmp_path / "run" / "step-000000000") as step:
        assert list(step.sections) == ["model", *names[:26]]


def test_only_a_dict_is_the_state_of_an_object(tmp_path: Path) -> None:
    ec.save(tmp_path, step=0, scheduler=3)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(CheckpointMismatch, match="scheduler: saved as value, here object"):
        ec.load(tmp_path, scheduler=scheduler)
