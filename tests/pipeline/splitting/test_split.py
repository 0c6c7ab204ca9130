"""Stages that ``split`` made compute what the model does, under its names."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, StageError
from echelon.pipeline.splitting.split import split
from tests.pipeline.models import each
from tests.pipeline.split_models import LENGTH, VOCABULARY, Decoder, Layered, step_like_the_whole
from tests.transformers_models import of_gpt2, of_llama
from tests.worlds import run_world

MASK = torch.ones(7, LENGTH, dtype=torch.long)
MASK[::2, :2] = 0


def seeded(make: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = make().double()
    return model


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, VOCABULARY)
    )


def steps_like(model: nn.Module, **options: dict[str, Any]) -> Callable[[World], float]:
    """A check of the stages of a model, with options of ``step_like_the_whole``."""
    options = {"kwargs": {}, "split": {}, "pipeline": {}, **options}
    return partial(step_like_the_whole, model=model, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ranks"), [("threads", 2), ("threads", 3), ("gloo", 2)])
def test_stages_train_as_the_model_does(world: str, ranks: int) -> None:
    mask, cost = {"mask": MASK.double()}, {"cost": [5, 1, 1, 1, 1]}
    checks = (
        steps_like(seeded(sequential)),
        steps_like(seeded(Layered)),
        steps_like(seeded(Decoder), kwargs=mask),
        steps_like(seeded(Decoder), kwargs=mask, pipeline={"recompute": True}),
        steps_like(seeded(Decoder), split=cost, pipeline={"schedule": "zb-h1"}),
    )
    run_world(world, each, ranks, (checks,))


class _Alone(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x.tanh(),)


class _First(nn.Module):
    """Takes a tuple as one argument, and would take its second entry for an option."""

    def forward(self, values: tuple[Tensor, ...], flip: object = None) -> Tensor:
        return values[0] if flip is None else -values[0]


class _InLayers(nn.Module):
    """The same with layers that take a tuple as positional arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.sum = nn.LSTM(4, 3, batch_first=True), _Sum()

    def pipeline_layers(self) -> list[nn.Module]:
        return [self.lstm, self.sum]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.sum(*self.lstm(x))
        return output


class _Sum(nn.Module):
    def forward(self, output: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        return output[:, -1] + state[1][-1]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_a_layer_of_a_sequential_takes_a_tuple_as_one_argument_wherever_the_cut_is(
    stages: int,
) -> None:
    layers = (nn.LSTM(4, 3, batch_first=True), nn.Identity(), _First(), _Alone(), _First())
    model, x = nn.Sequential(*layers), torch.randn(6, 5, 4)

    def main(world: World) -> Tensor:
        # The state of an LSTM has its rows in dim 1, so a microbatch has all rows of the batch.
        pipe = ec.Pipeline(split(copy.deepcopy(model), world.size), world.group, microbatches=1)
        output: Tensor = pipe(x, outputs_everywhere=True)
        return output

    value: Any = x
    for stage in split(model, stages):
        value = stage(*value) if isinstance(value, tuple) else stage(value)
    assert torch.equal(value, model(x))
    for output in ec.run(main, stages):
        torch.testing.assert_close(output, model(x), rtol=0, atol=0)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_layer_of_pipeline_layers_takes_a_tuple_as_positional_arguments(stages: int) -> None:
    model, x = _InLayers(), torch.randn(6, 5, 4)
    value: Any = x
    for stage in split(model, stages):
        value = stage(*value) if isinstance(value, tuple) else stage(value)
    assert torch.equal(value, model(x))


def test_several_stages_on_a_rank_train_as_the_model_does() -> None:
    options = {"schedule": "zb-v", "chunks": 2, "microbatches": 5}
    run_world("threads", steps_like(seeded(Decoder), pipeline=options), 2)


def transformers_models() -> list[nn.Module]:
    transformers = pytest.importorskip("transformers")
    # Layers of two kinds of attention: each must keep its own mask.
    window = {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1}
    kinds = {"Llama": {}, "Mistral": {}, "Qwen2": window, "Qwen3": {**window, "head_dim": 4}}
    configs = [of_llama(kind, width=8, layers=3, **options) for kind, options in kinds.items()]
    # Built here: transformers changes torch.nn.init while it builds, under the other ranks' feet.
    return [
        seeded(lambda config=config: transformers.AutoModelForCausalLM.from_config(config))
        for config in (*configs, of_gpt2(width=8, layers=3))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_models_of_transformers_train_in_stages(ranks: int) -> None:
    kwargs = {"attention_mask": MASK, "position_ids": (MASK.cumsum(1) - 1).clamp(0)}
    every = transformers_models()
    models = every if ranks == 2 else [every[0], every[-1]]  # Llama and GPT-2
    checks = [
        steps_like(model, kwargs=kwargs, pipeline={"recompute": (index + ranks) % 2 == 0})
        for index, model in enumerate(models)
    ]
    run_world("threads", each, ranks, (checks,))


# --- where it cuts -------------------------------------------------------------------------------


def sizes_of(stages: list[nn.Module]) -> list[int]:
    """Layers of each stage of a Sequential."""
    return [
        len({name.partition(".")[0] for name, _ in stage.named_parameters()}) for stage in stages
    ]


def wide(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def test_each_cost_cuts_by_what_it_counts() -> None:
    model = wide(2, 2, 2, 2, 30, 2)
    assert sizes_of(split(model, 2)) == [4, 1]  # 18 + 90 against 62
    assert sizes_of(split(model, 2, cost=[9, 1, 1, 1, 1])) == [1, 4]
    # An embedding has many parameters and no operations.
    model = nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert sizes_of(split(model, 2)) == [1, 2]
    tokens = torch.zeros(2, 3, dtype=torch.long)
    assert sizes_of(split(model, 2, cost="flops", example=tokens)) == [2, 1]


@pytest.mark.slow
def test_flops_are_counted_without_running_a_model_of_any_kind() -> None:
    for model in (seeded(Decoder), *transformers_models()):
        before = copy.deepcopy(model.state_dict())
        tokens = torch.zeros(2, LENGTH, dtype=torch.long)
        assert len(split(model, 3, cost="flops", example=tokens)) == 3
        assert all(torch.equal(before[name], v) for name, v in model.state_dict().items())
        assert all(param.grad is None for param in model.parameters())


class Slow(nn.Module):
    """Takes long, without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(300):
            x = x + 1e-3
        return x


def timed(world: World) -> list[list[str]]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Sequential(Slow(), nn.Tanh())]
    model = nn.Sequential(*layers)
    before = copy.deepcopy(model.state_dict())
    drawn = torch.get_rng_state()
    stages = split(model, 2, cost="time", example=torch.ones(3, 4), group=world.group)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(before[name], v) for name, v in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    return [sorted(stage.state_dict()) for stage in stages]


def test_time_is_measured_on_one_rank_and_cuts_alike_on_all() -> None:
    names = run_world("threads", timed, 2)
    assert names[0] == names[1]
    assert names[0][1] == []  # the slow layer alone


def failing(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))
    split(model, 2, cost="time", example=torch.ones(3, 4), group=world.group)


def test_a_model_that_cannot_be_measured_is_an_error_on_every_rank() -> None:
    def main(world: World) -> str:
        with pytest.raises((RuntimeError, ArgumentError)) as caught:
            failing(world)
        return type(caught.value).__name__

    assert run_world("threads", main, 2) == ["RuntimeError", "ArgumentError"]


def test_a_schedule_moves_the_cut_and_a_cap_limits_it() -> None:
    schedule = ec.pipeline.schedule("1f1b", 2, 4, 2)
    model = wide(*[8] * 7)
    example = torch.ones(4, 8)
    assert sizes_of(split(model, 2, schedule=schedule)) == [3, 3]
    # A layer has 72 parameters in 4 bytes, 4 times; it keeps its input, 4 rows of 8 numbers.
    # The first stage has two microbatches alive, so three layers need 3 * (1152 + 2 * 128) bytes;
    # the input of the model is kept like any other.
    capped = split(model, 2, schedule=schedule, memory_cap=3 * 1408 + 1, example=example)
    assert sizes_of(capped) == [3, 3]
    with pytest.raises(ArgumentError, match="least cap that works is 4224"):
        split(model, 2, schedule=schedule, memory_cap=4223, example=example)
    shifted = split(model, 2, cost=[2, 1, 1, 1, 1, 9], schedule=schedule)
    assert sizes_of(shifted) == [5, 1]


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_stages": 5}, "4 layers to cut between, fewer than the 5 stages"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"cost": "weight"}, "cost is 'weight'; give 'time', 'parameters', 'flops'"),
        ({"cost": [1, 2]}, "cost has 2 numbers and Sequential 4 layers"),
        ({"cost": [1, 2, 3, -1]}, r"cost\[3\] is -1"),
        ({"cost": 3}, "cost is 3; give its name or a list"),
        ({"cost": "flops"}, "needs example="),
        ({"cost": "time", "example": torch.ones(1)}, "needs group="),
        ({"memory_cap": 100}, "memory_cap needs schedule"),
        ({"prefix": ["0"]}, "prefix is for models with an nn.ModuleList"),
        ({"schedule": ec.pipeline.schedule("1f1b", 3, 4, 3)}, "schedule has 3 stages"),
    ],
)
def test_what_cannot_be_cut_so_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        split(sequential(), **{"num_stages": 2, **options})


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (nn.Linear(2, 2), "Linear is no nn.Sequential .* pipeline_layers"),
        ([nn.Linear(2, 2)], "give a torch.nn.Module"),
    ],
)
def test_a_model_without_known_layers_is_refused(model, sentence) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        split(model, 1)


def test_keyword_arguments_that_a_stage_lacks_are_named() -> None:
    def main(world: World) -> None:
        stages = split(copy.deepcopy(model), 2)
        pipe = ec.Pipeline(stages, world.group, microbatches=1)
        tokens = [torch.zeros(7, LENGTH, dtype=torch.long)] if world.rank == 0 else []
        pipe(*tokens, **({"attention_mask": MASK} if world.rank == 0 else {}))

    model = transformers_models()[0]
    with pytest.raises(StageError, match=r"was given \[\] and the first one \['attention_mask'"):
        run_world("threads", main, 2)
