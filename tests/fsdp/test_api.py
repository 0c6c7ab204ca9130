"""What a user of FSDP can do besides the plain loop; over simulated ranks."""

import copy
import sys
import threading
import time
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import echelon as ec
from echelon.comm import streams
from echelon.comm.group import Group
from echelon.comm.lone.group import LoneGroup
from echelon.comm.world import World
from echelon.errors import StateError
from tests.fsdp.checking import same_grads, shard, whole_grads
from tests.fsdp.models import Block, batch, build, loss_of
from tests.fsdp.test_gradient_reducer import accumulates, syncs_by_hand
from tests.worlds import run_world

# --- gradients -----------------------------------------------------------------------------------


def clips(world: World, norm_type: float) -> None:
    model = shard(world, min_num_params=100)
    loss_of(model, *batch(0, world.rank)).backward()
    plain = build()
    for r in range(world.size):
        (loss_of(plain, *batch(0, r)) / world.size).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    norm = ec.clip_grad_norm_(model, 0.01, norm_type)
    assert type(norm) is Tensor
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    for name, param in model.named_parameters():
        if param.grad is not None:
            info = model.shard_info(name)[world.rank]
            part = grads[name].flatten()[info.start : info.start + info.size]
            torch.testing.assert_close(
                ec.local_shard(param.grad).flatten(), part, rtol=1e-9, atol=0
            )


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf")])
def test_the_norm_is_that_of_the_whole_model(norm_type) -> None:
    ec.run(clips, 3, args=(norm_type,))


# --- forward and backward ------------------------------------------------------------------------


class Generating(Block):
    def generate(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = self(x)
        return x


def generates(world: World) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Generating(6, 7))
    model = shard(world, copy.deepcopy(plain)[0], units=ec.units.by_type(nn.Linear))
    x = torch.randn(1, 6)
    with pytest.raises(StateError, match=r"generate\(\) of a sharded model needs whole"):
        model.generate(x, 2)
    with pytest.raises(StateError, match="unit 'up' is sharded, and was called outside"):
        model.module.up(x)
    with model.full_parameters(), torch.no_grad():
        if world.rank == 0:  # nothing is communicated inside
            torch.testing.assert_close(model.generate(x, 2), plain[0].generate(x, 2))
        with pytest.raises(StateError, match="inside a forward, a backward or another"):
            model.full_parameters().__enter__()
    assert not any(unit.gathered for unit in model.units)


def test_methods_other_than_forward_need_whole_parameters() -> None:
    ec.run(generates, 2)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(6, 7)
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        if self.fails == "forward":
            raise KeyError("in forward")
        if self.fails == "backward":
            y.register_hook(self.fail)
        return y

    def fail(self, grad: Tensor) -> Tensor:
        raise KeyError("in backward")


def survives(world: World, where: str) -> None:
    torch.manual_seed(0)
    plain = Failing().double()
    model = shard(world, copy.deepcopy(plain))
    x = torch.randn(2, 6, dtype=torch.float64)
    model.module.fails = where
    with pytest.raises(KeyError):
        model(x).sum().backward()
    model.module.fails = ""
    model(x).sum().backward()
    plain(x).sum().backward()
    assert not any(unit.gathered for unit in model.units)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    same_grads(whole_grads(model, world), expected)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_after_an_exception_is_right(where) -> None:
    ec.run(survives, 2, args=(where,))


def fail_if_it_is_time() -> None:
    """Raise what torch raises for one allocation of a rank."""
    here = threading.get_ident()
    if here in FAILS_AT:
        FAILS_AT[here] -= 1
        if FAILS_AT[here] < 0:
            del FAILS_AT[here]
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate it.\nMore")


FAILS_AT: dict[int, int] = {}  # by thread, how many allocations before the one that fails
ALLOCATE = {"empty", "new_empty", "zeros", "zeros_like", "clone", "_to_copy", "add"}
OF_UNITS = tuple(f"/fsdp/{name}.py" for name in ("gradients", "local_shard", "storage_kinds"))


class SmallDevice(streams.PlainDevice):
    """A device that has no memory for one allocation of a rank."""

    def resize(self, memory: torch.UntypedStorage, nbytes: int) -> None:
        if nbytes:
            fail_if_it_is_time()
        super().resize(memory, nbytes)


class SmallMemory(TorchDispatchMode):
    """The same for the memory of tensors that FSDP makes for a unit."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in ALLOCATE:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and "/torch/" in frame.f_code.co_filename:
                frame = frame.f_back
            if frame is not None and frame.f_code.co_filename.endswith(OF_UNITS):
                fail_if_it_is_time()
        return func(*args, **(kwargs or {}))


def held_by(model: ec.FSDP) -> list[int]:
    stats = model.memory_stats()
    peaks = [stats.peak_gathered, stats.peak_gradients]
    return [stats.shards, stats.gathered, stats.gradients, stats.slots, *peaks]


PRECISIONS = {
    "of the parameters": ec.MixedPrecision(),
    "cast": ec.MixedPrecision(compute=torch.float32, reduce=torch.float64),
    "rounded": ec.MixedPrecision(master=torch.float32, compute=torch.float32, reduce=torch.float64),
}


def runs_out_of_memory(
    world: World, layout: Any, precision: str, adds: bool, number: int
) -> tuple[str, bool]:
    """All ranks have no memory for the same allocation, and go on with the next step."""
    torch.manual_seed(0)
    model = ec.FSDP(
        Failing().double(),
        LoneGroup(0, range(2)),
        units=ec.units.by_type(Block),
        layout=layout,
        precision=PRECISIONS[precision],
        min_num_params=0,
    )
    x, text = torch.randn(2, 6, dtype=torch.float64), ""
    with SmallMemory():
        model(x).sum().backward()
        before = held_by(model)
        if not adds:
            model.zero_grad()
        FAILS_AT[threading.get_ident()] = number
        try:
            model(x).sum().backward()
        except ec.errors.DeviceMemoryError as error:
            text = str(error)
        FAILS_AT.pop(threading.get_ident(), None)
        model.zero_grad()
        model(x).sum().backward()
    return text, before == held_by(model)


@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("adds", [False, True], ids=["first gradients", "added ones"])
def test_a_device_without_memory_for_a_unit_is_named_and_the_next_step_runs(
    layout: str, precision: str, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(streams.kinds, "cpu", SmallDevice)
    texts = []
    for number in range(30):
        args = (layout, precision, adds, number)
        text, is_as_before = ec.run(runs_out_of_memory, 1, args=args)[0]
        assert is_as_before
        if not text:
            break
        texts.append(text)
    assert not text, "there are more allocations in a step than one thinks"
    assert any("the all-gather of unit block needs 0.0 MiB of cpu" in text for text in texts)
    assert any("gradients of unit block needs" in text for text in texts)
    assert all("torch says: CUDA out of memory. Tried to allocate it." in text for text in texts)


def runs_out_of_memory_beside_others(world: World, number: int, seen: list[str]) -> None:
    """Rank 1 has no memory for one allocation of a step; ``seen`` is what ends rank 0."""
    torch.manual_seed(0)
    units = ec.units.by_type(Block)
    model = ec.FSDP(Failing().double(), world.group, units=units, min_num_params=0)
    x = torch.randn(2, 6, dtype=torch.float64)
    with SmallMemory():
        model(x).sum().backward()
        if world.rank == 1:
            FAILS_AT[threading.get_ident()] = number
        try:
            model(x).sum().backward()
            world.group.barrier()
        except ec.errors.RankFailed as error:
            seen.append(str(error))
            raise
        finally:
            FAILS_AT.pop(threading.get_ident(), None)


def test_a_rank_without_memory_for_a_unit_ends_the_others_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(streams.kinds, "cpu", SmallDevice)
    units = []
    for number in range(30):
        seen: list[str] = []
        try:
            args = (number, seen)
            ec.run(runs_out_of_memory_beside_others, 2, rules="nccl", timeout=20, args=args)
            break
        except ec.errors.DeviceMemoryError as error:
            units.append(str(error).partition(" needs")[0])
            notes = "\n".join(error.__notes__)
        assert "raised on rank 1 of 2" in notes
        (ended_by,) = seen
        assert "rank 1" in ended_by
        assert "DeviceMemoryError" in ended_by
    assert number < 29, "there are more allocations in a step than one thinks"
    assert {"the all-gather of unit block", "gradients of unit block"} <= set(units)


class OneQueue(streams.PlainDevice):
    def has_one_queue(self) -> bool:
        return True


def test_a_device_whose_streams_share_a_queue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(streams.kinds, "cpu", OneQueue)
    with pytest.raises(ec.UnsupportedError, match="CUDA_DEVICE_MAX_CONNECTIONS is 1"):
        ec.FSDP(Block(6, 7), LoneGroup(0, range(2)))
    ec.FSDP(Block(6, 7), LoneGroup(0, range(1)))


class NoHost(streams.PlainDevice):
    """A device that could record CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.is_host = False


def graphed(part: str, when: str, options: dict[str, Any], group: Group) -> ec.FSDP:
    """A model of which a part is compiled, before it is wrapped or afterwards."""
    plain = nn.Sequential(Block(6, 7), Block(6, 7))
    if when == "before":
        if part == "":
            plain = cast(nn.Sequential, torch.compile(plain, **options))
        elif part == "0":
            plain[0] = torch.compile(plain[0], **options)
        else:
            plain[1].compile(**options)
    model = ec.FSDP(plain, group, units=ec.units.by_type(Block))
    if when == "after":
        model.compile(**options)
        model.forward(torch.ones(2, 6))
    return model


@pytest.mark.filterwarnings("ignore")  # of the compiler, about its own code
@pytest.mark.parametrize(
    ("part", "when"), [("", "before"), ("0", "before"), ("1", "before"), ("", "after")]
)
def test_a_compiled_module_that_records_cuda_graphs_is_refused_by_name(
    part: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[dict[str, Any]] = [{}, {"mode": "max-autotune-no-cudagraphs"}]
    graphs = [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}]
    if when == "before":
        for options in modes:
            graphed(part, when, options, LoneGroup(0, range(2)))
        graphed(part, when, graphs[0], LoneGroup(0, range(2)))  # on the CPU, which has none
    monkeypatch.setitem(streams.kinds, "cpu", NoHost)
    for options in modes if when == "before" else []:
        graphed(part, when, options, LoneGroup(0, range(2)))
    name = part or "the model"
    for options in graphs:
        with pytest.raises(ec.UnsupportedError, match=f"^{name} is compiled in a mode that rec"):
            graphed(part, when, options, LoneGroup(0, range(2)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(6, 7), Block(6, 4), Block(6, 5)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.second, x, use_reentrant=self.reentrant)
        return checkpoint(lambda y: self.third(y) * 2, x, use_reentrant=self.reentrant)


def recomputes(world: World, reentrant: bool, strategy: ec.Strategy) -> None:
    torch.manual_seed(0)
    plain = Checkpointed(reentrant).double()
    model = shard(world, copy.deepcopy(plain), strategy=strategy)
    x = torch.randn(2, 6, dtype=torch.float64)
    for _ in range(2):
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
    same_grads(whole_grads(model, world), {name: p.grad for name, p in plain.named_parameters()})


@pytest.mark.parametrize("strategy", [ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_of_both_kinds(reentrant, strategy) -> None:
    ec.run(recomputes, 2, args=(reentrant, strategy))


class Nested(nn.Module):
    """Takes and gives nested things, by position and by name; writes into a unit's output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, pair: tuple[Tensor, dict[str, Tensor]], *, scale: float) -> dict[str, Any]:
        out = self.inner(pair, scale=scale)
        out["y"].add_(1)
        return out


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, pair: tuple[Tensor, dict[str, Tensor]], *, scale: float) -> dict[str, Any]:
        a, named = pair
        return {"y": self.layer(a) * scale, "rest": [named["b"], "text", None]}


def nests(world: World) -> None:
    torch.manual_seed(0)
    plain = Nested()
    model = shard(world, copy.deepcopy(plain), units=ec.units.by_type(Inner))
    a, b = torch.randn(2, 6), torch.ones(1)
    found, expected = model((a, {"b": b}), scale=2.0), plain((a, {"b": b}), scale=2.0)
    torch.testing.assert_close(found["y"], expected["y"])
    assert found["rest"] == [b, "text", None]
    found["y"].sum().backward()
    expected["y"].sum().backward()
    expected_grads = {name: p.grad for name, p in plain.named_parameters()}
    same_grads(whole_grads(model, world), expected_grads)


def test_inputs_and_outputs_of_any_nesting() -> None:
    ec.run(nests, 2)


def evaluates(world: World) -> None:
    model = shard(world)
    tokens, _ = batch(0, 0)
    expected = build()(tokens)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected)
    assert not any(unit.gathered for unit in model.units)
    model.eval()
    assert not model.module.blocks[0].training
    output = model(tokens)
    assert output.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), expected)
    loss_of(model, *batch(0, world.rank)).backward()


def test_evaluation_releases_at_once() -> None:
    ec.run(evaluates, 2)


def skips(world: World) -> None:
    """Rank 1 does not use the middle block in the first step, nobody does in the second."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(6, 7) for _ in range(3))

        def forward(self, x: Tensor, used: bool) -> Tensor:
            x = self.blocks[0](x)
            return self.blocks[2](self.blocks[1](x) if used else x)

    torch.manual_seed(0)
    plain = Skipping().double()
    model = shard(world, copy.deepcopy(plain))
    x = torch.randn(2, 6, dtype=torch.float64)
    for used in ([True, False], [False, False], [True, True]):
        model(x, used[world.rank]).sum().backward()
        for one in used:
            (plain(x, one).sum() / 2).backward()
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        same_grads(whole_grads(model, world), expected)
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_units_may_be_skipped_on_some_ranks_where_memory_is_shared(kind) -> None:
    run_world(kind, skips, 2)


# --- where memory is not shared ------------------------------------------------------------------


def every_check(world: World) -> None:
    """One start of ranks for all of them."""
    for way in ("shards", "no_sync"):
        accumulates(world, way)
    for where in ("forward", "backward"):
        survives(world, where)
    for reentrant in (False, True):
        for strategy in (ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP):
            recomputes(world, reentrant, strategy)
    for check in (syncs_by_hand, nests, evaluates, generates):
        check(world)
    for norm_type in (1.0, 2.0, float("inf")):
        clips(world, norm_type)


@pytest.mark.slow
def test_all_of_it_holds_over_gloo() -> None:
    run_world("gloo", every_check, 2)


class Slow(nn.Linear):
    """Keeps rank 1 in its forward while rank 0 goes on."""

    rank = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.rank:
            time.sleep(0.05)
        return super().forward(x)


def changes_weights_after_an_evaluation(world: World) -> list[float]:
    model = nn.Sequential(nn.Linear(2, 2), Slow(2, 2), nn.Linear(2, 2))
    model[1].rank = world.rank
    rule = ec.units.by_type(nn.Linear, Slow)
    wrapped = ec.FSDP(model, world.group, units=rule, min_num_params=0)
    state = wrapped.state_dict()
    found = []
    for factor in (1.0, 0.0):
        wrapped.load_state_dict({name: factor * value for name, value in state.items()})
        world.group.barrier()
        with torch.no_grad():
            found.append(wrapped(torch.ones(1, 2)).sum().item())
    return found


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_weights_change_only_when_all_ranks_have_evaluated_with_them(kind) -> None:
    first, second = run_world(kind, changes_weights_after_an_evaluation, 2)
    assert first == second
    assert first[0] != 0.0
    assert first[1] == 0.0


class Normed(nn.Module):
    """Computes its weight in a hook before forward, as ``weight_norm`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))
        self.weight = self.raw.detach()
        self.register_forward_pre_hook(Normed.compute)

    def compute(self, args: Any) -> None:
        self.weight = self.raw / self.raw.norm(dim=1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def computes_weights_in_hooks(world: World, offload: ec.Offload) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Normed(), nn.Tanh(), Normed())
    model = copy.deepcopy(plain)
    model = shard(world, model, units=ec.units.by_type(Normed), offload=offload)
    inputs = [torch.randn(3, 5, dtype=torch.float64) for _ in range(world.size)]
    model(inputs[world.rank]).square().sum().backward()
    for x in inputs:
        (plain(x).square().sum() / world.size).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    same_grads(whole_grads(model, world), expected)


@pytest.mark.parametrize("offload", [ec.Offload.NONE, ec.Offload.ALL])
def test_hooks_before_forward_see_whole_parameters(offload: ec.Offload) -> None:
    run_world("threads", computes_weights_in_hooks, 3, (offload,))
