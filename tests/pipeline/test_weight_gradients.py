"""Gradients of large weights are added where they lie, unless somebody wants to see them."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import echelon as ec
from echelon.comm.world import World
from echelon.pipeline.stage import Stage
from tests.pipeline.models import mse

WORDS, WIDTH = 300, 256  # both weights are large enough to be cared for
MICROBATCHES = 4


def layers() -> list[nn.Module]:
    torch.manual_seed(5)
    stages = [
        nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)),
    ]
    return [stage.double() for stage in stages]


def tokens_and_targets() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(8, (10, 3), generator=generator)  # each many times
    return tokens, torch.randn(10, 3, 2, generator=generator, dtype=torch.float64)


def plain_gradients() -> list[Tensor]:
    model = nn.Sequential(*layers())
    tokens, targets = tokens_and_targets()
    for _ in range(2):
        mse(model(tokens), targets).backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def piped_gradients(world: World, schedule: str, watch: Callable[[nn.Module], Any]) -> list[Tensor]:
    stages = layers()
    for stage in stages:
        watch(stage)
    pipe = ec.Pipeline(
        stages, world.group, microbatches=MICROBATCHES, schedule=schedule, loss_fn=mse
    )
    tokens, targets = tokens_and_targets()
    for _ in range(2):
        pipe.step(tokens, target=targets)
    return [param.grad for param in pipe.parameters() if param.grad is not None]


def nobody(stage: nn.Module) -> None:
    """Leaves the parameters alone."""


def tensor_hooks(stage: nn.Module) -> None:
    for param in stage.parameters():
        param.register_hook(lambda grad: 2 * grad)


def arrival_hooks(stage: nn.Module) -> None:
    def add_one(param: Tensor) -> None:
        assert param.grad is not None
        param.grad += 1

    for param in stage.parameters():
        param.register_post_accumulate_grad_hook(add_one)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    ("watch", "factor", "shift"),
    [(nobody, 1, 0), (tensor_hooks, 2, 0), (arrival_hooks, 1, 2)],
)
def test_gradients_are_those_of_the_plain_model_and_hooks_see_all_of_them(
    schedule: str, watch: Callable[[nn.Module], Any], factor: int, shift: int
) -> None:
    found = [g for own in ec.run(piped_gradients, 2, args=(schedule, watch)) for g in own]
    for mine, plain in zip(found, plain_gradients(), strict=True):
        torch.testing.assert_close(mine, factor * plain + shift, rtol=1e-12, atol=1e-12)


def stepping_in_hooks(model: nn.Module) -> None:
    """Have an optimizer for each bias step when its gradient is there, and drop the gradient."""
    for name, param in model.named_parameters():
        param.requires_grad_("bias" in name)
        if param.requires_grad and param.numel():
            own = torch.optim.Adam([param], 0.1)

            def step(param: Tensor, own: torch.optim.Optimizer = own) -> None:
                own.step()
                own.zero_grad()

            param.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_an_optimizer_in_a_hook_steps_once_for_all_microbatches(schedule: str) -> None:
    tokens, targets = tokens_and_targets()

    def trained(world: World) -> dict[str, Tensor]:
        pipe = ec.Pipeline(
            layers(), world.group, microbatches=MICROBATCHES, schedule=schedule, loss_fn=mse
        )
        stepping_in_hooks(pipe)
        for finalize in (True, False, True):
            pipe.step(tokens, target=targets, finalize=finalize)
        return pipe.whole_state_dict()

    plain = nn.Sequential(*layers())
    stepping_in_hooks(plain)
    mse(plain(tokens), targets).backward()
    (2 * mse(plain(tokens), targets)).backward()
    for state in ec.run(trained, 2):
        for value, right in zip(state.values(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(value, right, rtol=1e-12, atol=1e-12)


class Results(TorchDispatchMode):
    """Counts operations that make a new tensor of a weight's shape."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes, self.names = shapes, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape in self.shapes:
            self.names.append(func.__name__.split(".")[0])
        return result


def backward_of(module: nn.Module, x: Tensor, num_hooks: int = 0) -> list[str]:
    """What the backward of a second microbatch makes in the shape of a weight."""
    stage = Stage(module, 0)
    shapes = {param.shape for param in module.parameters() if param.dim() > 1}
    for i in range(2):
        output = stage.forward(i, x, {})
        names = Results(shapes)
        with names:
            stage.backward(i, [torch.ones_like(one) for one in output.tensors])
    return [name for name in names.names if name not in ("t", "detach", "alias")]


def test_a_later_gradient_of_a_large_linear_layer_is_added_by_the_multiplication() -> None:
    assert backward_of(nn.Linear(WIDTH, WIDTH + 1), torch.randn(3, WIDTH)) == ["addmm_"]


def test_a_later_gradient_of_a_large_embedding_touches_its_rows_only() -> None:
    assert backward_of(nn.Embedding(WORDS, WIDTH), torch.tensor([1, 1, 7])) == ["index_add_"]


def test_small_layers_are_left_to_autograd() -> None:
    assert backward_of(nn.Linear(4, 5), torch.randn(3, 4)) == ["mm", "add_"]


@pytest.mark.parametrize("unusual", [{"padding_idx": 0}, {"scale_grad_by_freq": True}])
def test_embeddings_with_options_are_left_to_autograd(unusual: dict[str, Any]) -> None:
    made = backward_of(nn.Embedding(WORDS, WIDTH, **unusual), torch.tensor([1, 1, 7]))
    assert "index_add_" not in made
    assert "embedding_dense_backward" in made


def test_a_gradient_that_the_model_takes_in_its_forward_is_not_added() -> None:
    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(x).sum(), x, create_graph=True)
            return slope.square().sum()

    torch.manual_seed(0)
    module, x = Penalty(), torch.randn(3, WIDTH)
    plain = torch.autograd.grad(module(x), module.inner.weight)[0]
    module.inner.weight.grad = torch.zeros_like(plain)
    stage = Stage(module, 0)
    stage.forward(0, x, {})
    assert not module.inner.weight.grad.any()
    stage.backward(0, [torch.ones(())])
    torch.testing.assert_close(module.inner.weight.grad, plain)


class Forces(nn.Module):
    """Gives gradients that it takes in its forward, of its input or of its weight."""

    def __init__(self, width: int, wrt: str) -> None:
        super().__init__()
        self.inner, self.wrt = nn.Linear(width, width), wrt

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = torch.tanh(self.inner(x))
        of = {"input": x, "weight": self.inner.weight}[self.wrt]
        create_graph = self.wrt == "input"
        (slope,) = torch.autograd.grad(
            y.square().sum(), of, create_graph=create_graph, retain_graph=True
        )
        return y + 0.1 * (slope if self.wrt == "input" else x @ slope)


def step_of_forces(
    world: World, width: int, wrt: str, schedule: str, checkpoints: bool
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Forces(width, wrt) for _ in range(4))).double()
    num_stages = 4 if schedule == "zb-v" else 2
    stages: list[nn.Module] = list(ec.pipeline.split(model, num_stages))
    if checkpoints:  # the user's own, inside of the stages
        stages = [Checkpointed(stage) for stage in stages]
    pipe = ec.Pipeline(
        stages,
        world.group,
        microbatches=MICROBATCHES,
        schedule=schedule,
        loss_fn=mse,
        recompute=not checkpoints,
    )
    for step in range(2):  # gradients of the second are added to those of the first
        pipe.step(forces_batch(width, step), target=torch.zeros(8, width, dtype=torch.float64))
    named = pipe.named_parameters()
    return {name: param.grad for name, param in named if param.grad is not None}


class Checkpointed(nn.Module):
    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.stage, x, use_reentrant=False)


def forces_batch(width: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, width, generator=generator, dtype=torch.float64) / width**0.5


# Small weights are added by autograd alone, unless the schedule has halves of backwards.
@pytest.mark.slow
@pytest.mark.parametrize("wrt", ["input", "weight"])
@pytest.mark.parametrize(
    ("schedule", "width", "checkpoints"),
    [
        ("1f1b", WIDTH, False),
        ("zb-h1", 4, False),
        ("zb-h1", 4, True),
        ("zb-h1", WIDTH, False),
        ("zb-v", 4, False),
        ("zb-v", 4, True),
    ],
)
def test_gradients_in_a_forward_that_is_computed_again_are_those_of_one_process(
    schedule: str, width: int, checkpoints: bool, wrt: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Forces(width, wrt) for _ in range(4))).double()
    for step in range(2):
        for x in forces_batch(width, step).chunk(MICROBATCHES):
            (mse(model(x), torch.zeros_like(x)) / MICROBATCHES).backward()
    of_ranks = ec.run(step_of_forces, 2, args=(width, wrt, schedule, checkpoints))
    grads = {name: grad for rank in of_ranks for name, grad in rank.items()}
    assert len(grads) == 8
    for name, grad in grads.items():
        layer, kind = name.split(".")[-3], name.split(".")[-1]
        of = model.get_parameter(f"{layer}.inner.{kind}").grad
        torch.testing.assert_close(grad, of, rtol=1e-11, atol=1e-13)


def test_a_copy_of_a_stage_uses_its_own_weight() -> None:
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Embedding(WORDS, WIDTH))
    Stage(stage, 0)
    averaged = copy.deepcopy(stage)
    loaded = pickle.loads(pickle.dumps(stage))
    for layer in averaged:
        with torch.no_grad():
            layer.weight.zero_()
    for one, is_zero in ((stage, False), (averaged, True), (loaded, False)):
        linear, embedding = one
        x = torch.ones(1, WIDTH)
        assert torch.equal(linear(x), x @ linear.weight.T + linear.bias)
        assert embedding(torch.tensor([3])).any() != is_zero


def test_a_layer_that_the_user_has_patched_keeps_its_forward() -> None:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 2  # type: ignore[method-assign]
    x = torch.randn(3, 4)
    Stage(layer, 0, splits=True)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight) * 2)


@pytest.mark.parametrize("splits", [False, True])
def test_gradients_of_complex_weights_are_those_of_the_plain_layer(splits: bool) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)
    x = torch.randn(3, WIDTH, dtype=torch.complex64, requires_grad=True)
    want = torch.autograd.grad(layer(x).abs().sum(), (layer.weight, x))
    stage = Stage(layer, 0, splits=splits)
    output = stage.forward(0, x, {})
    slope = output.tensors[0].sgn()
    if splits:
        (grad_x,) = stage.backward_input(0, [slope])
        stage.backward_weight(0)
    else:
        (grad_x,) = stage.backward(0, [slope])
    torch.testing.assert_close((layer.weight.grad, grad_x), want)


def test_layers_take_their_input_by_name() -> None:
    linear, embedding = nn.Linear(WIDTH, WIDTH), nn.Embedding(WORDS, WIDTH)
    Stage(nn.ModuleList([linear, embedding]), 0)
    assert linear(input=torch.ones(2, WIDTH)).shape == (2, WIDTH)
    assert embedding(input=torch.tensor([1])).shape == (1, WIDTH)
