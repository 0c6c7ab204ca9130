"""What ``make gpu`` does to streams, with streams that only write down what they are told."""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.autograd import DeviceType

from echelon.comm import streams

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
NAMES = (
    "gpu_device",
    "gpu_network",
    "gpu_disturbance",
    "gpu_races",
    "gpu_step",
    "gpu_variants",
    "gpu_many_ranks",
    "llama",
)
CYCLES_PER_MS = 1000.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    modules: dict[str, ModuleType] = {name: import_module(name) for name in NAMES}
    yield SimpleNamespace(**modules)
    for name in NAMES:
        sys.modules.pop(name)


class WrittenCudaEvent(str):
    def query(self) -> bool:
        return True


class WrittenCuda:
    """Stands for ``torch.cuda``: every call is a line of ``log``, on the stream that is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.num_streams = 0
        self.current = self.Stream()
        for name in ("Stream", "stream", "current_stream", "_sleep"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
        for name in ("max_memory_allocated", "max_memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, lambda device: 2**30)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_device_alloc": 3})
        monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1980)

    def Stream(self, device: Any = None) -> Any:
        name, cuda = f"stream {self.num_streams}", self
        self.num_streams += 1

        class Stream:
            def wait_stream(self, other: Any) -> None:
                cuda.log.append(f"{name} waits for {other.name}")

            def wait_event(self, event: str) -> None:
                cuda.log.append(f"{name} waits for the {event}")

            def record_event(self) -> Any:
                cuda.log.append(f"event on {name}")
                return WrittenCudaEvent(f"event on {name}")

        Stream.name = name  # type: ignore[attr-defined]
        return Stream()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def current_stream(self, device: Any = None) -> Any:
        return self.current

    def _sleep(self, cycles: int) -> None:
        self.log.append(f"{self.current.name} sleeps {cycles}")


def test_a_collective_of_absent_ranks_takes_the_time_of_its_bytes_on_a_stream_of_its_own(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = WrittenCuda(monkeypatch)
    monkeypatch.setattr(gpu.gpu_network, "cycles_per_ms", lambda device: CYCLES_PER_MS)
    network = gpu.gpu_network.Network(torch.device("cuda", 0), gb_s=50.0)
    before = lambda: cuda.log.append("before")  # noqa: E731
    engine = gpu.gpu_network.AbsentRanks(0, 4, network, before=before)
    output = torch.zeros(4_000_000, dtype=torch.uint8)
    output[:1_000_000] = torch.arange(1_000_000)
    work = engine._allgather_base(output, output[:1_000_000], None)
    work.wait()
    assert cuda.log == [
        "stream 1 waits for stream 0",
        "before",
        f"stream 1 sleeps {int(3e6 / 50e9 * 1e3 * CYCLES_PER_MS)}",
        "event on stream 1",
        "stream 0 waits for the event on stream 1",
    ]
    parts = output.view(4, -1)
    assert all(torch.equal(part, parts[0]) for part in parts)
    assert network.nbytes == 3_000_000


def test_a_reduction_of_absent_ranks_is_that_of_ranks_with_equal_data(gpu: SimpleNamespace) -> None:
    from torch._C import _distributed_c10d as c10d

    network = gpu.gpu_network.Network(torch.device("cpu"))
    engine = gpu.gpu_network.AbsentRanks(0, 4, network)
    values = torch.arange(8.0)
    for op, factor in ((c10d.ReduceOp.SUM, 4), (c10d.ReduceOp.AVG, 1), (c10d.ReduceOp.MAX, 1)):
        options = c10d.ReduceScatterOptions()
        options.reduceOp = op
        output = torch.empty(2)
        engine._reduce_scatter_base(output, values, options).wait()
        assert torch.equal(output, values[:2] * factor)


class Written(streams.PlainDevice):
    """The CPU as a device with a memory of its own, which counts the waits that it is told."""

    waits: ClassVar[Counter[str]] = Counter()

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.is_host = self.adds_in_order = False

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return True  # as is every tensor of a test on the CPU

    def side_stream(self) -> streams.Stream:
        return WrittenStream(super().side_stream())

    def current_stream(self) -> streams.Stream:
        return WrittenStream(super().current_stream())


class WrittenStream(streams.Stream):
    def __init__(self, stream: streams.Stream) -> None:
        self._stream, self.queued = stream, True

    def as_current(self) -> Any:
        Written.waits["as_current"] += 1
        return self._stream.as_current()

    def wait_for_current(self) -> None:
        Written.waits["wait_for_current"] += 1

    def record_event(self) -> streams.StreamEvent:
        return WrittenEvent()


class WrittenEvent(streams.StreamEvent):
    def wait(self) -> None:
        Written.waits["wait"] += 1

    def synchronize(self) -> None:
        Written.waits["synchronize"] += 1

    def query(self) -> bool:
        return True


def by_method(sites: Counter[str]) -> Counter[str]:
    """How often streams and their events were told something, from how often sites were reached."""
    counts: Counter[str] = Counter()
    for site, count in sites.items():
        if site != "NativeWork: wait":  # of which streams are not told
            counts[site.rpartition(": ")[2]] += count
    return counts


@pytest.mark.slow
def test_without_a_site_its_waits_and_no_others_are_left_out_and_all_needed_sites_are_reached(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(streams.kinds, "cpu", Written)
    races, device = gpu.gpu_races, torch.device("cpu")
    titles = ("bfloat16, optimizer offloaded", "all offloaded, rows", races.DDP)
    reached: set[str] = set()

    def trained(disturbance: Any) -> list[torch.Tensor]:
        gc.collect()  # a model orders its streams when it ends
        Written.waits.clear()
        tensors: list[torch.Tensor] = races.trained(title, disturbance)
        return tensors

    for title in titles:
        whole = gpu.gpu_disturbance.Disturbance(device)
        reference = trained(whole)
        reached |= set(whole.sites)
        assert Written.waits == by_method(whole.sites)
        for site in sorted(set(whole.sites) & set(races.NEEDED) - {"NativeWork: wait"}):
            without = gpu.gpu_disturbance.Disturbance(device, without=site)
            results = trained(without)
            assert races.are_equal(results, reference)
            kept = Counter(without.sites)
            assert kept.pop(site) > 0
            assert Written.waits == by_method(kept), (title, site)
    assert set(races.NEEDED) <= reached


def test_kernels_and_what_the_host_waits_for_are_counted_by_name(gpu: SimpleNamespace) -> None:
    def event(name: str, kind: DeviceType = DeviceType.CPU) -> Any:
        return SimpleNamespace(name=lambda: name, device_type=lambda: kind)

    on_device = [
        "ampere_gemm",
        "vectorized_elementwise_kernel",
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pinned -> Device)",
        "Memcpy DtoH (Device -> Pageable)",
        "Memset (Device)",
    ]
    on_host = [
        "aten::mm",
        "cudaLaunchKernel",
        "cudaLaunchKernelExC",
        "cudaStreamSynchronize",
        "cudaEventSynchronize",
        "cudaEventQuery",
        "cudaDeviceSynchronize",  # with which the profiler ends
    ]
    events = [event(name, DeviceType.CUDA) for name in on_device] + [event(n) for n in on_host]
    counts = gpu.gpu_step.count_events(events)
    assert counts == {"kernels": 2, "launches": 2, "host_waits": 3}


def test_the_operations_of_a_step_are_six_for_each_token_and_weight_and_those_of_attention(
    gpu: SimpleNamespace,
) -> None:
    config = gpu.gpu_step.small(gpu.llama.ONE_BILLION)
    with torch.device("meta"):
        num_params = sum(param.numel() for param in gpu.llama.Llama(config).parameters())
    blocks = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32)
    assert num_params == blocks + 32 + 2 * 128 * 32
    attention = 12 * 2 * 32 * (2 * 16 * 16 / 2)  # a token sees half of the others
    tokens = 2 * 16
    flops = gpu.gpu_step.flops_of(config, num_params)
    assert flops == 6 * tokens * (num_params - 128 * 32) + attention


@pytest.fixture
def played(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> WrittenCuda:
    """The CPU as what the parts take for a device."""
    monkeypatch.setattr(gpu.gpu_device, "_KIND", "cpu")
    for module in (gpu.gpu_network, gpu.gpu_disturbance, gpu.gpu_races):
        monkeypatch.setattr(module, "cycles_per_ms", lambda device: CYCLES_PER_MS)
    return WrittenCuda(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("title", ["rows", "bfloat16, replicated units", "DDP, small buckets"])
def test_delays_and_nan_in_freed_memory_change_nothing_where_nothing_overlaps(
    gpu: SimpleNamespace, played: WrittenCuda, monkeypatch: pytest.MonkeyPatch, title: str
) -> None:
    monkeypatch.setattr(gpu.gpu_races, "SEEDS", 2)
    monkeypatch.setattr(gpu.gpu_races, "TRIES", 2)
    races = gpu.gpu_races.Races(torch.device("cpu"))
    row = races.clean(title)
    assert (row["outcome"], row["num_seeds"]) == ("equal bits", 2)
    assert sum("sleeps" in line for line in played.log) > 20
    site = "NativeWork: wait"
    monkeypatch.setattr(races, "cases_of", lambda site: [title])
    with pytest.raises(AssertionError, match="all bits were right 2 times"):
        races.planted(site)
    monkeypatch.setattr(gpu.gpu_races, "NEEDED", {})
    assert races.planted(site)["outcome"] == "no difference"


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["echelon FSDP, prefetch 1", "FSDP2"])
def test_the_same_bytes_sleep_below_echelon_and_in_fsdp2(
    gpu: SimpleNamespace,
    played: WrittenCuda,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
) -> None:
    many = gpu.gpu_many_ranks
    monkeypatch.setattr(many, "counted", lambda trainee: {})  # torch's profiler would look for CUDA
    config = gpu.gpu_step.small(gpu.llama.ONE_BILLION)
    many.of_many("wide blocks", config, 8, variant, torch.device("cpu"), 2)
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line.removeprefix("RESULT ")) for line in lines if "RESULT" in line]
    assert [row["network"] for row in rows] == ["off", "50 GB/s"]
    # In bfloat16, without what units pad: gathered twice, the root once, and reduced once.
    root = (2 * config.vocabulary + 1) * config.width
    nbytes = 2 * (3 * rows[0]["num_params"] - root) * 7 / 8
    assert all(0 <= row["network_bytes"] - nbytes < 0.01 * nbytes for row in rows)
    assert sum("sleeps" in line for line in played.log) == 3 * rows[1]["collectives"]
    assert rows[0]["clocks"] == {"clocks.sm": "1980 MHz"}
    assert rows[0]["peak_allocated"] == 2**30
