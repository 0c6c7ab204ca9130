"""Parameters that carry out operations themselves are refused at wrapping, or left alone."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._pytree import tree_map

import echelon as ec
import echelon.c10d
from tests.worlds import KINDS, run_world


class Int8(Tensor):
    """A quantised weight, as libraries make them."""

    @staticmethod
    def __new__(cls, q: Tensor, scale: Tensor) -> "Int8":
        return Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype)

    def __init__(self, q: Tensor, scale: Tensor) -> None:
        self.q, self.scale = q, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].q), func(args[0].scale))
        if func is torch.ops.aten.t.default:
            args = tree_map(lambda a: a.q * a.scale if isinstance(a, Int8) else a, args)
            return func(*args)
        raise NotImplementedError(f"Int8: {func}")


class Model(nn.Sequential):
    """A frozen quantised base, and a head that trains."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        base, head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 4)
        scale = base.weight.abs().amax(1, keepdim=True) / 127
        quantised = Int8((base.weight / scale).round().to(torch.int8), scale)
        base.weight = nn.Parameter(quantised, requires_grad=False)
        super().__init__(base, head)


def wraps(world: ec.World) -> None:
    for wrap in (ec.DDP, ec.FSDP):
        for init in ("broadcast", "verify", "trust"):
            with pytest.raises(ec.ArgumentError, match=r"'0.weight' is a Int8.* ignored="):
                wrap(Model(), world.group, init=init)
            plain, model = Model(), Model()
            wrapped = wrap(model, world.group, init=init, ignored=[model[0]])
            for net in (plain, wrapped):
                net(torch.ones(2, 8)).sum().backward()
            norms = [ec.clip_grad_norm_(wrapped, 1e9), nn.utils.get_total_norm(
                [p.grad for p in plain.parameters() if p.grad is not None])]  # fmt: skip
            torch.testing.assert_close(*norms)
            assert isinstance(model[0].weight, Int8)
        with pytest.raises(ec.ArgumentError, match=r"'constant' is a Int8.* no buffer"):
            model = nn.Linear(2, 2)
            model.register_buffer("constant", Model()[0].weight.detach())
            wrap(model, world.group)


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_are_refused_unless_they_are_ignored(kind: str) -> None:
    run_world(kind, wraps, 2)


def places(world: ec.World) -> None:
    dist.init_process_group("echelon")
    mesh = init_device_mesh("cpu", (world.size,))
    alone = world.mesh(other=-1, own=1)["own"]
    for wrap in (ec.DDP, ec.FSDP):
        model = nn.Sequential(nn.Linear(8, 4))
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
        with pytest.raises(ec.ArgumentError, match=r"'0.weight' is a DTensor.* ec.Plan"):
            wrap(model, alone)


def test_dtensors_are_refused_at_wrapping() -> None:
    # Whose process groups are simulated, too.
    run_world("threads", places, 2)
