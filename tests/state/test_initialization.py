"""A module on the meta device gets the values that its name and the seed determine."""

import inspect
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from echelon.errors import ArgumentError
from echelon.state.initialization import Initializer, ParameterPlace, own_tensors

CPU = torch.device("cpu")


def initializer_of(
    model: nn.Module, materialize: Callable[[nn.Module], None] | None = None
) -> Initializer:
    places = {
        id(tensor): ParameterPlace(f"{name}.{local}", name, module, tuple(tensor.shape))
        for name, module in model.named_modules()
        for local, tensor in own_tensors(module)
    }
    return Initializer(places, CPU, materialize)


def weight_of(name: str, seed: int) -> torch.Tensor:
    with torch.device("meta"):
        layer = nn.Linear(3, 2)
    same = layer.weight
    initializer_of(layer).make(name, layer, set(map(id, layer.parameters())), seed)
    assert layer.weight is same
    return layer.weight.detach()


def test_values_depend_on_the_name_and_the_seed_alone() -> None:
    first = weight_of("a", 1)
    torch.manual_seed(99)
    assert torch.equal(weight_of("a", 1), first)
    assert not torch.equal(weight_of("b", 1), first)
    assert not torch.equal(weight_of("a", 2), first)


class Greedy(nn.Linear):
    """Writes also into the layer and the buffer below it, or replaces its own weight."""

    replaces = False

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.replaces:
            self.weight = nn.Parameter(torch.ones(2, 2))
        elif hasattr(self, "below"):
            nn.init.zeros_(self.below.weight)
            self.below.running_mean.fill_(7)


def test_a_module_writes_to_no_tensor_but_those_that_are_selected() -> None:
    model = Greedy(2, 2).to("meta")
    model.below = nn.BatchNorm1d(2)
    before = {name: value.clone() for name, value in model.below.state_dict().items()}
    initializer_of(model).make("", model, {id(model.weight), id(model.bias)}, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.below.state_dict().items())
    assert not model.weight.is_meta


def test_a_module_that_replaces_a_tensor_is_refused() -> None:
    model = Greedy(2, 2).to("meta")
    model.replaces = True
    with pytest.raises(ArgumentError, match=r"put another tensor in the place of 'weight'"):
        initializer_of(model).make("", model, {id(model.weight), id(model.bias)}, 0)


def test_a_module_that_cannot_initialise_is_named() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.empty(1, device="meta"))
    place = ParameterPlace("head.scale", "head", model, (1,))
    with pytest.raises(ArgumentError, match=r"'head' \(Module\) has no reset_parameters"):
        initializer_of(model).check(place)
    Initializer({}, CPU, materialize=lambda module: None).check(place)


def put_memory(tensor: Tensor) -> None:
    tensor.data = torch.zeros(4, *tensor.shape, dtype=tensor.dtype)[1]


# Ways to write, of which some raise no version and some write what was in the memory before.
WAYS: list[Callable[[Tensor], object]] = [
    Tensor.zero_,
    lambda tensor: tensor.data.zero_(),
    lambda tensor: tensor.data.fill_(-1),
    lambda tensor: tensor.detach().view(-1).fill_(1),
    lambda tensor: tensor.flatten()[:1].zero_(),
    lambda tensor: tensor.data.untyped_storage().fill_(0),
    lambda tensor: tensor.copy_(tensor.clone()),
    put_memory,
]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]
SHAPES = [(), (1,), (5,), (2, 3), (0, 3)]


def writes_all_but(unwritten: list[str], way: Callable[[Tensor], object]) -> Any:
    def write(module: nn.Module) -> None:
        for local, buffer in module.named_buffers():
            if local not in unwritten and buffer.numel():
                way(buffer)

    return write


def test_each_tensor_that_is_not_written_is_named_and_no_other() -> None:
    for shift, way in enumerate(WAYS):
        module, unwritten = nn.Module(), []
        for i, (dtype, shape) in enumerate(product(DTYPES, SHAPES)):
            module.register_buffer(f"b{i}", torch.empty(shape, dtype=dtype, device="meta"))
            if (i + shift) % 3 == 0 and 0 not in shape:
                unwritten.append(f"b{i}")
        initializer = initializer_of(module, writes_all_but(unwritten, way))
        names = ", ".join(f"'.{local}'" for local in unwritten)
        with pytest.raises(ArgumentError) as caught:
            initializer.make("", module, set(map(id, module.buffers())), 0)
        assert f"module '' (Module) wrote no values into {names}: " in str(caught.value)


def made_by_torch() -> list[nn.Module]:
    """Each module of torch that initialises itself, on meta."""
    modules = []
    for kind in vars(nn).values():
        is_lazy = inspect.isclass(kind) and issubclass(kind, LazyModuleMixin)
        if hasattr(kind, "reset_parameters") and not is_lazy:
            for args in [(4, 4, 3), (4, 4), (4,), (2, 4)]:
                try:
                    with torch.device("meta"):
                        modules.append(kind(*args))
                    break
                except (TypeError, ValueError, RuntimeError):
                    pass
    return modules


def test_modules_of_torch_write_all_that_they_have() -> None:
    modules = [
        module
        for module in made_by_torch()
        # Recurrent ones have weak references to their parameters, which an error says.
        if next(own_tensors(module), None) and not isinstance(module, nn.RNNBase)
    ]
    assert len(modules) > 20
    for module in modules:
        own = {id(tensor) for _, tensor in own_tensors(module)}
        initializer_of(module).make("", module, own, 0)
