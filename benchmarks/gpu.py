"""What a machine with a GPU can say of echelon in twenty minutes, the most telling first.

    make gpu                                        or
    python3 benchmarks/gpu.py [--minutes 9] [--only steps] [--device cpu --tiny]

For a bare machine without a network: it needs a Python with torch, installs nothing, and takes this
checkout as it is. Each part runs in a process of its own with a limit of its own; what fails or
hangs is noted, and the next one runs. ``gpu.json`` and ``gpu.md`` are written anew after each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_page import page_of

__all__ = ["Part", "main", "parts_of", "run_part"]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / ".gpu-packages"  # what the machine lacks, brought along; see docs/cuda.md
NEEDED = ("numpy", "safetensors", "xxhash", "rich", "typer", "cloudpickle")
TAIL = 3000  # characters of the output of a part that failed

PROBE = """
import importlib.metadata as m, json, os, platform, sys
found = {"python": platform.python_version(), "executable": sys.executable, "cores": os.cpu_count()}
import torch
found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "machine": platform.machine()}
found["available"] = torch.cuda.is_available()
if found["available"]:
    one = torch.cuda.get_device_properties(0)
    found |= {"device": one.name, "device_bytes": one.total_memory}
    found |= {"capability": f"{one.major}.{one.minor}", "nccl": str(torch.cuda.nccl.version())}
versions = {}
for name in NAMES:
    try: versions[name] = m.version(name)
    except m.PackageNotFoundError: versions[name] = None
print("RESULT " + json.dumps(found | {"packages": versions}))
"""

# Most telling first. The names of steps are those of gpu_step.py.
STEPS_FIRST = ("one process alone", "echelon FSDP", "FSDP2")
STEPS_NEXT = ("echelon DDP", "PyTorch DDP")
STEPS_LAST = (
    "FSDP1",
    "echelon FSDP, float32 parts",
    "FSDP2, float32 parts",
    "echelon FSDP, offloaded",
    "FSDP2, offloaded",
    "echelon FSDP, ZeRO-2",
    "FSDP2, no reshard",
)


@dataclass(frozen=True)
class Part:
    """Something to run in a process of its own.

    Attributes:
        name: on the page; begins with its kind, ``tests`` or ``steps``.
        command: what follows the interpreter.
        limit_s: seconds after which it is killed.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float


def parts_of(device: str, tiny: bool) -> list[Part]:
    """All parts in their order."""
    where = ("--device", device)

    def tests(module: str, limit_s: float) -> Part:
        return Part(f"tests {module}", ("-m", "tests.cuda", *where, f"test_{module}"), limit_s)

    def steps(variant: str) -> Part:
        size = ("--tiny",) if tiny else ()
        script = str(ROOT / "benchmarks" / "gpu_step.py")
        return Part(f"steps {variant}", (script, variant, *where, *size), 90.0)

    return [
        tests("fsdp", 240.0),
        *map(steps, STEPS_FIRST),
        tests("ddp", 90.0),
        *map(steps, STEPS_NEXT),
        tests("pipeline", 90.0),
        tests("checkpoint", 90.0),
        *map(steps, STEPS_LAST),
        steps("profile"),
    ]


def run_part(part: Part, python: str, environ: dict[str, str], limit_s: float) -> dict[str, Any]:
    """What became of a part: its results so far, its exit code, and the end of its output."""
    start_s = time.monotonic()
    process = subprocess.Popen(
        [python, *part.command],
        cwd=ROOT,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        ending = f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        ending = f"killed after {limit_s:.0f} s"
        _kill(process)
        output, _ = process.communicate()
    finally:
        _kill(process)
    marked = [line for line in output.splitlines() if line.startswith("RESULT ")]
    return {
        "part": part.name,
        "seconds": round(time.monotonic() - start_s, 1),
        "ok": ending == "exit code 0",
        "ending": ending,
        "results": [json.loads(line.removeprefix("RESULT ")) for line in marked],
        "output": "" if ending == "exit code 0" else output[-TAIL:],
    }


def _kill(process: subprocess.Popen[str]) -> None:
    """End a part and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def candidates() -> list[str]:
    """Interpreters that may have torch, without repetition."""
    names = [os.environ.get("ECHELON_PYTHON", ""), str(ROOT / ".venv" / "bin" / "python")]
    names += [sys.executable, "python3", "python", *(f"python3.{n}" for n in range(11, 16))]
    names += ["/opt/conda/bin/python", "/usr/local/bin/python3", "/usr/bin/python3"]
    found = [shutil.which(name) for name in names if name]
    return list(dict.fromkeys(path for path in found if path is not None))


def chosen(device: str) -> tuple[str | None, list[dict[str, Any]]]:
    """The first interpreter that has what is wanted, and what was found in each."""
    rows = []
    for python in candidates():
        code = PROBE.replace("NAMES", repr(NEEDED))
        row = run_part(Part(python, ("-c", code), 90.0), python, dict(os.environ), 90.0)
        rows.append(row)
        found = row["results"][0] if row["results"] else {}
        recent = tuple(map(int, found.get("python", "0.0").split(".")[:2])) >= (3, 11)
        if recent and (found["available"] or device == "cpu"):
            return python, rows
    return None, rows


def environment(missing: list[str]) -> dict[str, str]:
    """Variables for the parts: they import this checkout, and what was brought along if needed."""
    path = [str(ROOT / "src"), str(ROOT), *([str(PACKAGES)] if missing else [])]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


def commit() -> str:
    """Of the checkout; a copy without its history is told by ECHELON_COMMIT."""
    if told := os.environ.get("ECHELON_COMMIT"):
        return told
    git = ("git", "-C", str(ROOT))
    try:
        found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return "unknown"
    if found.returncode:
        return "unknown"
    return found.stdout.strip()[:12] + (" with changes" if changed.stdout.strip() else "")


def write(report: dict[str, Any], folder: Path) -> None:
    """Write both files anew."""
    (folder / "gpu.json").write_text(json.dumps(report, indent=1))
    (folder / "gpu.md").write_text(page_of(report))


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; 1 if one fails."""
    parser = argparse.ArgumentParser(prog="gpu.py")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of 27 thousand parameters")
    parser.add_argument("--minutes", type=float, default=20.0, help="for all parts together")
    parser.add_argument("--only", default="", help="parts whose name holds this text")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu")
    options = parser.parse_args(arguments)
    start_s = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    python, looked = chosen(options.device)
    report: dict[str, Any] = {
        "commit": commit(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "device": options.device,
        "tiny": options.tiny,
        "interpreters": looked,
        "machine": looked[-1]["results"][0] if python is not None else None,
        "parts": [],
        "left_out": [],
    }
    write(report, options.out)
    if python is None:
        print(f"no Python here has torch with a device of {options.device!r}: {options.out}/gpu.md")
        return 1
    versions = report["machine"]["packages"]
    environ = environment([name for name, version in versions.items() if version is None])
    for part in parts_of(options.device, options.tiny):
        if options.only not in part.name:
            continue
        left_s = 60 * options.minutes - (time.monotonic() - start_s)
        if left_s < 5:
            report["left_out"].append(part.name)
        else:
            row = run_part(part, python, environ, min(part.limit_s, left_s))
            report["parts"].append(row)
            print(f"{part.name}: {row['ending']}, {row['seconds']} s", flush=True)
        write(report, options.out)
    print(f"the page is {options.out / 'gpu.md'}")
    return int(not all(row["ok"] for row in report["parts"]) or bool(report["left_out"]))


if __name__ == "__main__":
    sys.exit(main())
