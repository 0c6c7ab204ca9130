"""Published training runs: rows of a table as models, layouts, clusters and software stacks.

``data/published_runs.csv`` has 1,017 runs that others have published, each with its source.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.planner.cluster import Cluster
from echelon.planner.device import Device
from echelon.planner.layout import Layout, Recompute, ShardedStates
from echelon.planner.software_stack import Attention, Rates, SoftwareStack
from echelon.planner.step_time import step_time
from echelon.planner.transformer import Transformer

PATH = Path(__file__).parent / "data" / "published_runs.csv"

# The software of each source: rows of the same software share constants.
STACKS = {
    "vtrain-single": "vtrain-single-host",
    "vtrain-multi": "vtrain",
    "bloom": "bloom",
    "jeanzay-v100": "bloom",
    "megatron-sc21": "megatron",
    "korthikanti": "megatron",
    "megatron-h100": "megatron",
    "mt-nlg": "megatron",
    "llmfoundry": "llm-foundry",
    "fms-fsdp": "fsdp",
    "torchtitan": "fsdp",
    "internevo": "internevo",
}
_DEVICES = {"H100-SXM-96": "H100-SXM-96-500W", "H100-PCIe-80": "H100-PCIe", "H800": "H800-SXM"}


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One row.

    Attributes:
        step_s: seconds of a step as published; None where the row has none.
        plan_known: whether the row says all axes of its plan and what it recomputes.
        peak_bytes: of one device as published; None where the row has none.
        fits: whether it ran.
        blocks: of each stage, where the source says how it cut; None: evenly.
        plan_group: equal for runs that differ in their plan alone.
    """

    key: str
    source: str
    model: Transformer
    layout: Layout
    cluster: Cluster
    stack_name: str
    attention: Attention
    compiled: bool
    gradient_bytes: int
    overlaps_reduction: bool
    step_s: float | None
    plan_known: bool
    peak_bytes: float | None
    fits: bool
    blocks: tuple[int, ...] | None
    plan_group: tuple[object, ...]

    def error(self, rates: Rates) -> float:
        """The step as the planner predicts it with these constants over the published one, less 1.

        Only of a row that has a time.
        """
        assert self.step_s is not None, "nothing to compare with"
        return self.predicted_s(rates) / self.step_s - 1

    def predicted_s(self, rates: Rates) -> float:
        """Seconds of a step, as the planner predicts them with these constants."""
        stack = SoftwareStack(
            name=self.stack_name,
            rates=rates,
            attention=self.attention,
            compiled=self.compiled,
            gradient_bytes=self.gradient_bytes,
            overlaps_reduction=self.overlaps_reduction,
        )
        return step_time(self.model, self.layout, self.cluster, stack, self.blocks).total


def error_line(name: str, errors: Sequence[float]) -> str:
    """The figures of the errors of some rows as text."""
    sizes = [abs(error) for error in errors]
    within = sum(size <= 0.15 for size in sizes) / len(sizes)
    return (
        f"{name:<28} {len(sizes):>5} rows  mean error {statistics.fmean(sizes):6.1%}  median "
        f"{statistics.median(sizes):6.1%}  bias {statistics.fmean(errors):+6.1%}  "
        f"within 15 % {within:4.0%}"
    )


def timed_runs(path: Path = PATH) -> list[PublishedRun]:
    """The rows that a prediction can be compared with: they have a time, and a plan."""
    return [run for run in read_runs(path) if run.step_s is not None and run.plan_known]


def read_runs(path: Path = PATH) -> list[PublishedRun]:
    """The rows of a table with the columns of ``data/published_runs.csv``."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_run(row) for row in csv.DictReader(file)]


def _number(row: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(row.get(name, ""))
    except ValueError:
        return default
    return default if math.isnan(value) else value


def _model(row: Mapping[str, str]) -> Transformer:
    hidden, heads = int(row["hidden"]), int(_number(row, "heads", 1))
    return Transformer(
        layers=int(row["layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(_number(row, "kv_heads", heads)),
        head_dim=max(1, round(hidden / heads)),
        ffn=int(row["ffn"]),
        gated=row["mlp"] in ("swiglu", "geglu"),
        vocab=int(row["vocab"]),
        seq=int(row["seq"]),
        tied=row["tied"] == "yes",
    )


def _layout(row: Mapping[str, str]) -> Layout:
    zero = row["zero"]
    dp = int(_number(row, "dp", 1))
    shard = int(_number(row, "shard", 1))
    stage = (
        3 if zero.startswith(("3", "hsdp")) else int(zero[0]) if zero[:1] in "123" and zero else 0
    )
    if dp % shard:
        shard = 1
    microbatch = max(1, round(_number(row, "mbs", 1)))
    microbatches = max(1, round(_number(row, "gbs", microbatch * dp) / (microbatch * dp)))
    recompute = row["recompute"]
    return Layout(
        tp=int(_number(row, "tp", 1)),
        cp=int(_number(row, "cp", 1)),
        pp=int(_number(row, "pp", 1)),
        chunks=int(_number(row, "vpp", 1)),
        shard=shard,
        dp=dp // shard,
        microbatch=microbatch,
        microbatches=microbatches,
        sharded=ShardedStates(stage) if shard > 1 else ShardedStates.NOTHING,
        recompute=(
            Recompute.BLOCKS
            if recompute == "full"
            else Recompute.ATTENTION
            if recompute.startswith("selective")
            else Recompute.NOTHING
        ),
        sequence_parallel=row["seq_parallel"] == "yes",
    )


def _cluster(row: Mapping[str, str], ranks: int) -> Cluster:
    gpu = row["gpu"]
    device = Device.preset(_DEVICES.get(gpu, gpu))
    per_host = int(_number(row, "gpus_per_host", 8))
    per_host = min(per_host, ranks)
    network = _number(row, "inter_gbps_per_host", 0.0) * 1e9 / 8
    usual = Cluster.parse(f"1x{per_host} {device.name}").network
    return Cluster(
        hosts=max(1, math.ceil(ranks / per_host)),
        devices_per_host=per_host,
        device=device,
        network=network or usual,
    )


def _plan_known(row: Mapping[str, str]) -> bool:
    """Whether nothing has to be guessed; a source may leave out chunks only without a pipeline."""
    said = all(row[name] not in ("", "?") for name in ("tp", "pp", "dp", "mbs", "gbs", "recompute"))
    fraction = "fraction" in row["recompute"]  # of the blocks, which is not said
    return said and not fraction and (row["pp"] == "1" or row["vpp"] not in ("", "?"))


def _blocks(row: Mapping[str, str], layout: Layout) -> tuple[int, ...] | None:
    layers, notes = int(row["layers"]), row["notes"]
    if "ceil(L/pp)" in notes:
        most = math.ceil(layers / layout.pp)
        starts = (min(layers, stage * most) for stage in range(layout.pp))
        return tuple(min(most, layers - start) for start in starts)
    if "embeddings count" in notes and layout.pp > 1:
        counts = [
            (layers + 2) // layout.pp + (stage < (layers + 2) % layout.pp)
            for stage in range(layout.pp)
        ]
        counts[0] -= 1
        counts[-1] -= 1
        return tuple(counts)
    return None


def _run(row: Mapping[str, str]) -> PublishedRun:
    layout = _layout(row)
    model = _model(row)
    attention = row["attention"]
    fused = not attention.startswith("unfused")
    gradients = row["grad_dtype"]
    in_full = (
        "fp32" in gradients and "bf16 reduce" not in gradients and "and reduce" not in gradients
    )
    cluster = _cluster(row, max(layout.num_ranks, int(row["gpus"])))
    return PublishedRun(
        key=row["id"],
        source=row["source"],
        model=model,
        layout=layout,
        cluster=cluster,
        stack_name=STACKS.get(row["source"]) or ("fsdp" if fused else "megatron"),
        attention=(
            Attention.FUSED
            if fused
            else Attention.SOFTMAX
            if "softmax" in attention
            else Attention.UNFUSED
        ),
        compiled=row["compile"] == "yes",
        gradient_bytes=4 if in_full else 2,
        overlaps_reduction=fused,
        step_s=_number(row, "step_s", 0.0) or None,
        plan_known=_plan_known(row),
        peak_bytes=_number(row, "peak_mem_gib", 0.0) * 2**30 or None,
        fits=row["fits"] != "OOM",
        blocks=_blocks(row, layout),
        plan_group=(row["source"], model, cluster, row["gpus"], row["gbs"], row["dtype"]),
    )
