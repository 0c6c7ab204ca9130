"""What simulated ranks replace is as before when they have ended."""

import pytest
import torch

import echelon as ec
from tests.transformers_models import of_gpt2

RANKS = 4


def test_what_ranks_have_replaced_is_as_before_when_they_have_ended(concurrent: bool) -> None:
    library = pytest.importorskip("transformers")
    from transformers import initialization, modeling_utils

    places = [(torch.nn.init, name) for name in vars(torch.nn.init)]
    places += [(torch, "get_default_dtype"), (torch, "set_default_dtype"), (torch, "linspace")]
    places += [(initialization, name) for name in ("no_tie_weights", "no_init_weights")]
    places += [(modeling_utils.PreTrainedModel, name) for name in ("tie_weights", "init_weights")]
    before = [vars(place)[name] for place, name in places]
    kind = type(torch.nn.init)

    def main(world: ec.World) -> None:
        with initialization.no_init_weights(), initialization.no_tie_weights():
            library.GPT2LMHeadModel(of_gpt2(width=8, layers=1))
        torch.set_default_dtype(torch.float64)
        torch.nn.init.ones_ = torch.nn.init.zeros_

    ec.run(main, RANKS, concurrent=concurrent)
    assert [vars(place)[name] for place, name in places] == before
    assert type(torch.nn.init) is kind
    assert torch.get_default_dtype() == torch.float32
