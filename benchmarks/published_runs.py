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

from echelon.checks import integer, one_of, positive
from echelon.errors import ArgumentError
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
# The columns that are read.
_COLUMNS = (
    "id", "source", "layers", "hidden", "heads", "kv_heads", "ffn", "mlp", "vocab", "seq", "tied",
    "gpu", "gpus", "gpus_per_host", "inter_gbps_per_host", "tp", "pp", "vpp", "cp", "ep", "dp",
    "shard", "zero", "seq_parallel", "schedule", "mbs", "gbs", "recompute", "attention", "dtype",
    "grad_dtype", "compile", "step_s", "peak_mem_gib", "fits", "notes",
)  # fmt: skip
_UNSAID = ("", "?", "nan")
_GATED, _NOT_GATED = ("swiglu", "geglu"), ("gelu", "relu", "silu")
_SCHEDULES = (*_UNSAID, "none", "1f1b", "interleaved-1f1b", "interleaved")
_DTYPES = ("bf16", "fp16")  # whose rates a device has
_NOT_PRICED = ("fp8",)
_MOST = 1e15
_DEVICES = {"H100-SXM-96": "H100-SXM-96-500W", "H100-PCIe-80": "H100-PCIe", "H800": "H800-SXM"}


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One row.

    Attributes:
        step_s: seconds of a step as published; None where the row has none.
        not_judged: why no prediction can be compared with it; empty if one can.
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
    not_judged: str
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
    return [run for run in read_runs(path) if not run.not_judged]


def read_runs(path: Path = PATH) -> list[PublishedRun]:
    """The rows of a table with the columns of ``data/published_runs.csv`` that describe a run."""
    return described_rows(path)[0]


def described_rows(path: Path) -> tuple[list[PublishedRun], list[tuple[str, str]]]:
    """The rows that describe a run, and of the others the name and what is wrong.

    Raises:
        ArgumentError: the file cannot be read, or lacks a column.
    """
    runs, refused = list[PublishedRun](), list[tuple[str, str]]()
    for line, row in _rows(path):
        try:
            if None in row:
                raise ArgumentError("the row has more cells than there are columns")
            runs.append(_run(row))
        except ArgumentError as error:
            refused.append((row["id"] or f"line {line}", str(error)))
    return runs, refused


def _rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Each row with the number of its last line."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="")
            columns = list(reader.fieldnames or ())
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, ValueError, csv.Error) as error:
        raise ArgumentError(f"{str(path)!r:.200} cannot be read: {error}") from error
    for name in _COLUMNS:
        if columns.count(name) != 1:
            raise ArgumentError(
                f"{str(path)!r:.200} has {columns.count(name)} columns {name!r}: give one of each "
                f"of {', '.join(_COLUMNS)}, with commas between them"
            )
    return rows


def _text(row: Mapping[str, str], name: str) -> str:
    return row[name].strip().lower()


def _flag(row: Mapping[str, str], name: str) -> bool:
    one_of(name, _text(row, name), ("yes", "no", *_UNSAID))
    return _text(row, name) == "yes"


def _number(row: Mapping[str, str], name: str, default: float | None = None) -> float:
    text = _text(row, name)
    if text in _UNSAID:
        if default is None:
            raise ArgumentError(f"{name} is not said")
        return default
    try:
        value = float(text)
    except ValueError:
        raise ArgumentError(f"{name} is {text!r:.40}; give a number") from None
    return positive(name, value, _MOST)


def _count(row: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = _number(row, name, default)
    return integer(name, int(value) if value % 1 == 0 else value, low=1)


def _model(row: Mapping[str, str]) -> Transformer:
    hidden, heads = _count(row, "hidden"), _count(row, "heads")
    one_of("mlp", _text(row, "mlp"), (*_GATED, *_NOT_GATED))
    return Transformer(
        layers=_count(row, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(row, "kv_heads", heads),
        head_dim=max(1, round(hidden / heads)),
        ffn=_count(row, "ffn"),
        gated=_text(row, "mlp") in _GATED,
        vocab=_count(row, "vocab"),
        seq=_count(row, "seq"),
        tied=_flag(row, "tied"),
    )


def _layout(row: Mapping[str, str]) -> Layout:
    dp, shard = _count(row, "dp", 1), _count(row, "shard", 1)
    stage = _zero_stage(_text(row, "zero"))
    if dp % shard:
        raise ArgumentError(f"shard is {shard}, which does not divide dp, {dp}")
    microbatch = _count(row, "mbs", 1)
    gbs = _count(row, "gbs", microbatch * dp)
    if gbs % (microbatch * dp):
        raise ArgumentError(f"gbs is {gbs}, which mbs * dp, {microbatch * dp}, does not divide")
    return Layout(
        tp=_count(row, "tp", 1),
        cp=_count(row, "cp", 1),
        pp=_count(row, "pp", 1),
        chunks=_count(row, "vpp", 1),
        shard=shard,
        dp=dp // shard,
        microbatch=microbatch,
        microbatches=gbs // (microbatch * dp),
        sharded=ShardedStates(stage) if shard > 1 else ShardedStates.NOTHING,
        recompute=_recompute(_text(row, "recompute")),
        sequence_parallel=_flag(row, "seq_parallel"),
    )


def _zero_stage(text: str) -> int:
    if text.startswith("hsdp"):
        return 3
    if text in _UNSAID:
        return 0
    one_of("zero", text[:1], ("0", "1", "2", "3"))
    return int(text[0])


def _recompute(text: str) -> Recompute:
    if text.startswith("selective"):
        return Recompute.ATTENTION
    one_of("recompute", text, ("full", "selective", "none", *_UNSAID))
    return Recompute.BLOCKS if text == "full" else Recompute.NOTHING


def _cluster(row: Mapping[str, str], ranks: int) -> Cluster:
    gpu = row["gpu"].strip()
    device = Device.preset(_DEVICES.get(gpu, gpu))
    per_host = min(_count(row, "gpus_per_host", 8), ranks)
    network = _number(row, "inter_gbps_per_host", 0.0) * 1e9 / 8
    usual = Cluster.parse(f"1x{per_host} {device.name}").network
    return Cluster(
        hosts=max(1, math.ceil(ranks / per_host)),
        devices_per_host=per_host,
        device=device,
        network=network or usual,
    )


def _plan_gap(row: Mapping[str, str]) -> str:
    """What has to be guessed; a source may leave out chunks only without a pipeline."""
    names = ["tp", "pp", "dp", "mbs", "gbs", "recompute"]
    if _text(row, "pp") != "1":
        names.append("vpp")
    unsaid = [name for name in names if _text(row, name) in _UNSAID]
    if unsaid:
        return f"{unsaid[0]} is not said"
    if _text(row, "dtype") in _NOT_PRICED:
        return f"dtype is {_text(row, 'dtype')}, and devices have the rates of 16 bits alone"
    return "recompute is of some blocks" if "fraction" in row["recompute"] else ""


def _check_plan(row: Mapping[str, str], layout: Layout, model: Transformer) -> None:
    """Refuse a plan that is not that of so many devices, or that no layout describes."""
    if layout.num_ranks != _count(row, "gpus"):
        raise ArgumentError(
            f"gpus is {_count(row, 'gpus')}, and tp * cp * pp * dp is {layout.num_ranks}"
        )
    if layout.pp * layout.chunks > model.layers:
        raise ArgumentError(
            f"pp * vpp is {layout.pp * layout.chunks}, more than layers, {model.layers}"
        )
    if layout.dp > 1 and _zero_stage(_text(row, "zero")) and _text(row, "shard") in _UNSAID:
        raise ArgumentError(f"zero is {row['zero']!r:.40}, and shard is not said: over how many?")
    if _count(row, "ep", 1) > 1:
        raise ArgumentError("ep is more than 1, and no column says how many experts there are")
    if layout.pp > 1:
        one_of("schedule", _text(row, "schedule"), _SCHEDULES)
    one_of("dtype", _text(row, "dtype"), _DTYPES)


def _blocks(row: Mapping[str, str], layout: Layout) -> tuple[int, ...] | None:
    layers, notes = _count(row, "layers"), row["notes"]
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
    layout, model, gap = _layout(row), _model(row), _plan_gap(row)
    if not gap:
        _check_plan(row, layout, model)
    attention = _text(row, "attention")
    fused = attention.startswith("flash")
    if not fused and not attention.startswith("unfused"):
        raise ArgumentError(f"attention is {attention!r:.40}; give flash or unfused")
    gradients = row["grad_dtype"]
    in_full = (
        "fp32" in gradients and "bf16 reduce" not in gradients and "and reduce" not in gradients
    )
    cluster = _cluster(row, max(layout.num_ranks, _count(row, "gpus")))
    step_s = _number(row, "step_s", 0.0) or None
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
        compiled=_flag(row, "compile"),
        gradient_bytes=4 if in_full else 2,
        overlaps_reduction=fused,
        step_s=step_s,
        not_judged=gap or ("" if step_s else "step_s is not said"),
        peak_bytes=_number(row, "peak_mem_gib", 0.0) * 2**30 or None,
        fits=row["fits"] != "OOM",
        blocks=_blocks(row, layout),
        plan_group=(
            row["source"],
            model,
            cluster,
            row["gpus"],
            row["gbs"],
            row["dtype"],
            attention,
            row["compile"],
            gradients,
        ),
    )
