"""The page of a run on a GPU, in Markdown, from its JSON. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["ALONE", "page_of"]

ALONE = "one process alone"
PEAK_TFLOPS = 989.0  # of an H100 or H200 (SXM) in bfloat16, dense, as NVIDIA states it
# What a variant does not do with one rank, in the words of the page.
WITH_ONE_RANK = {
    "FSDP2": "does not communicate with one rank",
    "FSDP2, float32 parts": "does not communicate with one rank",
    "FSDP1": "shards nothing with one rank",
}
ABSENT = "–"
Row = Mapping[str, Any]


def page_of(report: Row) -> str:
    """The whole page."""
    blocks = [
        _head(report),
        _failures(report),
        _parts(report),
        _speeds(report),
        _lines(report),
        _races(report),
        _world_of_one(report),
        _ranks(report),
        _copies(report),
        _files(report),
        _left_out(report),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _rows(report: Row, kind: str) -> Iterator[dict[str, Any]]:
    """All results of a kind, in their order."""
    for part in report["parts"]:
        yield from (row for row in part["results"] if row.get("kind") == kind)


def _table(title: str, text: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A section with a table; its first column is text, the others are numbers."""
    if not rows:
        return ""
    lines = [f"## {title}", "", *([text, ""] if text else [])]
    lines += [f"| {' | '.join(columns)} |", "|---|" + "--:|" * (len(columns) - 1)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def _head(report: Row) -> str:
    where = "a GPU" if report["device"] == "cuda" else "the CPU, to try the parts: no GPU was used"
    lines = [f"# echelon on {where}", "", f"Commit {report['commit']}, {report['time']}.", ""]
    machine = report["machine"]
    if machine is None:
        lines += ["No interpreter has what is needed:", ""]
        for row in report["interpreters"]:
            facts = row["results"][0] if row["results"] else {}
            reason = _last_line(row["output"]) or f"torch {facts.get('torch')}, no device"
            lines.append(f"- `{row['part']}`: {reason}")
        return "\n".join(lines)
    missing = [name for name, version in machine["packages"].items() if version is None]
    device = next(_rows(report, "machine"), {})
    nbytes = device.get("device_bytes")
    lines += [
        "| | |",
        "|---|---|",
        f"| device | {device.get('name', ABSENT)} |",
        f"| memory of the device | {_gib(nbytes)} GiB |",
        f"| torch, CUDA, NCCL | {machine['torch']}, {machine['cuda']}, {device.get('nccl')} |",
        f"| Python | {machine['python']}, `{machine['executable']}` |",
        f"| cores, machine | {machine['cores']}, {machine['machine']} |",
        f"| packages that are not installed | {', '.join(missing) or 'none'} |",
    ]
    for when, row in [("at the start", device), *((r["when"], r) for r in _rows(report, "clocks"))]:
        if row.get("clocks"):
            values = ", ".join(f"{name} {value}" for name, value in row["clocks"].items())
            lines.append(f"| clocks {when} | {values} |")
    return "\n".join(lines)


def _failures(report: Row) -> str:
    lines = [f"- {name}: no time was left" for name in report["no_time_left"]]
    for part in report["parts"]:
        errors = [row for row in part["results"] if row.get("error")]
        lines += [
            f"- {part['part']}, {row.get('line')}: {_last_line(row['error'])}" for row in errors
        ]
        if not part["ok"] and not errors:
            lines.append(f"- {part['part']}: {part['ending']}: {_last_line(part['output'])}")
    return "\n".join(["## What failed", "", *lines]) if lines else ""


def _parts(report: Row) -> str:
    rows = []
    for part in report["parts"]:
        lines = [row for row in part["results"] if "line" in row]
        failed = sum(bool(row["error"]) for row in lines)
        missing = sum(bool(row["left_out"]) for row in lines)
        passed = len(lines) - failed - missing
        counts = [str(count) if lines else ABSENT for count in (passed, failed, missing)]
        rows.append([part["part"], *counts, str(part["seconds"]), part["ending"]])
    columns = ("part", "passed", "failed", "left out", "s", "ended with")
    return _table("Parts", "", columns, rows)


def _speeds(report: Row) -> str:
    rows = [[row["what"], f"{row['value']:,}"] for row in _rows(report, "speed")]
    return _table("The machine", "", ("what", "measured"), rows)


def _lines(report: Row) -> str:
    """The features one by one; tests are only counted."""
    rows = []
    for part in report["parts"]:
        if part["part"] in ("smoke", "features"):
            for row in part["results"]:
                state = "failed" if row["error"] else "left out" if row["left_out"] else "works"
                seconds = ABSENT if row["seconds"] is None else f"{row['seconds']:.2f}"
                rows.append([row["line"], state, seconds])
    return _table("Features", "", ("feature", "", "s"), rows)


def _races(report: Row) -> str:
    clean, faults = [], []
    for row in _rows(report, "race"):
        seeds = ABSENT if row["num_seeds"] is None else str(row["num_seeds"])
        (clean if row["fault"] is None else faults).append(
            [row["fault"] or row["case"], seeds, row["outcome"]]
        )
    text = (
        "Rank 0 of 4: every operation on a stream comes after a random delay, and freed memory is "
        "filled with NaN. Losses and weights must have the bits of a run without delays."
    )
    planted = sum(row[-1] == "found" for row in faults)
    return "\n\n".join(
        filter(
            None,
            [
                _table("Random delays", text, ("case", "seeds", ""), clean),
                _table(
                    "Planted faults",
                    f"Each wait is removed once: {planted} of {len(faults)} were found.",
                    ("without", "seeds", ""),
                    faults,
                ),
            ],
        )
    )


def _world_of_one(report: Row) -> str:
    rows = [row for row in _rows(report, "step") if row["ranks"] == 1]
    if not rows:
        return ""
    alone = next((row for row in rows if row["variant"] == ALONE), None)
    text = (
        f"{_model(rows[0])}, one rank, {len(rows[0]['step_ms'])} timed steps under deterministic "
        f"algorithms. {_legend()}"
    )
    columns = ("", *_COLUMNS, "losses as alone")
    table = []
    for row in rows:
        name = row["variant"]
        name += f" ({WITH_ONE_RANK[name]})" if name in WITH_ONE_RANK else ""
        table.append([name, *_figures(row, alone, _matmul(report)), _equal(row, alone)])
    return _table("A world of one", text, columns, table)


def _ranks(report: Row) -> str:
    rows = [row for row in _rows(report, "step") if row["ranks"] > 1]
    blocks = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        alone = next((r for r in _rows(report, "alone") if r["model"] == model), None)
        table = []
        for row in mine:
            still = next((r for r in mine if _is_peer(r, row) and r["network"] == "off"), None)
            exposed = ABSENT
            if still is not None and row["network"] != "off":
                exposed = f"{_median(row['step_ms']) - _median(still['step_ms']):.2f}"
            label = f"{row['ranks']:,} ranks, {row['variant']}, network {row['network']}"
            traffic = [f"{row['collectives']:.0f}", f"{row['network_bytes'] / 1e9:.2f}"]
            figures = _figures(row, alone, _matmul(report))
            table.append([label, exposed, *traffic, *figures])
        text = (
            f"{_model(mine[0])}. The other ranks are not there: their data is that of rank 0, and "
            "takes the bytes over the bandwidth to come. `exposed` is the time of a step beyond "
            f"that with the network off. {_legend()}"
        )
        columns = ("", "exposed ms", "collectives", "GB received", *_COLUMNS)
        blocks.append(_table(f"Rank 0 of many: {model}", text, columns, table))
    return "\n\n".join(blocks)


def _is_peer(row: Row, other: Row) -> bool:
    """Whether two rows differ in the network only."""
    return (row["ranks"], row["variant"]) == (other["ranks"], other["variant"])


_COLUMNS = (
    "ms (min–max)",
    "MFU %",
    "of matmul %",
    "issue ms",
    "Python µs a unit fwd/bwd",
    "kernels",
    "host waits",
    "peak GiB",
    "reserved GiB",
    "cudaMalloc",
    "retries",
    "SM clock",
)


def _legend() -> str:
    return (
        f"MFU is of {PEAK_TFLOPS:.0f} TFLOP/s, `of matmul` of the rate above. `issue` is the time "
        "until forward and backward were issued; a unit's Python is what it adds to that of one "
        "process alone. Kernels and host waits are of one step under the profiler. `cudaMalloc` "
        "and retries are those of the timed steps."
    )


def _model(row: Row) -> str:
    return (
        f"A model built as Llama is, {row['num_params'] / 1e6:,.1f} M parameters, "
        f"{row['num_units']} units, {row['tokens']:,} tokens a step, AdamW(foreach)"
    )


def _figures(row: Row, alone: Row | None, matmul: float | None) -> list[str]:
    """The cells of a row that all tables have."""
    median = _median(row["step_ms"])
    rate = row["flops"] / median / 1e9  # TFLOP/s
    issue = [a + b for a, b in zip(row["forward_ms"], row["backward_ms"], strict=True)]
    is_cpu, unit = row["clocks"] is None, ABSENT  # the CPU computes where a device would be asked
    if alone is not None and row["variant"] != ALONE and not is_cpu:
        unit = " / ".join(
            f"{1e3 * (_median(row[name]) - _median(alone[name])) / row['num_units']:.0f}"
            for name in ("forward_ms", "backward_ms")
        )
    return [
        f"{median:.2f} ({min(row['step_ms']):.2f}–{max(row['step_ms']):.2f})",
        ABSENT if is_cpu else f"{100 * rate / PEAK_TFLOPS:.1f}",
        ABSENT if matmul is None or is_cpu else f"{100 * rate / matmul:.1f}",
        f"{_median(issue):.2f}",
        unit,
        _count(row["kernels"]),
        _count(row["host_waits"]),
        _gib(row["peak_allocated"]),
        _gib(row["peak_reserved"]),
        _count(row["device_allocs"]),
        _count(row["alloc_retries"]),
        (row["clocks"] or {}).get("clocks.sm", ABSENT),
    ]


def _equal(row: Row, alone: Row | None) -> str:
    """Whether the losses have the bits of those of one process, else how far they are away."""
    if alone is None or row["variant"] == ALONE:
        return ABSENT
    pairs = list(zip(row["losses"], alone["losses"], strict=True))
    if all(loss == other for loss, other in pairs):
        return f"equal bits, {len(pairs)} steps"
    return f"differ by {max(abs(loss - other) for loss, other in pairs):.1e}"


def _copies(report: Row) -> str:
    rows = [
        [
            row["what"],
            f"{row['took_s']:.3f}",
            ABSENT if row["gb_s"] is None else f"{row['gb_s']:.2f}",
        ]
        for row in _rows(report, "copy")
    ]
    text = (
        "Steps are those of rank 0 of 8 ranks that are not there, with the network off. Saves and "
        "loads have half of the blocks, with the states of AdamW, on one rank."
    )
    return _table("Copies", text, ("what", "s", "GB/s"), rows)


def _files(report: Row) -> str:
    rows = [[f"`{row['name']}`", f"{row['nbytes']:,}"] for row in _rows(report, "file")]
    return _table("Files", "", ("file", "bytes"), rows)


def _left_out(report: Row) -> str:
    """What this device cannot show, by name."""
    names = [row["what"] for row in _rows(report, "left_out")]
    for part in report["parts"]:
        names += [
            f"{part['part']}, {row['line']}: {row['left_out']}"
            for row in part["results"]
            if row.get("left_out")
        ]
    if report["machine"] is not None and report["device"] != "cuda":
        names.append(
            "MFU, Python of a unit, kernels, host waits, memory and clocks: no CUDA device"
        )
    if not names:
        return ""
    return "\n".join(["## Left out", "", *(f"- {name}" for name in dict.fromkeys(names))])


def _matmul(report: Row) -> float | None:
    """The measured rate of a matrix product, in TFLOP/s."""
    values = [row["value"] for row in _rows(report, "speed") if "TFLOP" in row["what"]]
    return values[0] if values else None


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _count(value: int | None) -> str:
    return ABSENT if value is None else f"{value:,}"


def _gib(nbytes: int | None) -> str:
    return ABSENT if nbytes is None else f"{nbytes / 2**30:.2f}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
