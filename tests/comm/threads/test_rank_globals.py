"""What a simulated rank sets or replaces for a while is its own, as in a process of its own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from tests.transformers_models import VOCABULARY, of_gpt2, of_llama

RANKS = 4
BUILDS = 20


def of_t5() -> Any:
    return pytest.importorskip("transformers").T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2
    )


def of_mixtral() -> Any:
    return pytest.importorskip("transformers").MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        max_position_embeddings=16,
    )


ARCHITECTURES = {
    "LlamaForCausalLM": lambda: of_llama("Llama", width=16, layers=2),
    "GPT2LMHeadModel": lambda: of_gpt2(width=16, layers=1),
    "T5ForConditionalGeneration": of_t5,
    "MixtralForCausalLM": of_mixtral,
}


def built(architecture: str, seed: int) -> dict[str, Tensor]:
    library = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    model = getattr(library, architecture)(ARCHITECTURES[architecture]())
    return dict(model.state_dict())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_transformers_model_is_built_as_in_one_process(architecture: str) -> None:
    expected = [built(architecture, seed) for seed in range(BUILDS)]

    def main(world: ec.World) -> list[dict[str, Tensor]]:
        return [built(architecture, seed) for seed in range(BUILDS)]

    for models in ec.run(main, RANKS):
        for model, wanted in zip(models, expected, strict=True):
            assert_same(model, wanted)


def test_ranks_load_and_build_models_of_several_dtypes_at_once(tmp_path: Path) -> None:
    library = pytest.importorskip("transformers")
    config = of_llama("Llama", width=16, layers=1)
    library.LlamaForCausalLM(config).save_pretrained(tmp_path)

    def load() -> dict[str, Tensor]:
        model = library.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return dict(model.state_dict())

    def make() -> dict[str, Tensor]:
        torch.manual_seed(1)
        own = of_llama("Llama", width=16, layers=1)
        model = library.LlamaForCausalLM._from_config(own, dtype=torch.float64)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return dict(model.state_dict())

    def plain() -> dict[str, Tensor]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(3, 4), nn.MultiheadAttention(4, 2))
        numbers = torch.arange(5) / 2
        return {**model.state_dict(), "numbers": numbers, "grid": torch.linspace(0, 1, 3)}

    tasks: list[Callable[[], dict[str, Tensor]]] = [load, make, plain, plain]
    expected = [task() for task in tasks]

    def main(world: ec.World) -> list[dict[str, Tensor]]:
        return [tasks[world.rank]() for _ in range(10)]

    for rank, results in enumerate(ec.run(main, RANKS)):
        for result in results:
            assert_same(result, expected[rank])


def test_what_ranks_have_replaced_is_as_before_when_they_have_ended() -> None:
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

    ec.run(main, RANKS)
    assert [vars(place)[name] for place, name in places] == before
    assert type(torch.nn.init) is kind
    assert torch.get_default_dtype() == torch.float32


def test_a_rank_that_skips_weights_leaves_those_of_the_others() -> None:
    pytest.importorskip("transformers")
    from transformers import initialization

    architecture = "GPT2LMHeadModel"
    expected = built(architecture, 3)

    def main(world: ec.World) -> dict[str, Tensor]:
        if world.rank:
            world.group.barrier()
            model = built(architecture, 3)
            world.group.barrier()
            return model
        with initialization.no_init_weights(), initialization.no_tie_weights():
            world.group.barrier()  # ranks may wait for one another inside of it
            model = built(architecture, 3)
            world.group.barrier()
        return model

    skipped, *others = ec.run(main, RANKS)
    for model in others:
        assert_same(model, expected)
    name = "transformer.h.0.mlp.c_fc.weight"
    assert not torch.equal(skipped[name], expected[name])


def test_a_rank_replaces_a_function_for_itself_and_finds_its_own() -> None:
    @contextmanager
    def replaced(value: float) -> Iterator[None]:
        found = nn.init.kaiming_uniform_
        nn.init.kaiming_uniform_ = lambda tensor, *_, **__: nn.init.constant_(tensor, value)
        try:
            yield
        finally:
            nn.init.kaiming_uniform_ = found

    def main(world: ec.World) -> list[float]:
        seen = []
        for _ in range(20):
            if world.rank == 0:
                seen.append(nn.Linear(1, 1).weight.item() < 2)
                continue
            with replaced(world.rank + 1):
                with replaced(10 * world.rank):
                    inner = nn.Linear(1, 1).weight.item()
                outer = nn.Linear(1, 1).weight.item()
            seen.append((outer, inner, nn.Linear(1, 1).weight.item() < 2))
        return seen

    first, *others = ec.run(main, RANKS)
    assert first == [True] * 20
    for rank, seen in enumerate(others, start=1):
        assert seen == [(rank + 1.0, 10.0 * rank, True)] * 20


def test_each_rank_has_its_own_default_dtype() -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32]

    def main(world: ec.World) -> set[torch.dtype]:
        seen = set()
        for _ in range(50):
            torch.set_default_dtype(dtypes[world.rank])
            made = [torch.zeros(2), torch.tensor(1.0), torch.arange(3) / 2, nn.Linear(2, 2).weight]
            made += [torch.randn(2), nn.functional.dropout(torch.ones(2), 0.5)]
            weight = torch.ones(2, requires_grad=True)
            (weight * torch.ones(2)).sum().backward()
            assert weight.grad is not None
            seen |= {tensor.dtype for tensor in (*made, weight.grad)} | {torch.get_default_dtype()}
            world.group.all_reduce(torch.ones(2, dtype=torch.float32))
            torch.set_default_dtype(torch.float32)
        return seen

    assert ec.run(main, RANKS) == [{dtype} for dtype in dtypes]
    torch.set_default_dtype(torch.float64)
    try:
        assert ec.run(lambda world: torch.ones(1).dtype, 2) == [torch.float64] * 2
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_rank_may_wait_in_backward_while_another_sets_its_dtype() -> None:
    def main(world: ec.World) -> None:
        def meet(gradient: Tensor) -> None:
            world.group.all_reduce(torch.ones(1))

        weight = torch.ones(2, requires_grad=True)
        if world.rank:
            weight.register_hook(meet)
            weight.sum().backward()
        else:
            torch.set_default_dtype(torch.float64)
            world.group.all_reduce(torch.ones(1, dtype=torch.float32))
            torch.set_default_dtype(torch.float32)

    ec.run(main, 2, timeout=20)


def test_a_default_dtype_that_is_none_is_refused_on_its_rank_only() -> None:
    def main(world: ec.World) -> torch.dtype:
        with pytest.raises(TypeError, match="floating"):
            torch.set_default_dtype(torch.int64)
        return torch.ones(1).dtype

    assert ec.run(main, 2) == [torch.float32] * 2


def test_a_rank_that_waits_for_others_inside_one_call_of_torch_gets_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("echelon.comm.threads.default_dtype.PATIENCE_S", 0.2)
    set_dtype = threading.Event()

    def main(world: ec.World) -> None:
        if world.rank:
            set_dtype.wait(5)  # the other is inside of its call
            torch.set_default_dtype(torch.float64)
            return

        def distance(a: Tensor, b: Tensor) -> Tensor:
            set_dtype.set()
            threading.Event().wait(1.0)
            return (a - b).sum()

        one = torch.ones(2, 2)
        nn.functional.triplet_margin_with_distance_loss(one, one, one, distance_function=distance)

    with pytest.raises(ec.errors.StateError, match="rank 1 sets torch's default dtype"):
        ec.run(main, 2)
