"""What a machine with one GPU can prove of echelon in nine minutes, the most telling first.

    make gpu                                        or
    python3 benchmarks/gpu.py [--minutes 9] [--only smoke] [--device cpu --tiny] [--out FOLDER]

For a bare machine without a network: it needs a Python with torch, installs nothing, and takes this
checkout as it is. Each part runs in a process of its own with a limit of its own; what fails or
hangs is noted, and the next one runs. ``gpu.json`` and ``gpu.md`` are written anew after each part,
``gpu.log`` has what all parts have printed, and nothing is written outside of the folder ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from gpu_page import page_of

__all__ = ["Part", "main", "parts_of", "run_part"]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / ".gpu-packages"  # what the machine lacks, brought along; see docs/cuda.md
NEEDED = ("numpy", "safetensors", "xxhash", "rich", "typer")
TAIL = 3000  # characters of the output of a part that failed, on the page and in the JSON
KEPT = 400_000  # characters of the output of each part in the log
MINUTES = 9.0
RESERVE_S = 6.0  # to end what runs and to write the page
SHARES = 4  # processes that run tests at the same time
DEVICE_LOST = 75  # as in tests/cuda/lines.py, which a Python without torch cannot import
STACK_S = 1.5  # for a process that is killed to print where it is
_running: set[subprocess.Popen[bytes]] = set()

PROBE = """
import importlib.metadata as m, json, os, platform, sys
found = {"python": platform.python_version(), "executable": sys.executable, "cores": os.cpu_count()}
import torch
found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "machine": platform.machine()}
found["available"] = torch.cuda.is_available()
versions = {}
for name in NAMES:
    try: versions[name] = m.version(name)
    except m.PackageNotFoundError: versions[name] = None
print("RESULT " + json.dumps(found | {"packages": versions}))
"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Something to run in a process of its own.

    Attributes:
        name: on the page.
        stage: parts of one stage run at the same time.
        command: what follows the interpreter.
        limit_s: seconds after which it is killed.
        resumes: whether it prints BEGIN and RESULT for each line, and goes on with ``--after``.
    """

    name: str
    stage: str
    command: tuple[str, ...]
    limit_s: float
    resumes: bool = False


def parts_of(device: str, tiny: bool, out: Path) -> list[Part]:
    """All parts in their order: the first five minutes hold the verdict."""
    where = ("--device", device, *(("--tiny",) if tiny else ()))

    def script(name: str, limit_s: float, *more: str, resumes: bool = False) -> Part:
        file = str(ROOT / "benchmarks" / f"gpu_{name.replace(' ', '_')}.py")
        command = (file, *where, *more)
        return Part(name=name, stage=name, command=command, limit_s=limit_s, resumes=resumes)

    def tests(name: str, *more: str) -> Part:
        command = ("-m", "tests.cuda", "--device", device, *more)
        return Part(name=name, stage="tests", command=command, limit_s=90.0, resumes=True)

    # A try on the CPU takes a few tests: the suite runs all of them there.
    count = SHARES if not tiny else 13 * SHARES
    shares = [tests(f"tests {i + 1}", "--share", f"{i}/{count}") for i in range(SHARES)]
    return [
        script("probe", 40.0),
        script("smoke", 60.0, resumes=True),
        *(shares[:1] if tiny else shares),
        tests("tests under CSAN", "--sanitizer", "test_fsdp", "test_ddp"),
        script("races", 80.0, resumes=True),
        script("world of one", 90.0, resumes=True),
        script("many ranks", 150.0, resumes=True),
        script("features", 75.0, resumes=True),
        script("traces", 60.0, resumes=True),
        script("copies", 60.0, resumes=True),
    ]


def run_part(
    part: Part, python: str, environ: dict[str, str], limit_s: float, log: Path | None = None
) -> dict[str, Any]:
    """What became of a part: its results so far, how it ended, and the end of its output.

    If a line of a part that resumes ends its process, the next process goes on behind that line.
    """
    start_s = time.monotonic()
    results: list[dict[str, Any]] = []
    output, num_begun = "", 0
    while True:
        more = ("--after", str(num_begun)) if num_begun else ()
        left_s = limit_s - (time.monotonic() - start_s)
        ending, latest = _run_process([python, *part.command, *more], environ, max(left_s, 1.0))
        output += latest
        begun = [line[6:] for line in latest.splitlines() if line.startswith("BEGIN ")]
        rows = list(results_of(latest))
        results += rows
        if not (part.resumes and begun):
            break
        num_begun += len(begun)
        is_torn = sum("line" in row for row in rows) < len(begun)
        if is_torn:
            error = f"{latest[-TAIL:]}\n{ending} in this line"
            results.append({"line": begun[-1], "error": error, "left_out": "", "seconds": None})
        if ending.startswith("killed") or not (is_torn or ending == f"exit code {DEVICE_LOST}"):
            break
    is_ok = ending == "exit code 0" and not any(row.get("error") for row in results)
    if log is not None:
        with log.open("a", errors="replace") as file:
            file.write(f"==== {part.name}: {ending}\n{output[-KEPT:]}\n")
    return {
        "part": part.name,
        "stage": part.stage,
        "seconds": round(time.monotonic() - start_s, 1),
        "ok": is_ok,
        "ending": ending,
        "results": results,
        "output": "" if is_ok else output[-TAIL:],
    }


def results_of(output: str) -> Iterator[dict[str, Any]]:
    """The results that a part has printed; the last one may be torn where it was killed."""
    for line in output.splitlines():
        if line.startswith("RESULT "):
            with suppress(ValueError):
                yield json.loads(line.removeprefix("RESULT "))


def _run_process(command: list[str], environ: dict[str, str], limit_s: float) -> tuple[str, str]:
    """How a process ended, and all that it has printed.

    Its output is a file, so that what it has started cannot hold it open after its end.
    """
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(process)
        try:
            process.wait(limit_s)
            ending = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            ending = f"killed after {limit_s:.0f} s"
            process.send_signal(signal.SIGABRT)  # faulthandler prints all stacks
            with suppress(subprocess.TimeoutExpired):
                process.wait(STACK_S)
        finally:
            _kill(process)
            process.wait()
            _running.discard(process)
        return ending, _text_of(file)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a part and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(number: int, frame: object) -> None:
    """End all parts with this process: they are in sessions of their own."""
    for process in list(_running):
        _kill(process)
    os._exit(128 + number)


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def candidates() -> list[str]:
    """Interpreters that may have torch, without repetition."""
    names = [os.environ.get("ECHELON_PYTHON", ""), str(ROOT / ".venv" / "bin" / "python")]
    names += [sys.executable, "python3", "python", *(f"python3.{n}" for n in range(11, 16))]
    names += ["/opt/conda/bin/python", "/usr/local/bin/python3", "/usr/bin/python3"]
    paths = [shutil.which(name) for name in names if name]
    return list(dict.fromkeys(path for path in paths if path is not None))


def chosen(device: str) -> tuple[str | None, list[dict[str, Any]]]:
    """The first interpreter that has what is wanted, and what was found in each."""
    rows = []
    for python in candidates():
        code = PROBE.replace("NAMES", repr(NEEDED))
        probe = Part(name=python, stage="interpreters", command=("-c", code), limit_s=90.0)
        row = run_part(probe, python, dict(os.environ), probe.limit_s)
        rows.append(row)
        facts = row["results"][0] if row["results"] else {}
        recent = tuple(map(int, facts.get("python", "0.0").split(".")[:2])) >= (3, 11)
        if recent and (facts["available"] or device == "cpu"):
            return python, rows
    return None, rows


def environment(missing: list[str], out: Path) -> dict[str, str]:
    """Variables for the parts: they import this checkout, and what was brought along if needed."""
    path = [str(ROOT / "src"), str(ROOT), *([str(PACKAGES)] if missing else [])]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # otherwise matrix products are not deterministic
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "4",  # several processes share the cores
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        **os.environ,
        "ECHELON_TIMEOUT": "20",  # so that a rank that waits ends before its line is killed
        "GPU_OUT": str(out),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
    }


def commit() -> str:
    """Of the checkout; a copy without its history is told by ECHELON_COMMIT."""
    if named := os.environ.get("ECHELON_COMMIT"):
        return named
    git = ("git", "-C", str(ROOT))
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip()[:12] + (" with changes" if changed.stdout.strip() else "")


def write(report: dict[str, Any], out: Path) -> None:
    """Write both files anew; if the page cannot be made, the next part runs all the same."""
    (out / "gpu.json").write_text(json.dumps(report, indent=1))
    try:
        page = page_of(report)
    except Exception:
        page = f"# The page could not be made from gpu.json\n\n```\n{traceback.format_exc()}```\n"
    (out / "gpu.md").write_text(page)


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; 1 if one fails."""
    parser = argparse.ArgumentParser(prog="gpu.py")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of some thousand parameters")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts together")
    parser.add_argument("--only", default="", help="parts whose name has this text")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu")
    options = parser.parse_args(arguments)
    start_s = time.monotonic()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    log = out / "gpu.log"
    log.write_text("")
    python, looked = chosen(options.device)
    report: dict[str, Any] = {
        "commit": commit(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "device": options.device,
        "tiny": options.tiny,
        "interpreters": looked,
        "machine": looked[-1]["results"][0] if python is not None else None,
        "parts": [],
        "no_time_left": [],
    }
    write(report, out)
    if python is None:
        print(f"no Python here has torch with a device of {options.device!r}: {out}/gpu.md")
        return 1
    versions = report["machine"]["packages"]
    environ = environment([name for name, version in versions.items() if version is None], out)
    parts = [p for p in parts_of(options.device, options.tiny, out) if options.only in p.name]
    end_s = start_s + 60 * options.minutes - RESERVE_S
    for _, stage in groupby(parts, key=lambda part: part.stage):
        _run_stage(list(stage), python, environ, end_s, report, out)
    print(f"the page is {out / 'gpu.md'}")
    return int(not all(row["ok"] for row in report["parts"]) or bool(report["no_time_left"]))


def _run_stage(
    parts: list[Part],
    python: str,
    environ: dict[str, str],
    end_s: float,
    report: dict[str, Any],
    out: Path,
) -> None:
    """Run some parts at the same time, and write the page after each."""
    left_s = end_s - time.monotonic()
    if left_s < 2:
        report["no_time_left"] += [part.name for part in parts]
        write(report, out)
        return
    log = out / "gpu.log"
    with ThreadPoolExecutor(len(parts)) as pool:
        runs = [
            pool.submit(run_part, part, python, environ, min(part.limit_s, left_s), log)
            for part in parts
        ]
        for run in as_completed(runs):
            row = run.result()
            report["parts"].append(row)
            print(f"{row['part']}: {row['ending']}, {row['seconds']} s", flush=True)
            write(report, out)


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, _end)
    sys.exit(main())
