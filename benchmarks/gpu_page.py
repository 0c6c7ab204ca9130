"""The page of a run on a GPU, in Markdown, from its JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["page_of"]

ALONE = "one process alone"
# Beside what each variant is compared with.
PEERS = {
    "echelon FSDP": "FSDP2",
    "FSDP1": "FSDP2",
    "echelon DDP": "PyTorch DDP",
    "echelon FSDP, float32 parts": "FSDP2, float32 parts",
    "echelon FSDP, offloaded": "FSDP2, offloaded",
    "echelon FSDP, ZeRO-2": "FSDP2, no reshard",
}


def page_of(report: Mapping[str, Any]) -> str:
    """The whole page."""
    blocks = [_head(report), _failures(report), _tests(report), _steps(report), _profile(report)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _head(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    where = "a GPU" if report["device"] == "cuda" else "the CPU, to try the parts: no GPU was used"
    lines = [f"# echelon on {where}", "", f"Commit {report['commit']}, {report['time']}.", ""]
    if machine is None:
        lines += ["No interpreter has what is needed:", ""]
        for row in report["interpreters"]:
            found = row["results"][0] if row["results"] else {}
            said = _last_line(row["output"]) or f"torch {found.get('torch')}, no device"
            lines.append(f"- `{row['part']}`: {said}")
        return "\n".join(lines)
    packages = machine["packages"]
    missing = [name for name, version in packages.items() if version is None]
    memory = machine.get("device_bytes")
    lines += [
        "| | |",
        "|---|---|",
        f"| device | {machine.get('device', 'CPU')} |",
        f"| memory of the device | {'' if memory is None else f'{memory / 2**30:.1f} GiB'} |",
        f"| torch, CUDA, NCCL | {machine['torch']}, {machine['cuda']}, {machine.get('nccl')} |",
        f"| Python | {machine['python']}, `{machine['executable']}` |",
        f"| cores, machine | {machine['cores']}, {machine['machine']} |",
        f"| packages that are not installed | {', '.join(missing) or 'none'} |",
    ]
    return "\n".join(lines)


def _failures(report: Mapping[str, Any]) -> str:
    lines = [f"- {name}: no time was left" for name in report["left_out"]]
    for row in report["parts"]:
        tests = [result for result in row["results"] if result.get("error")]
        lines += [f"- {row['part']}, {t['test']}: {_last_line(t['error'])}" for t in tests]
        if not row["ok"] and not (tests and row["ending"] == "exit code 1"):
            lines.append(f"- {row['part']}: {row['ending']}: {_last_line(row['output'])}")
    return "\n".join(["## What failed", "", *lines]) if lines else ""


def _tests(report: Mapping[str, Any]) -> str:
    rows = [row for row in report["parts"] if row["part"].startswith("tests ")]
    if not rows:
        return ""
    lines = ["## Tests", "", "| | passed | failed | s | ended with |", "|---|--:|--:|--:|---|"]
    for row in rows:
        failed = sum(bool(result["error"]) for result in row["results"])
        passed = len(row["results"]) - failed
        name = row["part"].removeprefix("tests ")
        lines.append(f"| {name} | {passed} | {failed} | {row['seconds']} | {row['ending']} |")
    return "\n".join(lines)


def _steps(report: Mapping[str, Any]) -> str:
    found = {
        result["variant"]: result
        for row in report["parts"]
        for result in row["results"]
        if "variant" in result
    }
    if not found:
        return ""
    one = next(iter(found.values()))
    title = (
        f"A model built as Llama is, {one['num_params'] / 1e6:,.1f} M parameters in bfloat16, "
        f"{one['tokens']:,} tokens a step, AdamW(foreach), one rank; medians of ten steps. "
        "`issue` is the time until forward and backward were issued, `CPU` the processor time of "
        "that. What a unit adds to it is taken beside one process alone."
    )
    columns = (
        "step ms | × its peer | tokens/s | peak GiB | issue ms | CPU ms | CPU µs a unit | loss"
    )
    lines = ["## Steps", "", title, "", f"| | {columns} |", "|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for name, row in found.items():
        peer = found.get(PEERS.get(name, ""))
        ratio = "" if peer is None else f"{row['step_ms'] / peer['step_ms']:.2f}"
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}"
        unit = ""
        if ALONE in found and name != ALONE:
            unit = f"{1e3 * (row['cpu_ms'] - found[ALONE]['cpu_ms']) / row['num_units']:.0f}"
        speed = f"{1e3 * row['tokens'] / row['step_ms']:,.0f}"
        lines.append(
            f"| {name} | {row['step_ms']:.2f} | {ratio} | {speed} | {peak} | "
            f"{row['issue_ms']:.2f} | {row['cpu_ms']:.2f} | {unit} | {row['last_loss']:.4f} |"
        )
    return "\n".join(lines)


def _profile(report: Mapping[str, Any]) -> str:
    tables = [
        result["profile"]
        for row in report["parts"]
        for result in row["results"]
        if "profile" in result
    ]
    if not tables:
        return ""
    return "\n".join(
        ["## A step of echelon's FSDP, profiled", "", "```", tables[0].rstrip(), "```"]
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
