"""A mixture of experts in a pipeline, and operations that cannot run by shapes alone."""

from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from tests.worlds import run_world

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def mixtral(**options: Any) -> nn.Module:
    library = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return library.MixtralForCausalLM(
        library.MixtralConfig(**SIZES, **HEADS, **EXPERTS, use_cache=False, **options)
    )


def token_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def trains_as_one_process(world: ec.World, expected: dict[str, torch.Tensor]) -> float:
    model = mixtral()
    model.load_state_dict({key: value for key, value in expected.items() if key[:5] != "grad "})
    tokens = torch.arange(32).view(4, 8)
    pipe = ec.Pipeline(ec.pipeline.split(model, 2), world.group, microbatches=2, loss_fn=token_loss)
    loss = pipe.step(tokens, target=tokens, loss_everywhere=True)
    for stage in pipe.stages.values():
        for name, param in stage.named_parameters():
            # Rows are added up in two microbatches, in float32.
            torch.testing.assert_close(param.grad, expected[f"grad {name}"], rtol=1e-4, atol=1e-6)
    return loss.item()


def test_mixtral_has_the_gradients_of_one_process():
    plain = mixtral()
    tokens = torch.arange(32).view(4, 8)
    loss = token_loss(plain(tokens), tokens)
    loss.backward()
    grads = {f"grad {name}": param.grad for name, param in plain.named_parameters()}
    found = run_world("threads", trains_as_one_process, 2, ({**plain.state_dict(), **grads},))
    assert found == pytest.approx([loss.item()] * 2, rel=1e-5)


def test_the_logits_of_all_routers_are_refused_by_name():
    model = mixtral(output_router_logits=True)
    with pytest.raises(ec.ArgumentError, match="output_router_logits = False"):
        ec.pipeline.split(model, 2)


class Experts(nn.Module):
    """Looks into values, which the stages before do not have."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + torch.nonzero(scale).sum()


class ScaleAfterBlocks(nn.Module):
    """Registers what its blocks need after them, so that only the last stage has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(Experts() for _ in range(4))
        self.scale = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, scale = self.first(x), self.scale.weight * 2
        for block in self.blocks:
            x = block(x, scale)
        return x


def steps(world: ec.World) -> None:
    stages = ec.pipeline.split(ScaleAfterBlocks(), 2)
    pipe = ec.Pipeline(stages, world.group, microbatches=1, loss_fn=nn.functional.mse_loss)
    pipe.step(torch.ones(2, 2), target=torch.zeros(2, 2))


def test_an_operation_without_shapes_names_what_the_stage_lacks_and_what_to_do():
    with pytest.raises(ec.StageError) as caught:
        run_world("threads", steps, 2)
    assert "nonzero() depends on ['scale.weight'], which other stages have" in str(caught.value)
    assert "name them with prefix=[...] and suffix=[...]" in str(caught.value)
